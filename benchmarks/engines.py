"""The engines that bench.py compares: one step of the same model under each, p = 2."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from helixpipe.model.device import prepare

prepare()  # before megatron-core is imported, whose notices it silences

from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules as core_schedules
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from benchmarks.profiled import every_rank
from helixpipe.costs.by_hand import OpTimes
from helixpipe.lowering.lower import lower
from helixpipe.model import GPTOptions, Microbatch, PipelineModel, UnitContext
from helixpipe.model.ends import Targets, loss_sum
from helixpipe.program.program import Program
from helixpipe.program.stages import Piece
from helixpipe.runtime.executor import Executor, Step
from helixpipe.runtime.gloo import GlooTransport
from helixpipe.runtime.gloo_device import share_gloo_device
from helixpipe.runtime.recording import merge_records
from schedules import Shape, build

CONTEXT = UnitContext(step=0, microbatch=0)

Pairs = list[tuple[str, str]]
"""(ours, the engine it is compared with)."""


class Problem:
    """Model, data and this rank's place; every engine gets the same."""

    def __init__(self, size: Sequence[int], vocabulary: int = 512):
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
        return loss_sum(output, Targets(labels.t(), self.mask.t()))

    def program(self, schedule: str, options: Any = None, **shape: Any) -> Program:
        """options: the schedule's own. shape: what else `Shape` has besides ranks, microbatches and layers."""
        return build(schedule, Shape(2, self.count, self.layers, **shape), options)


class _TorchOnCpu:
    """torch, but `zeros(device="cuda")` is on the CPU: the one literal of megatron-core's schedule function, replaced
    there alone so that its model runs as fast as it can."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(*args, **{**kwargs, "device": "cpu"})


def start(size: Sequence[int], vocabulary: int = 512) -> Problem:
    """Join the other rank; everything is ready for the engines below."""
    share_gloo_device()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(1, 2, create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1)
    core_schedules.torch = _TorchOnCpu()
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
        self.executor = Executor(problem.rank, model, transport, group=problem.group)
        self.lowered = lower(program)
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
        self._copies = [parameter for name, parameter in sorted(named.items()) if model.piece_of(name) in copies]
        super().__init__(named, self._step)

    def _step(self) -> None:
        self.executor.run(self.lowered, self._data)
        self._sum_copies()

    def _sum_copies(self) -> None:
        """Sum the gradients of weights that both ranks hold; none are tied."""
        works = [dist.all_reduce(each.grad, group=self._group, async_op=True) for each in self._copies]
        for work in works:
            work.wait()

    @property
    def program(self) -> Program:
        return self.lowered.program

    def sum_time(self, sums: int = 3) -> float:
        """Return the seconds of the sum over copies, with which a step ends and which no program's makespan has: the
        median of so many; 0 without copies. There must be gradients, which are summed as often."""
        seconds = []
        for _ in range(sums if self._copies else 0):
            dist.barrier()
            start = time.perf_counter()
            self._sum_copies()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds) if seconds else 0.0

    def op_times(self, steps: int = 3) -> OpTimes:
        """Return what the ops take here, in seconds: medians over microbatches and recorded steps."""
        self.step()  # the first step is slower
        times: dict[tuple[str, int, int], list[float]] = {}
        messages = []
        for _ in range(steps):
            records = every_rank(self.executor.run(self.lowered, self._data, record=True)[1])
            timeline = merge_records(self.lowered, records, "bench")
            for event in timeline.ops:
                times.setdefault((event.op.kind, event.op.stage, event.op.chunk), []).append(event.end - event.start)
            messages += [message.end - message.start for message in timeline.messages]
        medians = {key: statistics.median(values) for key, values in times.items()}
        # A message that was waited for late looks slow: the quickest says what one takes.
        return OpTimes(self.program, medians, min(messages))


def found(problem: Problem, schedule: str, **shape: Any) -> Program:
    """A schedule found from what its ops take here, recorded while it runs as found without costs."""
    costs = OurEngine(problem, problem.program(schedule, **shape)).op_times()
    return problem.program(schedule, costs=costs, **shape)
