"""What watches a rank of a run, and has it run other plans."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from helixpipe.adapt.adaptation import Adaptation
from helixpipe.adapt.cuts import can_be_cut
from helixpipe.adapt.lead import Options, Place
from helixpipe.adapt.replan import adaptable
from helixpipe.adapt.reports import RankTimes, Received, medians
from helixpipe.common.output import say
from helixpipe.lowering.project import LoweredProgram
from helixpipe.planning.background import BackgroundPlanner
from helixpipe.planning.plan import Plan
from helixpipe.program.program import Program
from helixpipe.runtime.recording import Record
from helixpipe.watch.position import Patience
from megatron.pretrain.config import Config
from megatron.pretrain.extension import RunningTrainer, StepOutcome, TrainerExtension
from megatron.pretrain.plan.costs import memory_limit
from megatron.pretrain.plan.programs import full_batch
from megatron.pretrain.resilience.candidates import Replanner
from megatron.pretrain.resilience.host_network import HostNetwork
from megatron.pretrain.resilience.moving import MovingState
from megatron.pretrain.resilience.rank_state import RankState


def why_layers_stay(config: Config, optimizer: Any, program: Program) -> str | None:
    """Return why no layers move between ranks, in words after "because"; None where they may. optimizer, program: of
    the run."""
    training, parallel, checkpoint = config.training, config.parallel, config.checkpoint
    interval, watched = checkpoint.save_interval, config.adapt.watch_interval or 1
    inner = [each.optimizer for each in optimizer.chained_optimizers if not each.is_stub_optimizer]
    for asked, reason in (
        (not checkpoint.save or not interval, "they do so after checkpoints (--save, --save-interval)"),
        (watched % (interval or 1) == 0, "checkpoints (--save-interval) are in every step that --watch-interval times"),
        (not adaptable(program), "the schedule's weights travel, are held by several ranks or are in parts"),
        (
            adaptable(program) and not can_be_cut(program),
            "stages are of parts of layers, or units offload or recompute in their own ways",
        ),
        (training.rampup_batch_size, "--rampup-batch-size has steps of other sizes"),
        (training.step_batch_size_schedule, "--step-batch-size-schedule has steps of other sizes"),
        (checkpoint.in_memory_checkpoint_interval, "--in-memory-checkpoint-interval has snapshots of the first layers"),
        (config.adapt.check_every, "--check-every watches the first layers' memory"),
        (config.model.num_experts, "experts are not moved"),
        (parallel.shards_weights or parallel.use_torch_fsdp2, "weights are in parts"),
        (training.optimizer_cpu_offload, "--optimizer-cpu-offload is not moved"),
        (training.use_precision_aware_optimizer, "--use-precision-aware-optimizer is not moved"),
        (
            not all(isinstance(each, torch.optim.Adam | torch.optim.AdamW) for each in inner),
            "only the state of torch's Adam is moved",
        ),
    ):
        if asked:
            return reason
    return None


class Watching(TrainerExtension):
    """Times steps, tells which rank or link has become slow, and has all ranks switch to a better plan."""

    numbers = 1

    @classmethod
    def wanted(cls, config: Config) -> bool:
        """Return whether there is something to watch: several pipeline ranks, and steps of one plan."""
        several = config.parallel.pipeline_model_parallel_size > 1
        return bool(config.adapt.watch_interval) and several and not config.data.variable_seq_lengths

    adaptation: Adaptation

    def __init__(self, config: Config):
        super().__init__(config)
        self._plan = 0
        self._ends = ExitStack()

    def begin(self, trainer: RunningTrainer) -> None:
        self._trainer = trainer
        adapt, parallel, plans = self.config.adapt, trainer.parallel, trainer.pipeline.plans
        size = full_batch(self.config)
        own = plans.plan(size)
        stay = why_layers_stay(self.config, trainer.state.optimizer, own.program)
        if adapt.replan == "auto" and stay is not None and parallel.is_first:
            say(f" > --replan auto leaves layers on their ranks, because {stay}")
        place = Place(
            parallel.rank,
            parallel.world_size,
            parallel.dp_rank,
            parallel.dp_size,
            reports=parallel.counts_tokens,
        )
        folder = adapt.watch_dir or self.config.checkpoint.save
        options = Options(
            adapt.watch_interval,
            adapt.replan,
            not adapt.replan_chunks,
            memory_limit(self.config),
            Path(folder) if folder else None,
            trainer.length.iterations,
            0 if stay is not None else self.config.checkpoint.save_interval or 0,
        )
        self.adaptation = Adaptation(
            own,
            place,
            options,
            dist.distributed_c10d._get_default_store(),
            lambda: BackgroundPlanner(Replanner(self.config)),
            partial(plans.adopt, size),
            say,
        )
        self._ends.callback(self.adaptation.close)
        self._clock_offset = clock_offset(None)
        # Connections are made now, while no step waits for them.
        self.network = HostNetwork() if self.adaptation.moves_layers else None

    def before_step(self, iteration: int) -> None:
        """Move layers as an agreed plan has them, once the checkpoint is there (`--async-save`). Collective."""
        plan, trainer = self.adaptation.agreed, self._trainer
        if plan is None:
            return
        trainer.finish_saving()
        if trainer.not_saved is None:
            self._move_layers(plan)
        else:  # on all ranks alike
            self.adaptation.stay("the checkpoint was not saved")

    def _move_layers(self, plan: Plan) -> None:
        """Go on with the layers that a plan gives this rank: its weights and their optimizer's state come from the
        ranks that have them. Collective."""
        trainer = self._trainer
        begun, parallel = time.monotonic(), trainer.parallel
        with trainer.log.paused(), trainer.timed("move-layers", Patience.ENDLESS):
            moving = MovingState(self._state_of_rank(), parallel.rank, parallel.tp_rank, parallel.dp_rank)
            trainer.pipeline.place(plan)
            trainer.rebuild()
            assert self.network is not None
            size = moving.into(self._state_of_rank(), self.network)
            moved = torch.tensor(float(size), device=parallel.device)
            dist.all_reduce(moved)
        if parallel.is_first:
            seconds = time.monotonic() - begun
            say(f"layers have moved between ranks: {float(moved) / 1e6:,.1f} MB of their state in {seconds:.1f} s")
        self.adaptation.moved()

    def _state_of_rank(self) -> RankState:
        trainer, state = self._trainer, self._trainer.state
        place = trainer.parallel.pp_rank, trainer.parallel.tp_rank
        return RankState(state.model, state.optimizer, trainer.scheduler, place, 0, 1)

    def wants_times(self, iteration: int, lowered: LoweredProgram) -> bool:
        self._plan = self.adaptation.number
        return self.adaptation.due(iteration, lowered)

    def times(self, iteration: int, record: Record) -> None:
        place = self._trainer.parallel.pp_rank, self._trainer.parallel.dp_rank
        self.adaptation.report(report_of(record, iteration, *place, self._plan, self._clock_offset))

    def figures(self) -> torch.Tensor:
        return torch.full((1,), self.adaptation.ready, dtype=torch.float64, device=self._trainer.parallel.device)

    def outcome(self, outcome: StepOutcome) -> None:
        self.adaptation.loss = outcome.loss
        self.adaptation.settle(outcome.sums[0], outcome.iteration)

    def close(self, error: BaseException | None) -> None:
        self._ends.close()


ROUNDS = 9
"""Barriers from which the difference of two clocks is known, to about the time that one takes."""


def clock_offset(group: dist.ProcessGroup | None, now: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds by which this rank's clock is ahead of that of the group's first rank: 0 on one machine, else
    what their clocks said after barriers. Collective over the group.
    """
    names: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(names, platform.node(), group=group)
    if len(set(names)) == 1:
        return 0.0
    differences = []
    for _ in range(ROUNDS):
        dist.barrier(group=group)
        times: list[Any] = [None] * len(names)
        dist.all_gather_object(times, now(), group=group)
        differences.append(times[dist.get_rank(group)] - times[0])
    return median(differences)


def report_of(record: Record, step: int, rank: int, pipeline: int = 0, plan: int = 0, offset: float = 0.0) -> RankTimes:
    """Return the report of a recorded step. plan: the number of the plan it ran. offset: of this rank's clock."""
    waited = record.waited
    received = {
        number: Received(record.posted[number] - offset, waited[number] - offset, arrived - offset)
        for number, arrived in record.arrived.items()
        if number in record.posted
    }
    return RankTimes(
        step,
        rank,
        pipeline,
        plan,
        medians(record.ops),
        {number: sent - offset for number, sent in record.sent.items()},
        received,
        sum(end - start for start, end in record.copies.values()),
        min((start for _, start, _ in record.ops), default=offset) - offset,
        max((end for *_, end in record.ops), default=offset) - offset,
    )
