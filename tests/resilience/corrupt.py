"""Runs on the ranks of test_corruption.py: training in which a bit flips somewhere, or none does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from helixpipe.common.errors import CorruptionError
from megatron.pretrain.resilience.corruption import CorruptionCheck
from tests.resilience.flipping import Flip, inject
from tests.training.steps import Figures, Run, make_trainer, of_runs


@dataclass(frozen=True)
class Found:
    """What a run said, and at which step; step 0: nothing. losses: of its steps."""

    step: int
    says: str
    losses: list[float]


def clean(rank: int, world_size: int, runs: list[Run]) -> list[tuple[Found, list[float]]]:
    """What each run says, and its losses without checks."""

    def both(run: Run) -> tuple[Found, list[float]]:
        checked = train(run, rank, world_size, None)
        return checked, train(run, rank, world_size, None, checks=False).losses

    return of_runs(runs, both)


def flipped(rank: int, world_size: int, run: Run, flips: list[Flip]) -> list[Found]:
    return of_runs([run] * len(flips), iter_of(run, rank, world_size, flips))


def iter_of(run: Run, rank: int, world_size: int, flips: list[Flip]) -> Any:
    rest = iter(flips)
    return lambda _: train(run, rank, world_size, next(rest))


def train(run: Run, rank: int, world_size: int, flip: Flip | None, checks: bool = True) -> Found:
    config = run.config(rank, world_size)
    trainer = make_trainer(config, *([CorruptionCheck(config)] if checks else []))
    trainer.log = figures = Figures(0)  # type: ignore[assignment]
    if flip is not None and flip.rank == rank:
        inject(trainer, flip)
    try:
        for _ in range(run.steps):
            trainer._iteration(record=False)
    except CorruptionError as error:
        return Found(len(figures.losses) + 1, str(error), figures.losses)
    finally:
        trainer.pipeline.close()
    return Found(0, "", figures.losses)
