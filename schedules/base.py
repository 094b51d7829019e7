"""What every schedule is given and what the catalogue says of it. Pure Python: no flags, no prints, no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from helixpipe.costs import Costs
from helixpipe.errors import ScheduleError
from helixpipe.program import Program, Stage, even_stages
from helixpipe.recompute import RecomputeOptions

T = TypeVar("T")


@dataclass(frozen=True)
class Shape:
    """The size of the problem a schedule is asked to order.

    ranks: pipeline size p. microbatches: m a step. layers: L of the model. chunks: k slices of a microbatch's sequence.
    virtual_stages: v stages a rank, for schedules that interleave. chunk_lengths: tokens of each chunk, None = equal.
    costs: what ops take, for schedules found from costs; None = unknown. recompute: what every stage recomputes.
    memory_limit: what a rank may use, in the costs' unit of memory; None = unknown.
    """

    ranks: int
    microbatches: int
    layers: int
    chunks: int = 1
    virtual_stages: int | None = None
    chunk_lengths: tuple[int, ...] | None = None
    costs: Costs | None = None
    recompute: RecomputeOptions = field(default_factory=RecomputeOptions)
    memory_limit: float | None = None

    def __post_init__(self) -> None:
        for name, value in (
            ("pipeline ranks", self.ranks),
            ("microbatches", self.microbatches),
            ("layers", self.layers),
            ("chunks", self.chunks),
            ("virtual stages", self.virtual_stages if self.virtual_stages is not None else 1),
        ):
            if value < 1:
                raise ScheduleError(f"the number of {name} must be at least 1, not {value}.")
        lengths = self.chunk_lengths
        if lengths is not None and (len(lengths) != self.chunks or min(lengths) < 1):
            raise ScheduleError(f"chunk lengths {lengths} do not fit the number of chunks, {self.chunks}.")
        self.recompute.check()

    def even_stages(self, count: int) -> tuple[Stage, ...]:
        """`count` stages of equally many layers, with what they recompute; see `helixpipe.program.even_stages`."""
        return self.recompute.stages(even_stages(self.layers, count))


@dataclass(frozen=True)
class NoOptions:
    """The schedule has no options of its own."""


@dataclass(frozen=True)
class Schedule:
    """One line of the catalogue.

    build: a pure function of the shape and the schedule's own options. options: a dataclass; its fields become flags.
    one_rank: runs on a single pipeline rank only. virtual_stages, chunks: whether it takes those of the shape.
    paper, bubble, memory: what `helixpipe list` shows; formulas in p, m, k, v, F, B (times a rank) and
    microbatch-stages.
    """

    name: str
    build: Callable[[Shape, Any], Program]
    paper: str
    bubble: str
    memory: str
    options: type[Any] = field(default=NoOptions)
    one_rank: bool = False
    virtual_stages: bool = False
    chunks: bool = False


def require_multiple(schedule: str, microbatches: int, of: int, what: str) -> None:
    """Raise ScheduleError, naming the two nearest valid values, unless `microbatches` is a multiple of `of`."""
    if microbatches % of:
        below = microbatches - microbatches % of
        valid = f"{below} and {below + of}" if below else f"{of} and {2 * of}"
        raise ScheduleError(
            f"{schedule} needs a number of microbatches that is a multiple of {what} {of}, not {microbatches}; "
            f"the nearest valid values are {valid}."
        )


def forward_units(microbatches: int, chunks: int) -> list[tuple[int, int]]:
    """(microbatch, chunk) in the order every stage runs them forward: first in first out, chunks ascending."""
    return [(microbatch, chunk) for microbatch in range(microbatches) for chunk in range(chunks)]


def backward_units(microbatches: int, chunks: int) -> list[tuple[int, int]]:
    """(microbatch, chunk) in the order of backwards: microbatches first in first out, their chunks last in first out
    ("partially ordered queue", Seq1F1B)."""
    return [(microbatch, chunk) for microbatch in range(microbatches) for chunk in reversed(range(chunks))]


def one_forward_one_backward(forwards: Sequence[T], backwards: Sequence[T], warmup: int) -> list[T]:
    """As many forwards as the warm-up has, one forward and one backward in turn, the rest of the backwards.

    forwards, backwards: equally many, each in the order it keeps. warmup: clamped to their number.
    """
    warmup = min(warmup, len(forwards))
    order = list(forwards[:warmup])
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        order += [forward, backward]
    return [*order, *backwards[len(forwards) - warmup :]]
