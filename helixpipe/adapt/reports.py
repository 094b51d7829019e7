"""What ranks report of a step they have timed, and what that says of the speeds of ranks and links.

Times are held against costs: a figure here is a ratio, time taken over time expected, so that ops of all kinds,
messages of all sizes and programs of other chunks can be compared. Ops on a rank are known from their own times. Of a
message the time is known only where its receiver had nothing else to do: it then ends when the receiver goes on, and
begins when it was sent, when its receive was posted, or when the message before it on the link had come, whichever is
last. Nearly every order has such messages, the first of the step in each direction among them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from statistics import median
from typing import NamedTuple, TypeVar

from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.project import LoweredProgram
from helixpipe.program.costs import Costs
from helixpipe.program.program import Op
from helixpipe.program.timeline import bubble_of

WAITED = 0.1
"""The least share of a message's time that its receiver waits for it where that time is taken to be known."""

Key = TypeVar("Key")

Stage = tuple[str, int]
"""A kind of op, and the stage it runs."""

Link = tuple[int, int]
"""Source and target, pipeline ranks."""


class Received(NamedTuple):
    """When a message could come, when its rank began to wait for it, and when that had ended."""

    posted: float
    waited: float
    arrived: float


@dataclass(frozen=True)
class RankTimes:
    """Times of one step on one rank, in seconds of a clock that all ranks share.

    ops: for each kind, stage and chunk the median time and how many there were. sent: when messages could leave, by
    number. received: of messages that came. copies: seconds of all copies to the host and back. begin, end: of the
    rank's ops. pipeline: which of the replicas. plan: the number of the plan that ran.
    """

    step: int
    rank: int
    pipeline: int = 0
    plan: int = 0
    ops: tuple[tuple[str, int, int, float, int], ...] = ()
    sent: Mapping[int, float] = field(default_factory=dict)
    received: Mapping[int, Received] = field(default_factory=dict)
    copies: float = 0.0
    begin: float = 0.0
    end: float = 0.0

    @property
    def busy(self) -> float:
        """Seconds in ops, as far as medians tell."""
        return sum(seconds * count for *_, seconds, count in self.ops)

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> RankTimes:
        values = json.loads(text)
        values["ops"] = tuple((kind, stage, chunk, *rest) for kind, stage, chunk, *rest in values["ops"])
        values["sent"] = {int(number): time for number, time in values["sent"].items()}
        values["received"] = {int(number): Received(*times) for number, times in values["received"].items()}
        return cls(**values)


def medians(ops: Iterable[tuple[Op, float, float]]) -> tuple[tuple[str, int, int, float, int], ...]:
    """Return `RankTimes.ops` of ops with their starts and ends."""
    times: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for (kind, stage, _, chunk), start, end in ops:
        times[kind, stage, chunk].append(end - start)
    return tuple((*key, median(values), len(values)) for key, values in times.items())


@dataclass(frozen=True)
class Observation:
    """A step as it was timed, each figure that of the slowest replica: the others wait for it.

    ranks, links, copies: time over expected time, of all ops of a rank, of messages of a link, of a rank's copies.
    stages: the same of the ops of one kind in one stage. seconds: from the first op of a step to its last. bubble: the
    share of it in which ranks ran no op.
    """

    step: int
    ranks: Mapping[int, float]
    stages: Mapping[Stage, float]
    links: Mapping[Link, float]
    copies: Mapping[int, float]
    seconds: float
    bubble: float


class Expected:
    """What ops, messages and copies of a lowered program take by its costs."""

    def __init__(self, lowered: LoweredProgram, costs: Costs):
        self.lowered, self.costs = lowered, costs
        bound = BoundCosts(lowered.program, costs)
        self.ops: dict[tuple[str, int, int], list[float]] = defaultdict(list)
        for ops in lowered.program.ranks:
            for op in ops:
                self.ops[op.kind, op.stage, op.chunk].append(bound.op_time(op))
        self.messages: dict[Link, list[tuple[int, float]]] = defaultdict(list)
        self.copies: dict[int, float] = defaultdict(float)
        for transfer in lowered.graph.transfers:
            if transfer.resource == "link":
                link = transfer.source, transfer.target
                self.messages[link].append((transfer.number, bound.transfer_time(transfer)))
            elif transfer.resource in ("copy_out", "copy_in"):
                self.copies[transfer.source] += bound.transfer_time(transfer)

    def observation(self, reports: Sequence[RankTimes]) -> Observation:
        """Return what the reports of a step say. Every rank of a pipeline has one."""
        pipelines: dict[int, dict[int, RankTimes]] = defaultdict(dict)
        for report in reports:
            pipelines[report.pipeline][report.rank] = report
        seen = [self._of_pipeline([each[rank] for rank in sorted(each)]) for each in pipelines.values()]
        slowest = max(seen, key=lambda each: each.seconds)
        return Observation(
            slowest.step,
            _largest(each.ranks for each in seen),
            _largest(each.stages for each in seen),
            _largest(each.links for each in seen),
            _largest(each.copies for each in seen),
            slowest.seconds,
            slowest.bubble,
        )

    def _of_pipeline(self, reports: Sequence[RankTimes]) -> Observation:
        stages: dict[Stage, list[tuple[float, float]]] = defaultdict(list)
        ranks = {}
        for report in reports:
            both = [
                (seconds * count, sum(self.ops[kind, stage, chunk]) * count / len(self.ops[kind, stage, chunk]))
                for kind, stage, chunk, seconds, count in report.ops
            ]
            for (kind, stage, *_), pair in zip(report.ops, both, strict=True):
                stages[kind, stage].append(pair)
            if (ratio := _ratio(both)) is not None:
                ranks[report.rank] = ratio
        seconds = max(each.end for each in reports) - min(each.begin for each in reports)
        copies = {each.rank: _ratio([(each.copies, self.copies[each.rank])]) for each in reports if each.copies}
        return Observation(
            reports[0].step,
            ranks,
            {key: ratio for key, pairs in stages.items() if (ratio := _ratio(pairs)) is not None},
            self._links({each.rank: each for each in reports}),
            {rank: ratio for rank, ratio in copies.items() if ratio is not None},
            seconds,
            bubble_of([each.busy for each in reports], seconds),
        )

    def _links(self, reports: Mapping[int, RankTimes]) -> dict[Link, float]:
        ratios = {}
        for link, messages in self.messages.items():
            known = message_times(messages, reports[link[0]].sent, reports[link[1]].received)
            if known:
                ratios[link] = median(seconds / expected for seconds, expected in known)
        return ratios


def message_times(
    messages: Iterable[tuple[int, float]], sent: Mapping[int, float], received: Mapping[int, Received]
) -> list[tuple[float, float]]:
    """Return the seconds and the expected seconds of those messages of a link whose time is known. messages: numbers,
    and what each should take."""
    known = []
    before, before_known = -inf, True
    for number, expected in sorted(messages, key=lambda each: sent.get(each[0], inf)):
        if number not in sent or number not in received or expected <= 0:
            continue
        posted, waited, arrived = received[number]
        ready = max(sent[number], posted)
        begin = max(ready, before)
        waiting = arrived - waited > WAITED * (arrived - begin)
        if waiting and (before_known or before <= ready) and arrived > begin:
            known.append((arrived - begin, expected))
        before, before_known = arrived, waiting
    return known


def _ratio(pairs: Iterable[tuple[float, float]]) -> float | None:
    """Of sums; None where nothing was expected to take time, or took any."""
    taken, expected = (sum(each) for each in zip(*pairs, strict=True)) if (pairs := list(pairs)) else (0.0, 0.0)
    return taken / expected if taken > 0 and expected > 0 else None


def _largest(figures: Iterable[Mapping[Key, float]]) -> dict[Key, float]:
    merged: dict[Key, float] = {}
    for each in figures:
        for key, value in each.items():
            merged[key] = max(value, merged.get(key, value))
    return merged
