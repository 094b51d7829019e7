"""What the leading rank of a run does with the reports of all: watches, tells, plans anew, writes the live state."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from helixpipe.adapt.live import LINES, Live, SlowPart
from helixpipe.adapt.measured_costs import MeasuredCosts, measured_costs
from helixpipe.adapt.monitor import Monitor
from helixpipe.adapt.replan import PlannerAnswer, Proposal, Situation, adaptable
from helixpipe.adapt.reports import Link, RankTimes, Stage
from helixpipe.common.errors import UserError
from helixpipe.planning.plan import Plan, make_plan
from helixpipe.program.costs import Costs
from helixpipe.program.program import Program

Mode = Literal["off", "advise", "auto"]

HOLD = 10
"""Steps after a switch before another is planned."""

AHEAD, SECONDS_AHEAD = 10, 20.0
"""Layers move after a checkpoint by a plan that is made so many steps before it, or so many seconds if that is more."""


class Planner(Protocol):
    """Makes proposals, in a process of its own if it likes; see `BackgroundPlanner`."""

    def announce(self, size: Situation) -> None: ...

    def plan(self, size: Situation, give_up: Callable[[], bool] | None = None) -> PlannerAnswer: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Place:
    """A rank's place in the job. rank, world_size: in the job. pipeline, pipelines: its replica, and how many there
    are. reports: whether it reports for its pipeline rank."""

    rank: int
    world_size: int
    pipeline: int
    pipelines: int
    reports: bool = True

    @property
    def leads(self) -> bool:
        return self.rank == 0


@dataclass(frozen=True)
class Options:
    """interval: steps from one report to the next. mode: what is done where another plan is better. exact: only plans
    with which losses stay equal to the digit. limit: of a rank's memory, in the costs' unit; None: what the run's own
    plan needs. folder: where the live state is written. steps: of the run. checkpoints: steps from one after which
    layers may move between ranks to the next; 0: they stay."""

    interval: int = 2
    mode: Mode = "advise"
    exact: bool = True
    limit: float | None = None
    folder: Path | None = None
    steps: int = 0
    checkpoints: int = 0


class SentPlan(NamedTuple):
    """A plan on its way to all ranks: its program, what was measured while `measured_in` ran, and what it lowers to.
    after: the step after which layers move as it has them; 0: none move, and it is switched to at once."""

    number: int
    name: str
    program: Program
    measured_in: Program
    stages: dict[Stage, float]
    links: dict[Link, float]
    copies: float
    digest: str = ""
    after: int = 0

    def plan(self, base: Costs) -> Plan:
        """Return the plan, alike on all ranks. base: costs of the run's own plan."""
        return make_plan(self.program, measured_costs(base, self.measured_in, self.stages, self.links, self.copies))


def digest(plan: Plan) -> str:
    """Return a digest of every rank's instructions."""
    return hashlib.sha256(repr(plan.lowered.streams).encode()).hexdigest()


class Lead:
    """See `Adaptation`, whose thread calls `take`; `switched` is called in the training loop. taken: the last step that
    was taken in."""

    def __init__(
        self,
        plan: Plan,
        place: Place,
        options: Options,
        planner: Callable[[], Planner],
        say: Callable[[str], object],
        closing: threading.Event,
    ):
        self._own = self._running = plan
        self._place, self._options, self._make_planner = place, options, planner
        self._say_line, self._closing = say, closing
        self._planner: Planner | None = None
        self._monitor = Monitor(plan.lowered, plan.costs)
        self._name, self._number, self._since = plan.program.schedule, 0, 0
        self._situations = self.taken = 0
        self._wanted = False  # something has changed, and no plan was made for it
        self._uncut = False  # nor one in which layers may move
        self._moves_after = 0
        self._lines: list[str] = []
        self._lock = threading.Lock()

    def take(self, reports: Sequence[RankTimes], loss: float | None, waiting: bool) -> SentPlan | None:
        """Take in the reports of a step. waiting: whether all ranks are still to switch to a plan sent before. Returns
        a plan for all ranks to switch to."""
        with self._lock:
            if self._monitor.lowered is not self._running.lowered:
                self._monitor.run(self._running.lowered)
        step = reports[0].step
        change = self._monitor.take(reports)
        if self._monitor.known and self._planner is None and self._options.mode == "auto":
            self._planner = self._make_planner()  # before it is needed: a process takes a while to start
        if change is not None:
            self._say(f"iteration {step}: {change}")
            self._wanted = self._uncut = True
        if 0 < self._moves_after < step:
            self.missed("not all ranks had the plan in time")
        sent = None
        may_switch = not waiting and (not self._number or step >= self._since + HOLD)
        after, moving = self._next_move(step) if self._uncut else (0, 0)
        if (self._wanted or moving) and self._options.mode != "off" and may_switch:
            self._wanted = False
            self._uncut = self._uncut and not moving
            sent = self._replanned(step, after, moving)
        self._write(step, loss)
        self.taken = step
        return sent

    def switched(self, plan: Plan, name: str, step: int) -> None:
        """Take note that the steps after `step` run another plan."""
        with self._lock:
            self._running = plan
        self._number += 1
        self._moves_after = 0
        self._name, self._since = name, step + 1
        self._say(f"from iteration {step + 1} on: {name}")

    def missed(self, why: str) -> None:
        """Take note that layers did not move after the step after which they were to."""
        after, self._uncut, self._moves_after = self._moves_after, True, 0
        self._say(f"iteration {after}: {why}; layers stay for now")

    def close(self) -> None:
        if self._planner is not None:
            self._planner.close()

    def _next_move(self, step: int) -> tuple[int, int]:
        """Return the step after which layers may move by a plan that is made now, and the steps until the next one
        then, in which that has to pay; zeros where it is too early, or there is none."""
        every, seen = self._options.checkpoints, self._monitor.last
        if not every or seen is None or not self._monitor.known:
            return 0, 0
        after = step + every - step % every
        lasts = min(every, self._options.steps - after)
        near = after - step <= min(max(AHEAD, ceil(SECONDS_AHEAD / max(seen.seconds, 1e-3))), every - 1)
        return (after, lasts) if lasts > 0 and (near or self._options.mode == "advise") else (0, 0)

    def _replanned(self, step: int, after: int, moving: int) -> SentPlan | None:
        """Tell of a better plan for the speeds as they are now; returns it where all ranks are to switch to it. after,
        moving: of `_next_move`."""
        running = self._running
        if not adaptable(running.program):
            return None
        self._situations += 1
        costs = self._monitor.costs()
        situation = Situation(
            self._situations,
            running.program,
            running.costs,
            self._own.program,
            costs,
            self._options.limit,
            well=not self._monitor.slow,
            exact=self._options.exact,
            moving=moving,
            job_ranks=self._place.world_size,
        )
        if self._planner is None:
            self._planner = self._make_planner()
        self._planner.announce(situation)
        proposal = self._planner.plan(situation, self._closing.is_set).proposal
        if self._closing.is_set() or proposal is None:
            return None
        if self._options.mode == "advise":
            self._say(f"iteration {step}: {proposal} (--replan auto switches to it)")
            return None
        self._say(f"iteration {step}: {proposal}" + (f", from iteration {after + 1} on" if proposal.moves else ""))
        self._moves_after = after if proposal.moves else 0
        return self._sent(proposal, costs)

    def _sent(self, proposal: Proposal, costs: MeasuredCosts) -> SentPlan:
        # Layers that move take as long as what was measured where they go.
        measured_in = proposal.program if proposal.moves else self._monitor.measured_in
        figures = dict(costs.stages), dict(costs.links), costs.copies
        sent = SentPlan(
            *(self._number + 1, proposal.name, proposal.program, measured_in, *figures), after=self._moves_after
        )
        return sent._replace(digest=digest(sent.plan(self._own.costs)))

    def _say(self, line: str) -> None:
        self._lines = [*self._lines, line][-LINES:]
        self._say_line(line)

    def _write(self, step: int, loss: float | None) -> None:
        folder, seen = self._options.folder, self._monitor.last
        if folder is None or seen is None:
            return
        slow = [SlowPart(str(each.part), each.speed) for each in self._monitor.slow]
        figures = seen.seconds, seen.bubble, self._monitor.cost
        live = Live(step, self._options.steps, *figures, self._name, self._since, loss, slow, self._lines)
        try:
            live.save(folder)
        except UserError as error:  # a full disk ends no run
            self._say_line(f"WARNING: {error}")
            self._options = replace(self._options, folder=None)
