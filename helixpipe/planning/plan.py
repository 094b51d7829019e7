"""A plan: a program with all that was made from it, for one step size or one step.

It is made once and handed on. `Plans` keeps one for each step size; `background.BackgroundPlanner` makes the next
step's in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

from helixpipe.common.collector import collector_paused
from helixpipe.lowering.graph import Graph
from helixpipe.lowering.lower import lower, lowered_valid
from helixpipe.lowering.project import LoweredProgram
from helixpipe.lowering.streams import check_streams
from helixpipe.program.costs import Costs
from helixpipe.program.program import Program, forward_only
from helixpipe.simulate.simulator import Simulation, simulate

Size = TypeVar("Size", bound=Hashable)


@dataclass(frozen=True)
class Plan:
    """A valid program, lowered, and the costs it was lowered with."""

    lowered: LoweredProgram
    costs: Costs

    @property
    def program(self) -> Program:
        return self.lowered.program

    @property
    def graph(self) -> Graph:
        return self.lowered.graph

    @cached_property
    def simulation(self) -> Simulation:
        """The step on paper, with the plan's own costs."""
        return simulate(self.lowered, self.costs, "s" if self.costs.memory_unit == "bytes" else "")

    @cached_property
    def evaluation(self) -> Plan:
        """The plan of the forwards alone. It needs no check: part of an order that ends ends too."""
        return Plan(lowered_valid(forward_only(self.program), self.costs), self.costs)


@collector_paused()
def make_plan(program: Program, costs: Costs) -> Plan:
    """Validate and lower a program, and check the streams it comes to. Raises ProgramError when it is not valid."""
    lowered = lower(program, costs)
    check_streams(lowered)
    return Plan(lowered, costs)


class Plans(Generic[Size]):
    """The planner of steps that are all of a few sizes: programs and plans are made when first asked for, and kept."""

    def __init__(self, make: Callable[[Size], Program], costs: Costs):
        self.costs = costs
        self._make = make
        self._programs: dict[Size, Program] = {}
        self._plans: dict[Size, Plan] = {}

    def program(self, size: Size) -> Program:
        """Return the program alone, which may not have been validated yet."""
        if size not in self._programs:  # some schedules search for theirs
            self._programs[size] = self._make(size)
        return self._programs[size]

    def adopt(self, size: Size, plan: Plan) -> None:
        """Have steps of this size run another plan."""
        self._programs[size], self._plans[size] = plan.program, plan

    def plan(self, size: Size) -> Plan:
        if size not in self._plans:
            self._plans[size] = make_plan(self.program(size), self.costs)
        return self._plans[size]
