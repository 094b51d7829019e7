"""The chosen schedule, as something that runs a step: by a plan for each number of microbatches, made when first
needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack

import torch
import torch.distributed as dist

from helixpipe.common.errors import ScheduleError
from helixpipe.common.output import complain
from helixpipe.costs.by_hand import PieceTimes
from helixpipe.costs.hardware import DEFAULT_HARDWARE, find_hardware
from helixpipe.draw.text import chunk_times, copies_text
from helixpipe.lowering.build import graph_of
from helixpipe.lowering.project import LoweredProgram
from helixpipe.model import Microbatch, PipelineModel
from helixpipe.planning.order.chunk_lengths import short_chunks
from helixpipe.planning.plan import Plan, Plans
from helixpipe.program.program import Program
from helixpipe.program.stages import HEAD_MTP, Piece
from helixpipe.runtime.copies import make_engine
from helixpipe.runtime.executor import Executor, Model, Step
from helixpipe.runtime.numa import bind_to_device
from helixpipe.runtime.offload import Offloader
from helixpipe.runtime.recording import Record
from helixpipe.runtime.step import StepObserver
from helixpipe.runtime.transport import make_transport
from helixpipe.runtime.weights import StageWeights
from helixpipe.simulate.simulator import simulate
from helixpipe.watch.position import Position
from megatron.pretrain.config import Config
from megatron.pretrain.config.communicators import pipeline_settings
from megatron.pretrain.log.recorded import RecordedStep, recorded_step
from megatron.pretrain.plan.programs import step_verdict
from megatron.pretrain.process.parallel import Parallel

ROUNDING = 0.02
"""Part of what is offloaded that its place in the host's memory may be larger."""


class Pipeline:
    """Runs steps on this rank.

    plans: by number of microbatches. step_sizes: every one that may be asked for; each is checked at once, so that a
    bad one shows before training starts. position: where this rank publishes what it does. further: of a step's
    program, those that an `executor` will run besides. Raises ScheduleError when
    programs of different sizes would place the model differently.
    """

    def __init__(
        self,
        config: Config,
        plans: Plans[int],
        parallel: Parallel,
        step_sizes: Sequence[int],
        position: Position | None = None,
        further: Sequence[Callable[[Program], Iterable[Program]]] = (),
    ):
        self._config = config
        self.plans = plans
        self._parallel = parallel
        self._position = position or Position()
        self._counted: tuple[LoweredProgram, torch.Tensor] | None = None
        self.program = plans.program
        largest = plans.plan(step_sizes[-1])
        self._executor: Executor | None = None
        self.place(largest)
        placement = _placement(largest.program)
        for size in step_sizes:
            if _placement(plans.program(size)) != placement:  # alike on all ranks
                raise ScheduleError(
                    f"schedule {config.parallel.pipeline_schedule} places the model differently for {size} "
                    f"microbatches than for {step_sizes[-1]}, so the batch cannot change size under it."
                )
        if largest.graph.copies or config.training.optimizer_cpu_offload:
            _bind(parallel.device)
        channels = {(message.source, message.target) for message in largest.graph.messages}
        for program in (each for programs in further for each in programs(largest.program)):
            channels |= {(each.source, each.target) for each in graph_of(program).messages}
        self._transport = make_transport(
            parallel.pp_group, parallel.device, channels, pipeline_settings(config.parallel)
        )
        self._ends = ExitStack()
        self._ends.callback(self._transport.close)

    def place(self, plan: Plan) -> None:
        """Take the pieces that the plan of the largest step has on this rank, without a model for now."""
        rank, program = self._parallel.pp_rank, plan.program
        self._largest, self.pieces, self.copies = plan, program.pieces_of_rank(rank), program.copies(rank)
        held = enumerate(program.stages)
        self.stages = [each.pieces for index, each in held if rank in program.holders(index)]
        if self._executor is not None:
            self._executor.close()
        self._executor = None

    def attach(self, model: PipelineModel, weights: StageWeights) -> None:
        """Attach the model to run, which must be made of `pieces`, and the store of its weights."""
        self._executor = self.executor(model, weights, self._offloader())

    def executor(self, model: Model, weights: StageWeights, offloader: Offloader | None) -> Executor:
        """Return an executor on this rank's connections. weights: the store of the model's."""
        return Executor(
            self._parallel.pp_rank,
            model,
            self._transport,
            self._config.parallel.kv_grad_fp32,
            self._position,
            weights,
            offloader=offloader,
            group=self._parallel.pp_group,
        )

    @property
    def attached(self) -> Executor:
        """The executor of the run's own steps."""
        assert self._executor is not None
        return self._executor

    def _offloader(self) -> Offloader | None:
        """Return an offloader with the page-locked memory that the largest step needs; None if nothing is offloaded."""
        if not self._largest.graph.copies:
            return None
        room = self._largest.simulation.peaks[self._parallel.pp_rank].host * (1 + ROUNDING)
        return Offloader(make_engine(self._parallel.device), round(room))

    @property
    def reads_data(self) -> bool:
        """Whether this rank needs tokens or labels."""
        return any(piece.role in ("embed", "head") for piece in self.pieces)

    @property
    def places_tokens(self) -> bool:
        """Whether this rank needs to know where documents end."""
        return places_tokens(self._largest.program, self._parallel.pp_rank)

    @property
    def has_head(self) -> bool:
        return any(piece.role == "head" for piece in self.pieces)

    def counted(self, lowered: LoweredProgram) -> torch.Tensor:
        """Return the microbatches of a step whose tokens this rank counts: those whose first chunk's head it runs. Each
        is counted on one rank. An index (int64) on the device: a list would be copied there in each step, for which the
        host waits.
        """
        if self._counted is None or self._counted[0] is not lowered:
            program = lowered.program
            head = len(program.stages) - 1
            own = program.ranks[self._parallel.pp_rank]
            numbers = [op.microbatch for op in own if op.kind == "F" and op.stage == head and op.chunk == 0]
            index = torch.tensor(numbers, dtype=torch.int64)
            if self._parallel.device.type == "cuda":
                index = index.pin_memory().to(self._parallel.device, non_blocking=True)
            self._counted = lowered, index
        return self._counted[1]

    def tokens(self, lowered: LoweredProgram, microbatch: int, batch: Microbatch) -> int:
        """Return the real tokens in all rows of a microbatch of a step.

        Args:
            lowered: The program of the step: ranks that read no data have no tokens to count.
            microbatch: The number of the microbatch in the step.
            batch: The microbatch, which says what is padding.
        """
        if batch.real is not None:
            return batch.real.count
        workload = lowered.program.workload
        length = self._config.model.seq_length or 0 if workload.proportional else sum(workload.tokens(microbatch))
        return length * (self._config.training.micro_batch_size or 1)

    def run(
        self,
        iteration: int,
        lowered: LoweredProgram,
        batches: Sequence[Microbatch],
        root_gradient: Callable[[int], torch.Tensor],
        training: bool = True,
        record: bool = False,
        together: bool = True,
        confirm: Callable[[], bool] | None = None,
        auxiliary_gradient: Callable[[int], torch.Tensor] | None = None,
        observers: Sequence[StepObserver] = (),
    ) -> tuple[torch.Tensor, Record]:
        """Run one step (evaluation: forwards only, no dropout) over all `batches` of this pipeline, by a program for as
        many.

        record: whether to record its times; together: after all ranks of the pipeline have met.
        root_gradient, confirm, auxiliary_gradient, observers: see `helixpipe.runtime.executor.Step`.
        Returns the sum of the loss sums whose head is here (a float64 scalar) and the step's record.
        """
        step = Step(
            iteration=iteration,
            microbatch_number=self.number,
            batch=batches.__getitem__,
            root_gradient=root_gradient,
            micro_batch_size=self._config.training.micro_batch_size or 0,
            seq_length=self._config.model.seq_length or 0,
            training=training,
            confirm=confirm,
            auxiliary_gradient=auxiliary_gradient,
            observers=observers,
        )
        if record and together:
            dist.barrier(group=self._parallel.pp_group)  # the clocks of several machines are taken to agree here
        losses, times = self.attached.run(lowered, step, record)
        total = torch.zeros((), dtype=torch.float64, device=self._parallel.device)
        # In the order of microbatches, not of the schedule, and in float64, since heads may be on several ranks: the
        # reported loss is then the same under all schedules.
        for loss in sorted(losses, key=lambda loss: (loss.microbatch, loss.chunk)):
            total += loss.value
        return total, times

    def number(self, microbatch: int, replica: int | None = None) -> int:
        """Return a microbatch's number among those of all replicas: as the sampler deals them out, so that dropout does
        not depend on how many there are. replica: whose; None: this one's."""
        return microbatch * self._parallel.dp_size + (self._parallel.dp_rank if replica is None else replica)

    def recorded(self, record: Record, lowered: LoweredProgram) -> RecordedStep:
        """Return a recorded training step beside its simulation, in seconds; collective over the pipeline.

        The simulation uses the step's own median time of each kind of op in each stage, and its own rate of copying to
        the host and back, so it shows what the order of ops costs, not what ops cost; messages take no time in it.
        """
        records: list[Record] = [record] * self._parallel.pp_size
        dist.all_gather_object(records, record, group=self._parallel.pp_group)
        return recorded_step(lowered, records)

    def bubble(self, num_microbatches: int) -> str:
        """Return the simulated share of idle time and what it assumes: of an order that is found for the output layer's
        time the run's own costs, else layers alone."""
        plan = self.plans.plan(num_microbatches)
        if not self._config.vocabulary.over_pipeline:
            ratio = simulate(plan.lowered, PieceTimes({"mlp": 1.0})).bubble_ratio
            return f"{ratio:.1%} (equal layers, backward twice forward, no message time)"
        costs = self._config.parallel.cost_profile or self._config.parallel.hardware or DEFAULT_HARDWARE
        return f"{plan.simulation.bubble_ratio:.1%} (by the costs of {costs})"

    def chunks(self, num_microbatches: int) -> list[str]:
        """Return lines about the chunks of a sequence and their simulated times, none if sequences are not cut and
        nothing asked for the best number.
        """
        plan = self.plans.plan(num_microbatches)
        if plan.program.num_chunks == 1 or self._config.data.variable_seq_lengths:
            return ["--pipe-sp-splits auto: sequences stay whole"] if self._config.chunks.auto else []
        lengths = plan.program.workload.in_tokens(self._config.model.seq_length or 1).tokens(0)
        times = chunk_times(plan.simulation)
        shares = ", ".join(f"{length} ({time / sum(times):.1%})" for length, time in zip(lengths, times, strict=True))
        line = f"tokens of each chunk (share of a microbatch's simulated time): {shares}"
        name, micro = self._config.parallel.hardware, self._config.training.micro_batch_size or 1
        short = None if name is None else short_chunks(sum(lengths), len(lengths), micro, find_hardware(name))
        return [line] if short is None else [line, short]

    def memory(self) -> list[str]:
        """Return a line on whether a step fits, none where it is not known what a GPU has."""
        verdict = step_verdict(self._config, self.plans)
        return [] if verdict is None else [f"memory: {verdict.sentence}"]

    def offloading(self, num_microbatches: int) -> list[str]:
        """Return lines about what is offloaded in a step, none if nothing is."""
        text = copies_text(self.plans.plan(num_microbatches).simulation)
        costs = self._config.parallel.cost_profile or self._config.parallel.hardware or DEFAULT_HARDWARE
        first, _, rest = (text or "").partition("\n")
        return [f"{first} (predicted from {costs})", *rest.splitlines()] if first else []

    def close(self) -> None:
        if self._executor is not None:
            self._executor.close()
        self._ends.close()


def places_tokens(program: Program, rank: int) -> bool:
    """Whether a rank runs pieces that depend on where documents end, with or without weights of its own: attention, and
    the rotary embedding that follows QKV.
    """
    stages = {op.stage for op in program.ranks[rank]}
    pieces = [piece for stage in stages for piece in program.stages[stage].pieces]
    return any(piece.role in ("qkv", "attn") or piece.kind == HEAD_MTP for piece in pieces)


def _bind(device: torch.device) -> None:
    """Stay near the GPU; before the first page-locked page."""
    if device.type == "cuda" and (unbound := bind_to_device(device)) is not None:
        complain(unbound)


def _placement(program: Program) -> list[tuple[Piece, ...]]:
    """Return the pieces of every rank."""
    return [program.pieces_of_rank(rank) for rank in range(program.num_ranks)]
