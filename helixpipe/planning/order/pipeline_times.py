"""Times orders of forwards and backwards, one stage a rank, without a graph: for searches that compare many orders.

Ops start as early as the op before on their rank and the message that brings their input allow, messages as early as
their link. No message overtakes another, since ranks that are neighbours run in one order; so a pass over the orders
does the sums of `lowering.order.list_schedule`, and the makespan is equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Any

from helixpipe.compiled import core
from helixpipe.lowering.bound import BoundCosts
from helixpipe.planning.order.orders import forward_units
from helixpipe.program.costs import Costs
from helixpipe.program.program import Op, Program, Unit
from helixpipe.program.stages import Stage
from helixpipe.program.transfer import Transfer
from helixpipe.program.workload import Workload

ByUnit = Sequence[Sequence[float]]
"""A time for each stage and each unit."""


class PipelineTimes:
    """Times of a workload's units in stages of which each rank has one. units: (microbatch, chunk), by number.
    forward, backward: of each rank; down, up: of messages from each rank to the next one and back."""

    def __init__(self, stages: Sequence[Stage], workload: Workload, costs: Costs):
        self.units = forward_units(workload)
        first = tuple((Op("F", rank, 0, 0),) for rank in range(len(stages)))  # so that it is known who sends to whom
        self._bound = BoundCosts(Program("", tuple(stages), first, workload), costs)
        self._known_messages: dict[Hashable, list[float]] = {}
        self.forward, self.backward = self._by_unit("F"), self._by_unit("B")

    def _by_unit(self, kind: str) -> list[list[float]]:
        figures: list[list[float]] = []
        for stage, alike in enumerate(self._bound.alike):
            times = [self._bound.op_time(Op(kind, stage, *unit)) for unit in self.units] if alike == stage else None
            figures.append(figures[alike] if times is None else times)
        return figures

    @cached_property
    def down(self) -> list[list[float]]:
        return [self._messages("activation", (rank, rank + 1), rank + 1) for rank in range(len(self.forward) - 1)]

    @cached_property
    def up(self) -> list[list[float]]:
        return [self._messages("gradient", (rank + 1, rank), rank) for rank in range(len(self.forward) - 1)]

    def _messages(self, kind: str, ranks: tuple[int, int], stage: int) -> list[float]:
        alike = kind, self._bound.link(ranks), self._bound.alike[stage]
        if alike not in self._known_messages:
            time = self._bound.transfer_time
            transfers = (Transfer(0, kind, ranks, Unit(stage, *unit)) for unit in self.units)
            self._known_messages[alike] = [*map(time, transfers)]
        return self._known_messages[alike]

    def makespan(self, orders: Sequence[Sequence[int]]) -> float:
        """Return the makespan of an order of each rank's ops, n for F of unit number n and ~n for its B, of all
        units."""
        if self._compiled is not None:
            return float(self._compiled.makespan(orders))
        return makespan(orders, self.forward, self.backward, self.down, self.up)

    @cached_property
    def _compiled(self) -> Any | None:
        module = core()
        return None if module is None else module.PipelineTimes(self.forward, self.backward, self.down, self.up)


def makespan(orders: Sequence[Sequence[int]], forward: ByUnit, backward: ByUnit, down: ByUnit, up: ByUnit) -> float:
    """Return the makespan of an order of ops on each rank: number n for F of unit n, ~n for its B. forward, backward:
    of each rank; down, up: of messages from each rank to the next one and back, empty where they take no time. Its
    twin is compiled/pipeline_times.cpp."""
    ranks, units = range(len(orders)), len(forward[0])
    last = len(orders) - 1
    nothing: list[float] = [0.0] * units
    inputs = [nothing, *([-1.0] * units for _ in range(last))]  # when each rank has them; -1: not yet
    gradients = [*([-1.0] * units for _ in range(last)), nothing]
    links_down, links_up, now, done = [0.0] * len(orders), [0.0] * len(orders), [0.0] * len(orders), [0] * len(orders)

    def run(rank: int) -> bool:
        """Run a rank's ops until one waits for what is not there; whether any ran."""
        order, place, time = orders[rank], done[rank], now[rank]
        begun, end = place, len(order)
        own_inputs, own_gradients, own_forward, own_backward = (
            each[rank] for each in (inputs, gradients, forward, backward)
        )
        link_down, link_up = links_down[rank], links_up[rank]
        sent_down = inputs[rank + 1] if rank < last else None
        sent_up = gradients[rank - 1] if rank else None
        times_down = down[rank] if down and rank < last else nothing
        times_up = up[rank - 1] if up and rank else nothing
        while place < end:
            unit = order[place]
            if unit >= 0:
                ready = own_inputs[unit]
                if ready < 0.0:
                    break
                time = (ready if ready > time else time) + own_forward[unit]
                if sent_down is not None:
                    link_down = (time if time > link_down else link_down) + times_down[unit]
                    sent_down[unit] = link_down
            else:
                unit = ~unit
                ready = own_gradients[unit]
                if ready < 0.0:
                    break
                time = (ready if ready > time else time) + own_backward[unit]
                if sent_up is not None:
                    link_up = (time if time > link_up else link_up) + times_up[unit]
                    sent_up[unit] = link_up
            place += 1
        done[rank], now[rank], links_down[rank], links_up[rank] = place, time, link_down, link_up
        return place > begun

    forth_and_back = (*ranks, *reversed(ranks))
    while sum(map(run, forth_and_back)):
        pass
    return max(now)
