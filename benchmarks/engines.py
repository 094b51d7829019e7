"""What each of bench.py's two ranks runs: one step of the same model under several pipeline engines, in turn."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from helixpipe.runtime.device import prepare

prepare()  # before megatron-core is imported, whose notices it silences

from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import schedules as core_schedules
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from helixpipe.costs import PieceTimes
from helixpipe.lowering import lower
from helixpipe.model import GPTOptions, Microbatch, PipelineModel, UnitContext
from helixpipe.model.attention import CoreAttention
from helixpipe.model.ends import loss_sum
from helixpipe.runtime.accounting import SavedBytes
from helixpipe.runtime.executor import Executor, Step
from helixpipe.runtime.transport import GlooTransport
from helixpipe.simulator import simulate
from schedules import Shape, build

OURS = "ours, 1f1b"
CONTEXT = UnitContext(step=0, microbatch=0)


class Problem:
    """Model, data and this rank's place; every engine gets the same."""

    def __init__(self, size: list[int]):
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
            vocab_size=512,
            max_sequence_length=self.sequence,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )
        generator = torch.Generator().manual_seed(1)
        shape = (self.count, self.micro, self.sequence)
        self.tokens, self.labels = (torch.randint(0, 512, shape, generator=generator) for _ in range(2))
        self.mask = torch.ones(self.micro, self.sequence)
        self.scale = 1.0 / (self.micro * self.sequence * self.count)

    def microbatch(self, index: int) -> Microbatch:
        return Microbatch(self.tokens[index], self.labels[index], self.mask)

    def model(self, pieces: Any) -> PipelineModel:
        return PipelineModel(self.config, self.gpt, pieces)

    def program(self, schedule: str, v: int | None = None) -> Any:
        return build(schedule, Shape(2, self.count, self.layers, virtual_stages=v))


class Engine:
    """One step of forward and backward; `module` holds the gradients."""

    def __init__(self, module: torch.nn.Module, step: Callable[[], None]):
        self.module, self.step = module, step


def ours(problem: Problem, schedule: str = "1f1b", v: int | None = None) -> Engine:
    program = problem.program(schedule, v)
    model = problem.model(program.pieces_of_rank(problem.rank))
    transport = GlooTransport(problem.group, torch.device("cpu"))
    executor = Executor(lower(program, receive_ahead=1), problem.rank, model, transport)
    step = Step(
        iteration=0,
        microbatch_number=lambda index: index,
        batch=problem.microbatch,
        root_gradient=lambda index: torch.tensor(problem.scale),
        micro_batch_size=problem.micro,
        seq_length=problem.sequence,
    )
    return Engine(model, lambda: executor.run(step) and None)


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
        renamed = {}
        for name, value in same.state_dict().items():
            parts = name.split(".")
            if parts[:2] == ["decoder", "layers"]:
                parts[2] = str(int(parts[2]) - offset)
            renamed[".".join(parts)] = value
        module.load_state_dict({k: v for k, v in renamed.items() if v is not None})
        positions = torch.arange(problem.sequence).expand(problem.micro, -1)
    else:
        module = _Stage(problem.config, same, pieces)

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

    return Engine(module, step)


class _TorchStage(torch.nn.Module):
    """Our pieces of one rank as torch.distributed.pipelining calls a stage; the loss is the schedule's own."""

    def __init__(self, problem: Problem):
        super().__init__()
        self.pieces = problem.program("1f1b").pieces_of_rank(problem.rank)
        self.model = problem.model(self.pieces)
        self.mask = problem.mask

    def forward(self, tensor: Tensor) -> Tensor:
        if self.pieces[0].kind == "embed":
            return self.model.run(self.pieces, (), Microbatch(tensor, tensor, self.mask), CONTEXT)[0]
        hidden = self.model.run(self.pieces[:-1], (tensor,), Microbatch(tensor, tensor, self.mask), CONTEXT)
        return self.model.logits(*hidden)


def torch_pipelining(problem: Problem) -> Engine:
    """torch's Schedule1F1B on our pieces."""
    module = _TorchStage(problem)
    shape = (problem.sequence, problem.micro, problem.config.hidden_size)
    hidden = torch.empty(shape, requires_grad=True)
    logits = torch.empty(problem.sequence, problem.micro, problem.gpt.vocab_size, requires_grad=True)
    inputs, outputs = (problem.tokens[0], hidden) if problem.rank == 0 else (hidden, logits)
    stage = PipelineStage(
        module, problem.rank, 2, torch.device("cpu"), input_args=(inputs,), output_args=(outputs,), group=problem.group
    )

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        return loss_sum(output, Microbatch(labels, labels, problem.mask), CONTEXT) * (problem.scale * problem.count)

    schedule = Schedule1F1B(stage, problem.count, loss_fn=loss, scale_grads=True)

    def step() -> None:
        if problem.rank == 0:
            schedule.step(problem.tokens.flatten(0, 1))
        else:
            schedule.step(target=problem.labels.flatten(0, 1), return_outputs=False)

    return Engine(module, step)


def timed(engine: Engine) -> float:
    """Seconds of one step over both ranks, from a common start to the later end."""
    engine.module.zero_grad(set_to_none=False)
    dist.barrier()
    start = time.perf_counter()
    engine.step()
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def peaks(engine: Engine) -> list[int]:
    """Most bytes autograd kept at once on each rank during a step."""
    with SavedBytes(ignore=engine.module.parameters()) as account:
        engine.step()
    assert account.now == 0, f"{account.now} bytes are still kept after the step"
    every: list[Any] = [None, None]
    dist.all_gather_object(every, account.peak)
    return every


def gradients(engine: Engine) -> list[Tensor]:
    """Gradients in an order that all engines share: by shape, then by norm."""
    values = [parameter.grad for parameter in engine.module.parameters()]
    return sorted(values, key=lambda value: (tuple(value.shape), float(value.norm())))  # type: ignore[union-attr]


def largest_difference(engines: dict[str, Engine]) -> float:
    """Of any gradient from ours, relative to the gradient's largest element; also a check that all compute the same."""
    for engine in engines.values():
        timed(engine)
    expected = gradients(engines[OURS])
    worst = torch.zeros((), dtype=torch.float64)
    for engine in engines.values():
        for mine, other in zip(expected, gradients(engine), strict=True):
            worst = torch.maximum(worst, ((mine - other).abs().max() / mine.abs().max()).double())
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)


def memory(problem: Problem) -> dict[str, Any]:
    """Peak bytes by the simulator (microbatch-layers times the bytes of one, plus the ends of the model), and measured.

    The bytes of one microbatch-layer, of embed and of head are measured alone; how many are alive at once is simulated.
    """
    unit = problem.model(problem.program("1f1b").pieces_of_rank(problem.rank))
    one = _bytes_of(problem, unit, "layer")
    end = _bytes_of(problem, unit, "end")
    ends: list[Any] = [None, None]
    dist.all_gather_object(ends, end)
    result = {}
    for schedule, v in (("1f1b", None), ("gpipe", None), ("interleaved-1f1b", 2)):
        simulation = simulate(lower(problem.program(schedule, v)), PieceTimes({"mlp": 1.0}))
        stashed = [layers * one for layers in simulation.peak_activation]
        # embed keeps no activations worth counting; head keeps its own for the one microbatch whose backward comes next
        # (gpipe: for all of them)
        heads = problem.count if schedule == "gpipe" else 1
        simulated = [stashed[0] + 0.0, stashed[1] + heads * ends[1]]
        result[schedule] = {"simulated": simulated, "measured": peaks(ours(problem, schedule, v))}
    return result


def _bytes_of(problem: Problem, model: PipelineModel, what: str) -> float:
    """Bytes kept of one microbatch by one layer of this rank, or by embed or head."""
    pieces = problem.program("1f1b").pieces_of_rank(problem.rank)
    layer = [piece for piece in pieces if piece.layer >= 0]
    shape = (problem.sequence, problem.micro, problem.config.hidden_size)
    hidden = torch.randn(shape, requires_grad=True)
    with SavedBytes(ignore=model.parameters()) as account:
        if what == "layer":
            output = model.run(layer, (hidden,), problem.microbatch(0), CONTEXT)
            share = len({piece.layer for piece in layer})
        elif problem.rank == 0:
            output, share = model.run(pieces[:1], (), problem.microbatch(0), CONTEXT), 1
        else:
            output, share = model.run(pieces[-1:], (hidden,), problem.microbatch(0), CONTEXT), 1
        size = account.now / share
    del output
    return size


def main() -> None:
    output, pairs, *size = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(1, 2, create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1)
    core_schedules.torch = _TorchOnCpu()  # type: ignore[attr-defined]
    problem = Problem([int(value) for value in size])
    engines = {
        OURS: ours(problem),
        "megatron-core 1F1B, its GPTModel": megatron_core(problem, whole=True),
        "megatron-core 1F1B, our pieces": megatron_core(problem, whole=False),
        "torch.distributed.pipelining Schedule1F1B": torch_pipelining(problem),
    }
    difference = largest_difference(engines)  # also the warm-up
    times: dict[str, list[float]] = {name: [] for name in engines}
    for round_number in range(int(pairs)):
        names = list(engines)
        for name in names if round_number % 2 == 0 else reversed(names):
            times[name].append(timed(engines[name]))
    tokens = problem.count * problem.micro * problem.sequence
    rows = {}
    for name, engine in engines.items():
        ratios = [theirs / mine for mine, theirs in zip(times[OURS], times[name], strict=True)]
        rows[name] = {
            "tokens_per_second": tokens / statistics.median(times[name]),
            "ratio": None if name == OURS else statistics.median(ratios),
            "quartiles": statistics.quantiles(ratios, n=4)[::2],
            "seconds": times[name],
            "peak_bytes": peaks(engine),
        }
    result = {"engines": rows, "gradient_difference": difference, "memory": memory(problem)}
    if problem.rank == 0:
        Path(output).write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
