"""A job that hangs: what its ranks say of themselves, and the text made of it.

Each rank tells a `State` (`helixpipe.watch.watchdog` collects them). `stalled` decides whether the job hangs.
`report` says where every rank is, and what is the first cause: whoever follows whom each rank waits for comes to a rank
that waits for nobody, to one that does not answer, or to a message that one rank has sent and another has not got.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

_SILENT = "silent: stopped, dead, cut off, or in a call that lets no other Python code run"

Place = tuple[int, int]
"""A rank's progress, to be compared between ranks: how many parts of the run it has begun (all ranks go through the
same), and in the part that runs the pipeline the number of its instruction.
"""


class Hop(NamedTuple):
    """A message on the way of what a rank waits for, which weights may travel over several ranks. Ranks are the job's.

    sent: where the source sends it. taken: where the target waits for it.
    """

    source: int
    target: int
    sent: Place
    taken: Place


class AwaitedRank(NamedTuple):
    """A rank of the job that has to come as far as `place`."""

    rank: int
    place: Place


@dataclass(frozen=True)
class State:
    """The state of a rank, as it reports it.

    name: `rank 2`, maybe with its place in the parallel axes. part: of the run. waited: seconds at this place. limit:
    how many are too many there. doing: a verb and what follows it, as in `runs 2F5`.
    What it waits for is at most one of: way, of the message it waits for, from where that started; needs; together: all
    ranks must come to this place.
    """

    rank: int
    name: str
    part: str
    place: Place
    waited: float
    limit: float
    doing: str
    awaited: str = ""
    way: tuple[Hop, ...] = ()
    needs: tuple[AwaitedRank, ...] = ()
    together: bool = False

    @property
    def waits(self) -> bool:
        """Whether the rank may be waiting for another."""
        return bool(self.way or self.needs or self.together)

    @property
    def over(self) -> bool:
        return self.waited > self.limit

    def __str__(self) -> str:
        been = f"has waited {self.waited:.0f} s" if self.waits else f"for {self.waited:.0f} s"
        return f"{self.name}, {self.part}: {self.doing}; {been}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> State:
        fields: dict[str, Any] = json.loads(text)
        place = fields.pop("place")
        way = tuple(Hop(source, target, tuple(sent), tuple(taken)) for source, target, sent, taken in fields.pop("way"))
        needs = tuple(AwaitedRank(rank, tuple(where)) for rank, where in fields.pop("needs"))
        return cls(place=(place[0], place[1]), way=way, needs=needs, **fields)


def stalled(states: Iterable[State]) -> bool:
    """Whether the job hangs: a rank has waited too long for others, and none that answers makes progress."""
    states = list(states)
    return any(state.waits for state in states) and all(state.over for state in states)


def report(states: Mapping[int, State], world_size: int, ended: Mapping[int, str]) -> str:
    """Return the position of every rank of the job, and the first cause. Several lines, without a line end at the end.

    states: of the ranks that answered. ended: how the others ended that said so; the rest is silent.
    """
    job = _RankStates(states, ended, range(world_size))
    shortest = min((state.waited for state in states.values()), default=0.0)
    causes = job.causes()
    lines = [f"the job has stalled: no rank has got any further for {shortest:.0f} s."]
    lines += [f"  {job.line(rank)}" for rank in job.ranks]
    lines += [f"First cause{'s' * (len(causes) > 1)}:", *(f"  {cause}" for cause in causes)]
    lines.append(
        "(2F5 is the forward of stage 2 on microbatch 5, 2F5.1 on its chunk 1; B, I, W and R are the backward, its two "
        "halves and the recomputation.)"
    )
    lines.append("What to do: docs/troubleshooting.md. How long to wait before this: --stall-timeout-seconds.")
    return "\n".join(lines)


@dataclass(frozen=True)
class _RankStates:
    """The ranks of a job: states of those that answered, how others ended; the rest is silent."""

    states: Mapping[int, State]
    ended: Mapping[int, str]
    ranks: range

    def line(self, rank: int) -> str:
        """Return what is known of a rank."""
        state = self.states.get(rank)
        if state is None:
            return f"rank {rank}: {self._absent(rank)}"
        return f"{state}; rank {state.way[-1].source} {self._of_source(state)}" if state.way else str(state)

    def causes(self) -> list[str]:
        """Return the causes that no other rank's state explains, in sentences."""
        absent: dict[str, list[int]] = {}
        for rank in self.ranks:
            if rank not in self.states:
                absent.setdefault(self._absent(rank), []).append(rank)
        sentences = [f"{_ranks(ranks)}: {what}." for what, ranks in absent.items()]
        free: dict[tuple[int, int, str], list[State]] = {}
        lost: list[tuple[State, tuple[Hop, ...]]] = []
        for _, state in sorted(self.states.items()):
            behind, hops = self.waits_for(state)
            if hops:
                lost.append((state, tuple(hops)))
            elif not behind:
                # a collective has one place in the order of all tasks, and another in the stream of each rank
                at = (state.place[0], -1, state.awaited) if state.awaited else (*state.place, state.doing)
                free.setdefault(at, []).append(state)
        ways = {hops for _, hops in lost}
        for state, hops in lost:  # what did not get to a rank cannot get further
            if ways.isdisjoint(hops[:number] for number in range(1, len(hops))):
                sentences.append(_lost(state, hops))
        sentences += [_free(alike) for _, alike in sorted(free.items())]
        return sentences or [self._circle()]

    def waits_for(self, state: State) -> tuple[list[int], Sequence[Hop]]:
        """Return the ranks that the state cannot go on without, which are behind or gone; if its message has been sent,
        the hops on one of which it is lost. Neither: no rank is to blame.
        """
        open_hops: Sequence[Hop] = state.way
        for number, hop in enumerate(state.way, start=1):
            if self._is_past(hop.target, hop.taken):
                open_hops = state.way[number:]
        for hop in open_hops:
            if not self._is_past(hop.source, hop.sent):
                return [hop.source], []
        if open_hops:
            return [], open_hops
        needs = [AwaitedRank(rank, state.place) for rank in self.ranks] if state.together else state.needs
        return [need.rank for need in needs if not self._has_come(need)], []

    def _has_come(self, need: AwaitedRank) -> bool:
        return need.rank in self.states and self.states[need.rank].place >= need.place

    def _is_past(self, rank: int, place: Place) -> bool:
        return rank in self.states and self.states[rank].place > place

    def _absent(self, rank: int) -> str:
        return f"ended {self.ended[rank]}" if rank in self.ended else _SILENT

    def _of_source(self, state: State) -> str:
        """Return the state of the rank from which a message is awaited."""
        hop = state.way[-1]
        if hop.source not in self.states:
            return "has ended" if hop.source in self.ended else "is silent"
        behind, lost = self.waits_for(state)
        if lost:
            return "has sent it"
        return "has not sent it yet" if behind == [hop.source] else f"has not got it from rank {behind[0]} yet"

    def _circle(self) -> str:
        """Everybody waits for somebody: follow that until a rank comes again."""
        way = [min(self.states)]
        while way.count(way[-1]) < 2:
            way.append(self.waits_for(self.states[way[-1]])[0][0])
        circle = " waits for ".join(f"rank {rank}" for rank in way[way.index(way[-1]) :])
        return (
            f"a circle: {circle}. No lowered program has one, so these ranks run different programs: compare their "
            "flags and versions."
        )


def _lost(state: State, hops: Sequence[Hop]) -> str:
    first, last = hops[0].source, hops[-1].target
    over = f", over {_ranks([hop.target for hop in hops[:-1]])}" if len(hops) > 1 else ""
    return (
        f"message lost between rank {first} and rank {last}{over}: rank {first} has sent {state.awaited}, and rank "
        f"{last} has not got it. The network between them has failed, or takes longer than the time allowed."
    )


def _free(alike: Sequence[State]) -> str:
    """Return a sentence on ranks that do the same, and wait for no rank that is behind them."""
    state = alike[0]
    doing = f"wait until the end of {state.awaited}" if state.awaited and len(alike) > 1 else state.doing
    what = f"{_ranks([each.rank for each in alike])}, {state.part}: {doing}"
    if state.waits:
        return f"{what}. Nobody they wait for is behind, so what they do together hangs."
    return f"{what}. It waits for nobody." if len(alike) == 1 else f"{what}. They wait for nobody."


def _ranks(ranks: Sequence[int]) -> str:
    """Return `rank 3`, or `ranks 0-3, 6`; ranks in rising order."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
