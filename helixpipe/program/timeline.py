"""A timeline: which op and which message ran when, simulated or measured, in one format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from helixpipe.common.errors import UserError
from helixpipe.common.files import whole_file
from helixpipe.common.json_values import parse_json
from helixpipe.common.ranges import MOST_RANKS
from helixpipe.program.program import Op
from helixpipe.program.text import parse_cell
from helixpipe.program.transfer import Transfer

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


class MessageEvent(NamedTuple):
    """One message between ranks."""

    kind: str
    source: int
    target: int
    producer: Op
    consumer: Op
    start: float
    end: float


class CopyEvent(NamedTuple):
    """Activations on their way to the host of a rank, or, inward, back. op: after which they left, or before which they
    were to be back."""

    rank: int
    inward: bool
    op: Op
    start: float
    end: float


class SharingEvent(NamedTuple):
    """A gather of weights or a scatter of gradients over the data-parallel ranks of a rank. op: the first that needs
    the weights, or the one that made the gradients."""

    rank: int
    kind: str
    op: Op
    start: float
    end: float


@dataclass
class TransferEvents:
    """The events of transfers, by the list of a timeline that they stand in."""

    messages: list[MessageEvent] = field(default_factory=list)
    copies: list[CopyEvent] = field(default_factory=list)
    sharing: list[SharingEvent] = field(default_factory=list)

    def add(self, transfer: Transfer, start: float, end: float) -> None:
        """Add a transfer; one that belongs to no op, a sum over replicas, has no event."""
        kind, ranks, producer, consumer = transfer.kind, transfer.ranks, transfer.producer, transfer.consumer
        if producer is None and consumer is None:
            return
        if producer is not None and consumer is not None:
            self.messages.append(MessageEvent(kind, transfer.source, transfer.target, producer, consumer, start, end))
        elif transfer.resource == "collective":
            self.sharing += [SharingEvent(rank, kind, transfer.op, start, end) for rank in ranks]
        else:
            self.copies.append(CopyEvent(ranks[0], transfer.resource == "copy_in", transfer.op, start, end))


@dataclass(frozen=True)
class Timeline:
    """One step of a schedule on `num_ranks` ranks. unit: `s` for seconds, or `` where piece times carry none. until:
    the end of what is not among the events, such as sums over replicas."""

    title: str
    num_ranks: int
    ops: Sequence[OpEvent]
    messages: Sequence[MessageEvent] = field(default_factory=tuple)
    unit: str = ""
    copies: Sequence[CopyEvent] = field(default_factory=tuple)
    sharing: Sequence[SharingEvent] = field(default_factory=tuple)
    until: float = 0.0

    @property
    def makespan(self) -> float:
        """From 0 to the end of the last op or transfer."""
        events = (self.ops, self.messages, self.copies, self.sharing)
        return max(self.until, *(max((event.end for event in of_kind), default=0.0) for of_kind in events))

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
        times = [0.0] * self.num_ranks
        for event in self.copies:
            times[event.rank] += event.end - event.start
        return times

    def sharing_time(self) -> list[float]:
        """Time that gathers and scatters of each rank take."""
        times = [0.0] * self.num_ranks
        for event in self.sharing:
            times[event.rank] += event.end - event.start
        return times

    def to_json(self) -> dict[str, Any]:
        sharing = [[e.rank, e.kind, str(e.op), e.start, e.end] for e in self.sharing]
        copies = [[e.rank, e.inward, str(e.op), e.start, e.end] for e in self.copies]
        return {
            "title": self.title,
            "ranks": self.num_ranks,
            "unit": self.unit,
            "ops": [[e.rank, str(e.op), e.start, e.end] for e in self.ops],
            "messages": [
                [e.kind, e.source, e.target, str(e.producer), str(e.consumer), e.start, e.end] for e in self.messages
            ],
        } | {name: value for name, value in (("copies", copies), ("sharing", sharing), ("until", self.until)) if value}

    def save(self, path: str | Path) -> None:
        """Write the file, whole or not at all. Raises UserError when it cannot be written."""
        with whole_file(path) as temporary:
            temporary.write_text(json.dumps(self.to_json()) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Timeline:
        """Read what `save` wrote. Raises UserError, naming the file, for anything else."""
        try:
            data = parse_json(Path(path).read_text(encoding="utf-8"))
            ops = [OpEvent(int(r), _op(cell), float(a), float(b)) for r, cell, a, b in data["ops"]]
            messages = [
                MessageEvent(str(kind), int(s), int(t), _op(p), _op(c), float(a), float(b))
                for kind, s, t, p, c, a, b in data["messages"]
            ]
            copies = [
                CopyEvent(int(rank), bool(inward), _op(cell), float(start), float(end))
                for rank, inward, cell, start, end in data.get("copies", ())
            ]
            sharing = [
                SharingEvent(int(rank), str(kind), _op(cell), float(start), float(end))
                for rank, kind, cell, start, end in data.get("sharing", ())
            ]
            until = float(data.get("until", 0.0))
            title, ranks, unit = str(data["title"]), int(data["ranks"]), str(data["unit"])
            if not 1 <= ranks <= MOST_RANKS:
                raise ValueError(f"ranks must be a whole number from 1 to {MOST_RANKS}, not {ranks}")
            return cls(title, ranks, ops, messages, unit, copies, sharing, until)
        except OSError as error:
            raise UserError(f"cannot read the timeline {path}: {error.strerror}.") from None
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise UserError(f"{path} is not a timeline file ({type(error).__name__}: {error}).") from None


def _op(cell: str) -> Op:
    (op,) = parse_cell(cell)
    return op
