"""Plans of steps to come: made on one rank of each pipeline, in a process beside it, and sent to the pipeline's others
while earlier steps train.

Ranks announce the steps in one order. A thread of each rank takes them one after the other: the planning rank's waits
for its process, compares with the planning ranks of the other pipelines how documents were dealt, and sends the plan;
the others' receive it. They have process groups of their own, by way of the CPU, so that neither the device nor the
collectives of training wait for a plan. What the training loop waits for is a plan that it needs and that has not come:
then the planning rank makes a simpler one at once.
"""

from __future__ import annotations

import pickle
import threading
import time
import traceback
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from helixpipe.common.errors import UserError
from helixpipe.planning.background import BackgroundPlanner
from megatron.pretrain.plan.documents import StepPlan, StepRequest
from megatron.pretrain.process.parallel import Parallel

PATIENCE = 0.5
"""Seconds that training waits for a plan which is being made, before a simpler one is made instead. There is nothing to
hide the first one behind: that is waited for."""


class Beside(Protocol):
    """The planner of a planning rank; see `BackgroundPlanner`."""

    def announce(self, size: StepRequest) -> None: ...

    def plan(self, size: StepRequest, give_up: Callable[[], bool], instead: StepRequest) -> StepPlan: ...

    def close(self) -> None: ...


class Taken(NamedTuple):
    """A plan, the seconds that training waited for it, and whether it had to be made in a hurry."""

    plan: StepPlan
    waited: float
    late: bool


class PlanStream:
    """The plans of one rank.

    planner: makes them; it is sent to the planning process, which `beside` starts. arrived: told of each plan, in the
    thread, in the order of the announcements. say: told when a plan was late. together: one plan is made for all
    pipelines, on the first rank of all. Collective over all ranks when made.
    """

    def __init__(
        self,
        planner: Callable[[StepRequest], StepPlan],
        parallel: Parallel,
        arrived: Callable[[StepPlan], None],
        say: Callable[[str], None],
        patience: float = PATIENCE,
        beside: Callable[..., Beside] = BackgroundPlanner,
        together: bool = False,
    ):
        self._arrived, self._patience, self._say, self._dp_rank = arrived, patience, say, parallel.dp_rank
        self._groups = _Groups(parallel, together)
        self._planner = beside(planner, say=say) if self._groups.plans_here else None
        self._asked: SimpleQueue[StepRequest | None] = SimpleQueue()
        self._done: dict[StepRequest, StepPlan | Exception] = {}
        self._change = threading.Condition()
        self._needed: dict[StepRequest, float] = {}
        self._taken = False
        self._thread = threading.Thread(target=self._serve, name="plans", daemon=True)
        self._thread.start()

    def announce(self, request: StepRequest) -> None:
        """Announce a step that will be taken after those announced before it."""
        if self._planner is not None:
            self._planner.announce(request)
        self._asked.put(request)

    def take(self, request: StepRequest) -> Taken:
        """Wait for the plan of an announced step. Raises what planning it raised, on all ranks of the pipeline."""
        begin = time.monotonic()
        with self._change:
            self._needed[request] = begin
            while request not in self._done:
                if not self._change.wait(1.0) and not self._thread.is_alive():
                    raise RuntimeError("the thread that brings plans has ended")
            plan = self._done.pop(request)
            del self._needed[request]
        if isinstance(plan, Exception):
            raise plan
        self._taken = True
        return Taken(plan, time.monotonic() - begin, plan.request.quick and not request.quick)

    def close(self) -> None:
        self._asked.put(None)
        if self._planner is not None:
            self._planner.close()

    # -------------------------------------------------------------------------------------------------- in the thread

    def _serve(self) -> None:
        while (request := self._asked.get()) is not None:
            try:
                plan = self._groups.send(self._made(request)) if self._planner is not None else self._groups.receive()
                if isinstance(plan, StepPlan):
                    plan = plan.of(self._dp_rank)
                    self._arrived(plan)
            except Exception as error:
                plan = error
            with self._change:
                self._done[request] = plan
                self._change.notify_all()

    def _made(self, request: StepRequest) -> StepPlan | Exception:
        assert self._planner is not None
        try:
            made = self._planner.plan(request, lambda: self._hurries(request), request._replace(quick=True))
            if made.request.quick and not request.quick:
                self._say(f"the plan of step {request.step + 1} was not made in time: a simpler one is used.")
            return made
        except UserError as error:
            return error
        except Exception as error:
            return RuntimeError("".join(traceback.format_exception(type(error), error, error.__traceback__)))

    def _hurries(self, request: StepRequest) -> bool:
        since = self._needed.get(request)
        return self._taken and since is not None and time.monotonic() - since > self._patience


class _Groups:
    """The groups in which plans are sent. together: the first rank of all plans for all pipelines; else each pipeline's
    first rank plans for its own. plans_here: whether this rank plans.

    Every rank of the job creates all groups, in one order, as torch's new_group requires.
    """

    def __init__(self, parallel: Parallel, together: bool):
        known: list[Any] = [None] * parallel.world_size
        number = 0 if together else parallel.dp_rank
        dist.all_gather_object(known, number)
        pipelines = [[rank for rank, own in enumerate(known) if own == each] for each in sorted(set(known))]
        made = [dist.new_group(ranks, backend="gloo") if len(ranks) > 1 else None for ranks in pipelines]
        mine = sorted(set(known)).index(number)
        self._pipeline, self._source = made[mine], pipelines[mine][0]
        planning = [ranks[0] for ranks in pipelines]
        self._planning = dist.new_group(planning, backend="gloo") if len(planning) > 1 else None
        self._size = len(planning)
        self.plans_here = parallel.rank == self._source

    def send(self, plan: StepPlan | Exception) -> StepPlan | Exception:
        """Send a plan from the planning rank to its pipeline. Returns what every rank of the pipeline receives."""
        if self._planning is not None:
            others: list[Any] = [None] * self._size
            mine = plan.deal if isinstance(plan, StepPlan) else plan
            dist.all_gather_object(others, mine, group=self._planning)
            failed = next((each for each in others if isinstance(each, Exception)), None)
            if failed is not None:
                plan = failed  # on all pipelines, so that none waits for one that has ended
            elif len(set(others)) > 1:
                plan = RuntimeError("data-parallel ranks have dealt a step's documents differently: their plans differ")
        if self._pipeline is not None:
            content = torch.frombuffer(bytearray(pickle.dumps(plan, pickle.HIGHEST_PROTOCOL)), dtype=torch.uint8)
            dist.broadcast(torch.tensor([content.numel()]), self._source, group=self._pipeline)
            dist.broadcast(content, self._source, group=self._pipeline)
        return plan

    def receive(self) -> StepPlan | Exception:
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, self._source, group=self._pipeline)
        content = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(content, self._source, group=self._pipeline)
        plan: StepPlan | Exception = pickle.loads(content.numpy().tobytes())
        return plan
