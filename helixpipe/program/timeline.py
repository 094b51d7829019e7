"""A timeline: which op and which message ran when, simulated or measured, in one format."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from helixpipe.common.errors import UserError
from helixpipe.common.files import whole_file
from helixpipe.common.json_values import parse_json
from helixpipe.common.ranges import MOST_RANKS
from helixpipe.program.program import Op
from helixpipe.program.text import parse_cell
from helixpipe.program.transfer import TRANSFER_KINDS

BUBBLE = (
    "bubble: the share of the ranks' time, from the start of a step to the end of all its ops and transfers, in which "
    "they run no op"
)
"""What the word means wherever it is printed; as a time, it is that share of the makespan."""


def idle_shares(busy: Sequence[float], makespan: float) -> list[float]:
    """Return for each rank the share of the makespan in which it runs no op. busy: time of each rank in ops."""
    return [1 - time / makespan if makespan else 0.0 for time in busy]


def bubble_of(busy: Sequence[float], makespan: float) -> float:
    """`BUBBLE`, from 0 to 1: the mean of the ranks' idle shares."""
    shares = idle_shares(busy, makespan)
    return sum(shares) / len(shares) if shares else 0.0


class OpEvent(NamedTuple):
    """One op on one rank. start, end: in the timeline's unit, from the start of the step."""

    rank: int
    op: Op
    start: float
    end: float


class TransferEvent(NamedTuple):
    """One transfer between ranks, in a group of ranks, or between a device and its host; fields as of `Transfer`. A
    collective of data-parallel ranks is in the timeline of one pipeline with that pipeline's rank alone."""

    kind: str
    ranks: tuple[int, ...]
    producer: Op | None
    consumer: Op | None
    start: float
    end: float

    @property
    def source(self) -> int:
        return self.ranks[0]

    @property
    def target(self) -> int:
        return self.ranks[-1]

    @property
    def op(self) -> Op:
        """The op it belongs to: that needs what it brings, or that made what it takes."""
        op = self.consumer or self.producer
        assert op is not None
        return op

    @property
    def resource(self) -> str:
        return TRANSFER_KINDS[self.kind].resource


@dataclass(frozen=True)
class Timeline:
    """One step of a schedule on `num_ranks` ranks. unit: `s` for seconds, or `` where piece times carry none.
    transfers: those that belong to ops. until: the end of what is not among the events, such as sums over replicas."""

    title: str
    num_ranks: int
    ops: Sequence[OpEvent]
    transfers: Sequence[TransferEvent] = field(default_factory=tuple)
    unit: str = ""
    until: float = 0.0

    @cached_property
    def messages(self) -> list[TransferEvent]:
        """The transfers from one rank to another."""
        return [event for event in self.transfers if event.resource == "link"]

    @cached_property
    def copies(self) -> list[TransferEvent]:
        """Return the transfers between a device and its host."""
        return [event for event in self.transfers if event.resource in ("copy_out", "copy_in")]

    @cached_property
    def collectives(self) -> list[TransferEvent]:
        """Return the transfers of groups of ranks."""
        return [event for event in self.transfers if event.resource == "collective"]

    @cached_property
    def sharing(self) -> list[TransferEvent]:
        """Return the transfers of data-parallel ranks."""
        return [event for event in self.collectives if TRANSFER_KINDS[event.kind].group]

    @property
    def makespan(self) -> float:
        """From 0 to the end of the last op or transfer."""
        ends = [event.end for events in (self.ops, self.transfers) for event in events]
        return max(self.until, *ends) if ends else self.until

    @property
    def bubble(self) -> float:
        return bubble_of(self.busy(), self.makespan)

    def busy(self) -> list[float]:
        """Time each rank spends in ops."""
        busy = [0.0] * self.num_ranks
        for event in self.ops:
            busy[event.rank] += event.end - event.start
        return busy

    def copy_time(self) -> list[float]:
        """Time that copies of each rank take, to the host and back together."""
        return self._taken(self.copies)

    def sharing_time(self) -> list[float]:
        """Time that gathers and scatters of each rank take."""
        return self._taken(self.sharing)

    def _taken(self, transfers: Sequence[TransferEvent]) -> list[float]:
        times = [0.0] * self.num_ranks
        for event in transfers:
            for rank in event.ranks:
                times[rank] += event.end - event.start
        return times

    def to_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "ranks": self.num_ranks,
            "unit": self.unit,
            "ops": [[e.rank, str(e.op), e.start, e.end] for e in self.ops],
            "transfers": [
                [e.kind, list(e.ranks), _cell(e.producer), _cell(e.consumer), e.start, e.end] for e in self.transfers
            ],
        } | ({"until": self.until} if self.until else {})

    def save(self, path: str | Path) -> None:
        """Write the file, whole or not at all. Raises UserError when it cannot be written."""
        with whole_file(path) as temporary:
            temporary.write_text(json.dumps(self.to_json()) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Timeline:
        """Read what `save` wrote. Raises UserError, naming the file, for anything else."""
        try:
            data = parse_json(Path(path).read_text(encoding="utf-8"))
            title, ranks, unit = str(data["title"]), int(data["ranks"]), str(data["unit"])
            if not 1 <= ranks <= MOST_RANKS:
                raise ValueError(f"ranks must be a whole number from 1 to {MOST_RANKS}, not {ranks}")
            ops = [OpEvent(_rank(r, ranks), _op(cell), _time(a), _time(b)) for r, cell, a, b in data["ops"]]
            transfers = [_transfer(ranks, *fields) for fields in data["transfers"]]
            return cls(title, ranks, ops, transfers, unit, _time(data.get("until", 0.0)))
        except OSError as error:
            raise UserError(f"cannot read the timeline {path}: {error.strerror}.") from None
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise UserError(f"{path} is not a timeline file ({type(error).__name__}: {error}).") from None


def _cell(op: Op | None) -> str | None:
    return None if op is None else str(op)


def _op(cell: str) -> Op:
    (op,) = parse_cell(cell)
    return op


def _rank(value: Any, ranks: int) -> int:
    if not 0 <= (rank := int(value)) < ranks:
        raise ValueError(f"of {ranks} ranks none is {rank}")
    return rank


def _time(value: Any) -> float:
    if not math.isfinite(time := float(value)):
        raise ValueError(f"{value} is no time")
    return time


def _transfer(
    num_ranks: int, kind: Any, ranks: Any, producer: Any, consumer: Any, start: Any, end: Any
) -> TransferEvent:
    if kind not in TRANSFER_KINDS:
        raise ValueError(f"{kind!r} is no kind of transfer")
    if not ranks or (producer is None and consumer is None):
        raise ValueError("a transfer has ranks, and an op that it belongs to")
    before, after = (None if cell is None else _op(cell) for cell in (producer, consumer))
    members = tuple(_rank(rank, num_ranks) for rank in ranks)
    return TransferEvent(kind, members, before, after, _time(start), _time(end))
