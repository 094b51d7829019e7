"""Ranks report what they have timed to one, which finds what is slow, plans anew, and has all switch at one step.

Everything is done in a thread beside training and by way of the job's key-value store, in no collective and on no
device. Every few steps a rank that reports (one for each pipeline rank of each replica) writes its report over its last
one; the leading rank reads them. A plan is sent as its program and what costs were measured to be, from which every
rank lowers it to the same instructions. A rank that has done so says so with the numbers that are summed over all ranks
at the end of a step anyway (`ready`). When the sum says that all have, all switch before the same step (`settle`). A
plan that has layers move says after which step; one that not all hold by then is forgotten.

In the store: `adapt/report/PIPELINE.RANK`, a rank's last report; `adapt/plan/N`, the N-th plan that was sent,
which every rank fetches once.
"""

from __future__ import annotations

import base64
import pickle
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from helixpipe.adapt.lead import Lead, Options, Place, Planner, SentPlan, digest
from helixpipe.adapt.reports import RankTimes
from helixpipe.planning.plan import Plan

POLL = 0.1
"""Seconds between two looks into the store; of many ranks more, see `REQUESTS`."""

REQUESTS = 500.0
"""The most requests a second of all ranks together for a plan."""

PATIENCE = 60.0
"""Seconds that the leading rank waits for the reports of a step."""

_REPORT, _PLAN = "adapt/report/", "adapt/plan/"


class Adaptation:
    """What one rank does for it. plan: of the run's own. store: torch.distributed's. planner: makes the leading rank's
    planner, when there is something to plan. adopted: told, in the training loop, of each plan that all have switched
    to. say: takes lines, on the leading rank."""

    def __init__(
        self,
        plan: Plan,
        place: Place,
        options: Options,
        store: Any,
        planner: Callable[[], Planner],
        adopted: Callable[[Plan], None],
        say: Callable[[str], object],
    ):
        self._plan, self._number = plan, 0
        self._base = plan.costs
        self._place, self._options = place, options
        self._store = store.clone() if hasattr(store, "clone") else store
        self._adopted = adopted
        self._pending: tuple[SentPlan, Plan] | None = None
        self._settled = 0
        self._sent = self._fetched = 0
        self.agreed: Plan | None = None
        """The plan that all switch to after this step, once layers have moved as it has them: see `moved`."""
        self._reports: SimpleQueue[RankTimes | None] = SimpleQueue()
        self._closing = threading.Event()
        self._lead = Lead(plan, place, options, planner, say, self._closing) if place.leads else None
        self.loss: float | None = None
        self._poll = max(POLL, place.world_size / REQUESTS)
        self._thread = threading.Thread(target=self._serve, name="adaptation", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------ in the training loop

    def due(self, step: int, lowered: object) -> bool:
        """Whether a step should be recorded, if this is what it runs."""
        return self._place.reports and step % self._options.interval == 0 and lowered is self._plan.lowered

    @property
    def moves_layers(self) -> bool:
        """Whether plans may have layers move between ranks."""
        return self._options.mode == "auto" and self._options.checkpoints > 0

    @property
    def number(self) -> int:
        """The number of the plan that steps run, from 0."""
        return self._number

    def report(self, report: RankTimes) -> None:
        """Have a report sent."""
        self._reports.put(report)

    @property
    def ready(self) -> float:
        """1 where this rank holds the next plan, else 0: to be summed over all ranks at the end of a step."""
        pending = self._pending
        if pending is not None and 0 < pending[0].after <= self._settled:
            self._pending = pending = None
        return float(pending is not None)

    def settle(self, ready: float, step: int) -> None:
        """Switch to the next plan if all ranks hold it. ready: the sum of what they said after `step`."""
        self._settled = step
        if ready != self._place.world_size:
            return
        assert self._pending is not None, "all ranks hold the next plan, but this one does not"
        sent, plan = self._pending
        if not sent.after:
            self._switch(sent, plan, step)
        elif sent.after == step:
            self.agreed = plan

    def moved(self) -> None:
        """Switch to the agreed plan: layers have moved."""
        assert self._pending is not None
        sent, plan = self._pending
        self._switch(sent, plan, sent.after)

    def stay(self, why: str) -> None:
        """Forget the agreed plan: layers cannot move now. On all ranks alike."""
        self._pending = self.agreed = None
        if self._lead is not None:
            self._lead.missed(why)

    def _switch(self, sent: SentPlan, plan: Plan, step: int) -> None:
        self._number += 1  # before there is none pending: this one would be taken in again
        self._plan, self._pending, self.agreed = plan, None, None
        self._adopted(plan)
        if self._lead is not None:
            self._lead.switched(plan, sent.name, step)

    def close(self) -> None:
        self._closing.set()
        self._reports.put(None)
        self._thread.join(5.0)
        if self._lead is not None:
            self._lead.close()

    # ------------------------------------------------------------------------------------------------- in the thread

    def _serve(self) -> None:
        try:
            while not self._closing.is_set():
                try:
                    report = self._reports.get(timeout=self._poll)
                except Empty:
                    report = None
                if report is not None:
                    self._store.set(f"{_REPORT}{report.pipeline}.{report.rank}", report.to_json())
                    if self._lead is not None and self._reports.empty():
                        self._follow(self._lead, report.step)
                if self._pending is None and self._options.mode == "auto":
                    self._fetch()
        except RuntimeError:  # the store is gone, and the job with it
            return

    def _follow(self, lead: Lead, step: int) -> None:
        reports = self._collect(step)
        if reports is None or reports[0].plan != self._number:
            return
        sent = lead.take(reports, self.loss, waiting=self._pending is not None)
        if sent is not None:
            self._sent += 1
            self._store.set(f"{_PLAN}{self._sent}", base64.b64encode(pickle.dumps(sent)).decode())

    def _collect(self, step: int) -> list[RankTimes] | None:
        """Return all reports of a step; None where one does not come, or a later one has."""
        until, reports = time.monotonic() + PATIENCE, []
        for pipeline in range(self._place.pipelines):
            for rank in range(self._plan.program.num_ranks):
                key = f"{_REPORT}{pipeline}.{rank}"
                while True:
                    if self._store.check([key]):
                        report = RankTimes.from_json(self._store.get(key))
                        if report.step > step:
                            return None
                        if report.step == step:
                            reports.append(report)
                            break
                    if self._closing.wait(POLL / 10) or time.monotonic() > until:
                        return None
        return reports

    def _fetch(self) -> None:
        """Take in the next plan, if there is one."""
        key = f"{_PLAN}{self._fetched + 1}"
        if not self._store.check([key]):
            return
        sent: SentPlan = pickle.loads(base64.b64decode(self._store.get(key)))
        self._fetched += 1
        if sent.number == self._number + 1 and not 0 < sent.after <= self._settled:
            plan = sent.plan(self._base)
            if digest(plan) == sent.digest:  # else this rank is never ready, and none switches
                self._pending = sent, plan
