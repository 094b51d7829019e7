"""The engines that bench.py compares: one step of the same model under each, p = 2."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from helixpipe.model.device import prepare

prepare()  # before megatron-core is imported, whose notices it silences

from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import schedules as core_schedules
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from helixpipe.costs.by_hand import OpTimes
from helixpipe.lowering.lower import lower
from helixpipe.model import GPTOptions, Microbatch, PipelineModel, UnitContext
from helixpipe.model.attention import CoreAttention
from helixpipe.model.ends import loss_sum
from helixpipe.model.layers import piece_of
from helixpipe.program.program import Piece, Program, even_stages, parse_rows
from helixpipe.runtime.executor import Executor, Step
from helixpipe.runtime.gloo import GlooTransport
from helixpipe.runtime.recording import merge_records
from schedules import Shape, build

CONTEXT = UnitContext(step=0, microbatch=0)

Pairs = list[tuple[str, str]]
"""(ours, the engine it is compared with)."""


class Problem:
    """Model, data and this rank's place; every engine gets the same."""

    def __init__(self, size: list[int], vocabulary: int = 512):
        self.size = size
        self.layers, hidden, heads, groups, ffn, self.sequence, self.micro, self.count = size
        self.rank = parallel_state.get_pipeline_model_parallel_rank()
        self.group = parallel_state.get_pipeline_model_parallel_group()
        self.config = TransformerConfig(
            num_layers=self.layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            num_query_groups=groups,
            ffn_hidden_size=ffn,
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            pipeline_model_parallel_size=2,
            pipeline_dtype=torch.float32,
            use_cpu_initialization=True,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            cuda_graph_scope=None,
            deallocate_pipeline_outputs=True,
        )
        self.gpt = GPTOptions(
            vocab_size=vocabulary,
            max_sequence_length=self.sequence,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )
        generator = torch.Generator().manual_seed(1)
        shape = (self.count, self.micro, self.sequence)
        self.tokens, self.labels = (torch.randint(0, vocabulary, shape, generator=generator) for _ in range(2))
        self.mask = torch.ones(self.micro, self.sequence)
        self.scale = 1.0 / (self.micro * self.sequence * self.count)

    def microbatch(self, index: int) -> Microbatch:
        return Microbatch(self.tokens[index], self.labels[index], self.mask)

    def model(self, pieces: Sequence[Piece], copies: Mapping[Piece, int] | None = None) -> PipelineModel:
        return PipelineModel(self.config, self.gpt, pieces, copies=copies or {})

    def loss(self, output: Tensor, labels: Tensor) -> Tensor:
        """The loss sum from the last stage's output [s, b, v], where an engine takes it apart from the model."""
        return loss_sum(output, Microbatch(labels, labels, self.mask), CONTEXT)

    def program(self, schedule: str, options: Any = None, **shape: Any) -> Program:
        """options: the schedule's own. shape: what else `Shape` has besides ranks, microbatches and layers."""
        return build(schedule, Shape(2, self.count, self.layers, **shape), options)


def start(size: list[int], vocabulary: int = 512) -> Problem:
    """Join the other rank; everything is ready for the engines below."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(1, 2, create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1)
    core_schedules.torch = _TorchOnCpu()  # type: ignore[attr-defined]
    return Problem(size, vocabulary)


class Engine:
    """One step of forward and backward. parameters: this rank's, by their names in the whole model, which all engines
    share; they hold the gradients."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], step: Callable[[], Any]):
        self.parameters, self.step = parameters, step

    def gradients(self) -> dict[str, Tensor | None]:
        """Gradients of this rank's parameters, whole."""
        return {name: parameter.grad for name, parameter in self.parameters.items()}

    def clear(self) -> None:
        """Gradients become zero; those that are not there yet stay so."""
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad.zero_()


# -------------------------------------------------------------------------------------------------------------- ours


class OurEngine(Engine):
    """A program under our executor, and the sum of gradients over copies of replicated stages."""

    def __init__(self, problem: Problem, program: Program):
        copies = program.copies(problem.rank)
        model = problem.model(program.pieces_of_rank(problem.rank), copies)
        transport = GlooTransport(problem.group, torch.device("cpu"))
        self.executor = Executor(lower(program, receive_ahead=1), problem.rank, model, transport)
        self._data = Step(
            iteration=0,
            microbatch_number=lambda index: index,
            batch=problem.microbatch,
            root_gradient=lambda index: torch.tensor(problem.scale),
            micro_batch_size=problem.micro,
            seq_length=problem.sequence,
        )
        self._group = problem.group
        named = dict(model.named_parameters())
        self._copies = [parameter for name, parameter in sorted(named.items()) if piece_of(name) in copies]
        super().__init__(named, self._step)

    def _step(self) -> None:
        self.executor.run(self._data)
        for parameter in self._copies:  # untied: both ranks hold them
            dist.all_reduce(parameter.grad, group=self._group)

    @property
    def program(self) -> Program:
        return self.executor.lowered.program

    def op_times(self, steps: int = 3) -> OpTimes:
        """What the ops take here, in seconds: medians over microbatches and recorded steps."""
        self.step()  # the first step is slower
        times: dict[tuple[str, int, int], list[float]] = {}
        messages = []
        for _ in range(steps):
            records: list[Any] = [None, None]
            dist.all_gather_object(records, self.executor.run(self._data, record=True)[1])
            timeline = merge_records(self.executor.lowered, records, "bench")
            for event in timeline.ops:
                times.setdefault((event.op.kind, event.op.stage, event.op.chunk), []).append(event.end - event.start)
            messages += [message.end - message.start for message in timeline.messages]
        medians = {key: statistics.median(values) for key, values in times.items()}
        # A message that was waited for late looks slow: the quickest says what one takes.
        return OpTimes(medians, min(messages))


def found(problem: Problem, schedule: str, **shape: Any) -> Program:
    """A schedule found from what its ops take here, recorded while it runs as found without costs."""
    costs = OurEngine(problem, problem.program(schedule, **shape)).op_times()
    return problem.program(schedule, costs=costs, **shape)


# ----------------------------------------------------------------------------------------------------- megatron-core


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


class _TorchOnCpu:
    """torch, but `zeros(device="cuda")` is on the CPU: the one literal of megatron-core's schedule function, replaced
    there alone so that its model runs as fast as it can."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(*args, **{**kwargs, "device": "cpu"})


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
        batch = next(iterator)
        if whole:
            output = model(batch.tokens, positions, None, labels=batch.labels)

            def loss(losses: Tensor) -> Any:
                value = torch.sum(losses * batch.loss_mask) * (problem.scale * problem.count)
                return value, {"lm loss": value.detach()}
        else:
            output = model(batch)

            def loss(total: Tensor) -> Any:
                value = total * (problem.scale * problem.count)
                return value, {"lm loss": value.detach()}

        return output, loss

    def step() -> None:
        core_schedules.forward_backward_pipelining_without_interleaving(
            forward_step_func=forward_step,
            data_iterator=iter([problem.microbatch(i) for i in range(problem.count)]),
            model=module,
            num_microbatches=problem.count,
            seq_length=problem.sequence,
            micro_batch_size=problem.micro,
        )

    return Engine(parameters, step)


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
    return _torch(problem, [problem.rank], 2, lambda stages, **options: Schedule1F1B(stages[0], **options))[0]


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
    return engine, Program(type(schedule).__name__, even_stages(problem.layers, count), rows, problem.count)


def _plain_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, **unused: Any) -> Tensor:
    return torch.nn.functional.linear(input, weight, bias)
