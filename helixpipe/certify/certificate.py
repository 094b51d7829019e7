"""A certificate: a simulated step, a lower bound of every order of its work, and all that is needed to check both.

It is a JSON object, which `tools/check_certificate.py` verifies without anything of this package. See `problem` for the
set of programs that the bound holds for. Its fields:

- `stages`, `parts`: how many there are, and how many of them, the last, are parts of the head; `attention`: stages with
  keys and values; `chunks`: of each microbatch; `rows`: (microbatch, chunk) of what shares keys and values;
  `forward_only`.
- `tasks`: kind, stage, microbatch, chunk, what it runs on (`compute`, `link`, `collective`) and its ranks, the least
  time it takes, start and end in the simulated step, and the time it takes beside nothing. A rank's ops in the order of
  their starts are its program. A forward shorter than alone runs beside the backward after it: both lie in their pair's
  time, one after the other, and each may wait for what either waits for.
- `held`: rank, first and last task (by number) of a buffer, its size, whether it is there from the first one's end on;
  `limits`: of each rank.
- `makespan`; `bound` with `value`, `kind` and what that needs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helixpipe.certify.bounds import Bound, largest
from helixpipe.certify.problem import OrderingProblem, problem_of, windows
from helixpipe.certify.time_steps import steps_bound
from helixpipe.common.files import whole_file
from helixpipe.simulate.simulator import Simulation

FORMAT = "helixpipe certificate 2"

EQUAL = 1e-9
"""Part of a makespan by which it may be above a bound and still be called the least: rounding."""


@dataclass(frozen=True)
class Certificate:
    """makespan: of the simulated step, from its start to the end of its last op or transfer."""

    problem: OrderingProblem
    makespan: float
    bound: Bound
    unit: str

    @property
    def gap(self) -> float:
        """The part of the bound by which the makespan is above it."""
        return self.makespan / self.bound.value - 1 if self.bound.value else 0.0

    @property
    def optimal(self) -> bool:
        return self.gap <= EQUAL

    def text(self) -> str:
        """What is printed: the bound, what it rests on, and the gap."""
        value = f"{self.bound.value:.6g} {self.unit}".rstrip()
        verdict = "so this one is as short as any" if self.optimal else f"and this one is {100 * self.gap:.1f} % longer"
        return (
            f"Certified: no order of this work on these ranks in this memory takes less than {value} "
            f"({self.bound.text()}), {verdict}."
        )

    def figures(self) -> dict[str, Any]:
        """The part of --json."""
        of = None if self.bound.resource is None else str(self.bound.resource)
        return {"bound": self.bound.value, "kind": self.bound.kind, "resource": of, "gap": self.gap}

    def to_json(self) -> dict[str, Any]:
        problem, program = self.problem, self.problem.program
        resource = None if self.bound.resource is None else [self.bound.resource.kind, list(self.bound.resource.ranks)]
        return {
            "format": FORMAT,
            "schedule": program.schedule,
            "unit": self.unit,
            "stages": len(program.stages),
            "parts": len(program.stages) - program.chain,
            "attention": [number for number, stage in enumerate(program.stages) if stage.has_attention],
            "chunks": [len(program.workload.chunks(number)) for number in range(len(program.workload))],
            "rows": [[list(place) for place in row] for row in program.workload.rows],
            "forward_only": program.forward_only,
            "tasks": [
                [task.kind, *task.unit, task.resource.kind, list(task.resource.ranks), *task[3:]]
                for task in (*problem.tasks, *problem.others)
            ],
            "held": [list(held) for held in problem.held],
            "limits": list(problem.limits),
            "makespan": self.makespan,
            "bound": {"value": self.bound.value, "kind": self.bound.kind, "resource": resource, **self.bound.data},
        }


def save_certificate(certificate: Certificate, path: str | Path) -> None:
    """Write a certificate. Raises UserError where that is not possible."""
    with whole_file(path) as temporary:
        temporary.write_text(json.dumps(certificate.to_json()) + "\n", encoding="utf-8")


def certify(simulation: Simulation, limit: float | None = None, linear_program: bool = True) -> Certificate:
    """Return the certificate of a simulated step. limit: see `problem_of`. linear_program: whether to try `time_steps`,
    which needs scipy, too; without it the bound is valid and may be lower."""
    problem = problem_of(simulation, limit)
    bound, makespan = largest(problem, windows(problem)), simulation.makespan
    if linear_program and bound.value < makespan * (1 - EQUAL):
        bound = steps_bound(problem, bound.value, makespan) or bound
    return Certificate(problem, makespan, bound, simulation.timeline.unit)
