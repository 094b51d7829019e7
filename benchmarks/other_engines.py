"""megatron-core's and torch's engines on the same model and data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from helixpipe.model.device import prepare
from helixpipe.program.workload import uniform

prepare()  # before megatron-core is imported, whose notices it silences

from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import schedules as core_schedules
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from benchmarks.engines import CONTEXT, Engine, Problem
from helixpipe.model import Microbatch, PipelineModel
from helixpipe.model.attention.core_attention import CoreAttention
from helixpipe.program.program import Program
from helixpipe.program.stages import Piece, even_stages
from helixpipe.program.text import parse_rows


class _Attention(torch.nn.Module):
    """Our core attention under megatron-core's calling convention, so that both models use the same kernel."""

    def __init__(self, config: TransformerConfig, **unused: Any):
        super().__init__()
        self.attention = CoreAttention(config)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *unused: Any, **also_unused: Any) -> Tensor:
        return self.attention(query, key, value, True)


class _Stage(MegatronModule):
    """Our pieces of one rank as megatron-core's schedule calls a model."""

    def __init__(self, config: TransformerConfig, model: PipelineModel, pieces: Any):
        super().__init__(config)
        self.model, self.pieces, self.input = model, pieces, ()
        self.share_embeddings_and_output_weights = False
        self.model_type = ModelType.encoder_or_decoder

    def set_input_tensor(self, tensors: Any) -> None:
        tensors = tensors if isinstance(tensors, list) else [tensors]
        self.input = tuple(tensor for tensor in tensors if tensor is not None)

    def forward(self, batch: Microbatch) -> Tensor:
        return self.model.run(self.pieces, self.input, batch, CONTEXT)[0]


def megatron_core(problem: Problem, whole: bool) -> Engine:
    """megatron-core's own 1F1B, on its GPTModel (`whole`) or on our pieces, which shows the schedule function alone."""
    first, last = problem.rank == 0, problem.rank == 1
    pieces = problem.program("1f1b").pieces_of_rank(problem.rank)
    same = problem.model(pieces)
    if whole:
        spec = get_gpt_layer_local_spec(normalization="RMSNorm")
        spec.submodules.self_attention.submodules.core_attention = _Attention
        module: torch.nn.Module = GPTModel(
            problem.config,
            spec,
            problem.gpt.vocab_size,
            problem.sequence,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
        )
        offset = problem.rank * problem.layers // 2
        state = same.state_dict().items()
        module.load_state_dict({_shifted(name, -offset): value for name, value in state if value is not None})
        parameters = {_shifted(name, offset): parameter for name, parameter in module.named_parameters()}
        positions = torch.arange(problem.sequence).expand(problem.micro, -1)
    else:
        module = _Stage(problem.config, same, pieces)
        parameters = dict(same.named_parameters())

    def forward_step(iterator: Any, model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        if not whole:
            return _forward_step(problem, iterator, model)
        batch = next(iterator)

        def loss(losses: Tensor) -> Any:
            value = torch.sum(losses * batch.loss_mask) * (problem.scale * problem.count)
            return value, {"lm loss": value.detach()}

        return model(batch.tokens, positions, None, labels=batch.labels), loss

    def step() -> None:
        core_schedules.forward_backward_pipelining_without_interleaving(
            forward_step_func=forward_step, data_iterator=_batches(problem), model=module, **_core_sizes(problem)
        )

    return Engine(parameters, step)


def _forward_step(problem: Problem, iterator: Any, model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """megatron-core's `forward_step_func` for our pieces, whose head gives the loss."""

    def loss(losses: Tensor) -> Any:
        value = losses * (problem.scale * problem.count)
        return value, {"lm loss": value.detach()}

    return model(next(iterator)), loss


def _batches(problem: Problem) -> Iterator[Microbatch]:
    return iter([problem.microbatch(index) for index in range(problem.count)])


def _core_sizes(problem: Problem) -> dict[str, int]:
    return {
        "num_microbatches": problem.count,
        "seq_length": problem.sequence,
        "micro_batch_size": problem.micro,
    }


def _shifted(name: str, by: int) -> str:
    """The name of a parameter with another number of its layer."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(int(parts[2]) + by)
    return ".".join(parts)


# ----------------------------------------------------------------------------------------- torch.distributed.pipelining


class _TorchStage(torch.nn.Module):
    """Our pieces of one stage as torch.distributed.pipelining calls it; the loss is the schedule's own."""

    def __init__(self, problem: Problem, pieces: Sequence[Piece]):
        super().__init__()
        self.pieces = pieces
        self.model = problem.model(pieces)
        self.mask = problem.mask

    def forward(self, tensor: Tensor) -> Tensor:
        batch, pieces = Microbatch(tensor, tensor, self.mask), self.pieces
        inputs = () if pieces[0].kind == "embed" else (tensor,)
        if pieces[-1].kind != "head":
            return self.model.run(pieces, inputs, batch, CONTEXT)[0]
        return self.model.logits(*self.model.run(pieces[:-1], inputs, batch, CONTEXT))


def torch_1f1b(problem: Problem) -> Engine:
    """torch's Schedule1F1B on our pieces."""
    return _torch_single(problem, Schedule1F1B)


def torch_gpipe(problem: Problem) -> Engine:
    """torch's ScheduleGPipe on our pieces."""
    return _torch_single(problem, ScheduleGPipe)


def _torch_single(problem: Problem, make: Callable[..., Any]) -> Engine:
    """A schedule of torch's with one stage a rank."""
    return _torch(problem, [problem.rank], 2, lambda stages, **options: make(stages[0], **options))[0]


def torch_interleaved_1f1b(problem: Problem) -> Engine:
    """torch's ScheduleInterleaved1F1B, stages r and 2 + r on rank r."""
    return _torch(problem, [problem.rank, 2 + problem.rank], 4, ScheduleInterleaved1F1B)[0]


def torch_zbv(problem: Problem, plain: bool = True) -> tuple[Engine, Program]:
    """torch's ScheduleZBVZeroBubble, two stages a rank in a V, and its order as a program of ours."""
    return _torch(problem, [problem.rank, 3 - problem.rank], 4, ScheduleZBVZeroBubble, plain)


def torch_interleaved(problem: Problem) -> tuple[Engine, Program]:
    """torch's ScheduleInterleavedZeroBubble, stages r and 2 + r on rank r, and its order as a program of ours."""
    return _torch(problem, [problem.rank, 2 + problem.rank], 4, ScheduleInterleavedZeroBubble, plain=True)


def _torch(
    problem: Problem, own: Sequence[int], count: int, make: Callable[..., Any], plain: bool = False
) -> tuple[Engine, Program]:
    """A schedule of torch's over `count` stages of our pieces, `own` of which are here.

    plain: linear layers are torch's own. torch splits a backward by asking autograd for some gradients only, and then
    for the others. A function of one's own, such as megatron-core's linear layer, computes all of them each time.
    """
    shape = (problem.sequence, problem.micro, problem.config.hidden_size)
    hidden = torch.empty(shape, requires_grad=True)
    logits = torch.empty(problem.sequence, problem.micro, problem.gpt.vocab_size, requires_grad=True)
    pieces = [stage.pieces for stage in even_stages(problem.layers, count)]
    modules = [_TorchStage(problem, pieces[index]) for index in own]
    for module in (part for stage in modules for part in stage.modules()):
        if plain and isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
            module._forward_impl = _plain_linear
    stages = [
        PipelineStage(
            module,
            index,
            count,
            torch.device("cpu"),
            input_args=(problem.tokens[0] if index == 0 else hidden,),
            output_args=(logits if index == count - 1 else hidden,),
            group=problem.group,
        )
        for index, module in zip(own, modules, strict=True)
    ]

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        return problem.loss(output, labels) * (problem.scale * problem.count)

    schedule = make(stages, n_microbatches=problem.count, loss_fn=loss, scale_grads=True)
    arguments = [problem.tokens.flatten(0, 1)] if 0 in own else []
    target = problem.labels.flatten(0, 1) if count - 1 in own else None
    parameters = {name: value for module in modules for name, value in module.model.named_parameters()}
    engine = Engine(parameters, lambda: schedule.step(*arguments, target=target, return_outputs=False))
    order = getattr(schedule, "pipeline_order_with_comms", None) or schedule._get_pipeline_order()
    rows = parse_rows([[str(action) for action in order[rank] if action is not None] for rank in range(2)])
    return engine, Program(type(schedule).__name__, even_stages(problem.layers, count), rows, uniform(problem.count))


def _plain_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, **unused: Any) -> Tensor:
    return torch.nn.functional.linear(input, weight, bias)
