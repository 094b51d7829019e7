"""Runs on the ranks of test_moving.py: training in which layers move between ranks, and in which none do."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from helixpipe.adapt.adaptation import Adaptation
from helixpipe.adapt.cuts import recut
from helixpipe.common.errors import CheckpointError
from helixpipe.lowering.project import LoweredProgram
from helixpipe.planning.plan import Plan, make_plan
from megatron.pretrain.checkpoint.checkpointing import Checkpointer
from megatron.pretrain.checkpoint.options import CheckpointOptions
from megatron.pretrain.extension import RunningTrainer, StepOutcome
from megatron.pretrain.plan.programs import full_batch
from megatron.pretrain.resilience.host_network import HostNetwork
from megatron.pretrain.resilience.rank_state import RankState
from megatron.pretrain.resilience.watching import Watching
from megatron.pretrain.train import Trainer
from tests.distributed import gather_tensors
from tests.training.steps import Figures, Run, make_trainer, of_runs

STEPS = 2
"""Before each move, and after the last."""

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A run, and the divisions of its layers that it has one after the other after its own."""

    run: Run
    divisions: tuple[tuple[int, ...], ...]


class Found(Figures):
    """Stands where the training log does."""

    @contextmanager
    def paused(self) -> Iterator[None]:
        yield


@dataclass
class Outcome:
    """Of one case on one rank. losses, norms: of each step. state: by name whole weights and their moments, after the
    last step. kept: whether each move waited for the checkpoint, left every element of the state as it was and as many
    process groups, and freed the model before. resumed: whether what was saved after the last move is what a run with
    the first layers reads. stayed: whether no layers moved after a checkpoint that was lost. pieces: after each move.
    """

    losses: list[float]
    norms: list[float | None]
    state: Tensors
    kept: list[bool]
    resumed: bool = True
    stayed: bool = True
    pieces: tuple[int, ...] = ()


def outcomes(rank: int, world_size: int, cases: list[Case], folder: str) -> list[tuple[Outcome, Outcome]]:
    """Of each case the run whose layers stay, and that whose layers move."""
    by_run = {case.run: case for case in cases}

    def both(run: Run) -> tuple[Outcome, Outcome]:
        divisions, config = by_run[run].divisions, run.config(rank, world_size)
        place = f"{folder}/{list(by_run).index(run)}"
        return _outcome(config, divisions, False, ""), _outcome(config, divisions, True, place)

    return of_runs([case.run for case in cases], both)


def _outcome(config: Any, divisions: tuple[tuple[int, ...], ...], moves: bool, folder: str) -> Outcome:
    watching = _Moving(config)
    trainer = _trainer(config, watching)
    trainer.log = figures = Found(0)  # type: ignore[assignment]
    plans, size = trainer.pipeline.plans, full_batch(config)
    outcome = Outcome(figures.losses, figures.gradients, {}, [])
    watching.network = HostNetwork() if moves else None
    _train(trainer)
    for division in divisions:
        if moves:
            plan = make_plan(recut(plans.program(size), division), plans.costs)
            before, old, drawn = _state(trainer), weakref.ref(trainer.state.model), torch.get_rng_state()
            agreed, groups = _Agreed(plan, lambda plan: plans.adopt(size, plan)), _process_groups()
            outcome.stayed &= _stays_where_a_checkpoint_is_lost(trainer, watching, agreed)
            trainer.checkpointer = saving = _Saving()  # type: ignore[assignment]
            watching.move(agreed)
            after = _state(trainer)
            same = before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
            same = same and saving.writing is None and groups == _process_groups()
            outcome.kept.append(same and old() is None and torch.equal(drawn, torch.get_rng_state()))
            outcome.pieces += (len(trainer.state.model.pieces),)
        _train(trainer)
    outcome.state = _state(trainer)
    if moves:
        saver = Checkpointer(CheckpointOptions(save=folder))
        saver.save(trainer.progress, trainer.state.model, trainer.state.optimizer, trainer.scheduler, {})
        again = _trainer(config)
        loader = Checkpointer(CheckpointOptions(load=folder))
        assert loader.load(again.state.model, again.state.optimizer, again.scheduler) is not None
        there = _state(again)
        outcome.resumed = all(torch.equal(there[name], value) for name, value in outcome.state.items())
        again.pipeline.close()
    trainer.pipeline.close()
    return outcome


def _trainer(config: Any, *extensions: Watching) -> Trainer:
    """A trainer with settings that are not its flags', as a checkpoint brings them."""
    trainer = make_trainer(config, *extensions)
    scheduler = trainer.scheduler
    scheduler.max_lr, scheduler.lr_decay_style, scheduler.lr_decay_steps = 5e-3, "linear", 100
    for group in trainer.state.optimizer.param_groups:
        group.update(betas=(0.8, 0.9), eps=1e-6, max_lr=5e-3)
    scheduler.step(0)
    return trainer


def _process_groups() -> int:
    return len(torch.distributed.distributed_c10d._world.pg_map)


def _stays_where_a_checkpoint_is_lost(trainer: Trainer, watching: _Moving, agreed: _Agreed) -> bool:
    pieces, trainer.checkpointer = trainer.state.model.pieces, _Saving(lost=True)  # type: ignore[assignment]
    watching.move(agreed)
    trainer.not_saved = None
    return agreed.stayed and trainer.state.model.pieces == pieces


class _Saving:
    """A checkpoint that is being written beside training. lost: it cannot be."""

    def __init__(self, lost: bool = False):
        self.writing: int | None = 1
        self._lost = lost

    def settle(self, wait: bool) -> None:
        if wait:
            self.writing = None
            if self._lost:
                raise CheckpointError("the disk is full")


class _Moving(Watching):
    """Watches nothing, and moves layers when it is told to."""

    numbers = 0

    def begin(self, trainer: RunningTrainer) -> None:
        self._trainer = trainer

    def move(self, adaptation: Adaptation) -> None:
        self.adaptation = adaptation
        self.before_step(self._trainer.progress.iteration + 1)

    def wants_times(self, iteration: int, lowered: LoweredProgram) -> bool:
        return False

    def figures(self) -> None:  # type: ignore[override]
        """Nothing is agreed on."""

    def outcome(self, outcome: StepOutcome) -> None:
        """Nothing is agreed on."""


class _Agreed(Adaptation):
    """Has all ranks hold this plan already."""

    def __init__(self, plan: Plan, adopted: Any):
        self.agreed, self._told, self.stayed = plan, adopted, False

    def moved(self) -> None:
        assert self.agreed is not None
        self._told(self.agreed)

    def stay(self, why: str) -> None:
        self.stayed = True


def _train(trainer: Trainer) -> None:
    for _ in range(STEPS):
        trainer._iteration(record=False)


def _state(trainer: Trainer) -> Tensors:
    """The whole state of all ranks, by name: of weights that several hold, and of shares that overlap, any."""
    state, parallel = trainer.state, trainer.parallel
    of_rank = RankState(state.model, state.optimizer, trainer.scheduler, (parallel.pp_rank, parallel.tp_rank), 0, 1)
    own = {(parallel.tp_rank, run.name, run.start): run.values.clone() for run in of_rank.runs}
    whole: dict[str, dict[int, torch.Tensor]] = {}
    for each in gather_tensors(own):
        for (tp_rank, name, start), values in each.items():
            whole.setdefault(f"{tp_rank} {name}", {})[start] = values
    return {name: torch.cat([shares[start] for start in sorted(shares)]) for name, shares in whole.items()}
