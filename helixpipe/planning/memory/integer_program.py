"""Covering by whole numbers: as little as covers every need. Solved exactly, or relaxed and rounded.

HiGHS (through scipy) is within a percent of the least for hundreds of numbers in seconds, mostly. Its relaxation with
fractions takes a tenth of that; rounded up it covers all needs, for nothing here is bought with less, and then each
number is lowered as far as the others allow. The better of the two is taken, for the exact search may run out of time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from scipy.sparse import csc_array

RELATIVE_GAP = 0.01
"""Part of the least by which what the exact search finds may be more."""

TIME_LIMIT = 1.0
"""Seconds of the exact search."""

TOLERANCE = 1e-9
"""Part of a need that rounding may leave uncovered; solvers leave 1e-6 and are rounded up to whole numbers."""


@dataclass(frozen=True)
class Covering:
    """Whole numbers x, 0 <= x <= most, with matrix x >= need and the least weights x.

    matrix: a row for each need, none of it negative.
    """

    matrix: csc_array
    need: np.ndarray
    most: np.ndarray
    weights: np.ndarray

    def covers(self, values: np.ndarray) -> bool:
        return bool((self.matrix @ values >= self.need * (1 - TOLERANCE)).all())

    def objective(self, values: np.ndarray) -> float:
        return float(self.weights @ values)


@dataclass(frozen=True)
class Solution:
    """The solution of an integer program. values: whole numbers that cover every need. objective: of them. bound: a
    lower bound of the objective. exact: whether they come from the exact search, and not from rounding.
    """

    values: np.ndarray
    objective: float
    bound: float
    exact: bool

    @property
    def gap(self) -> float:
        """Part of the bound by which the objective is above it."""
        return (self.objective - self.bound) / self.bound if self.bound > 0 else 0.0


def solve(covering: Covering, exact: bool = True, time_limit: float = TIME_LIMIT) -> Solution | None:
    """Return numbers that cover every need, None if even the greatest of each do not. Without `exact` the relaxation
    alone.

    The exact search is cut off by time, so two runs may find different numbers: solve once and pass on the solution.
    """
    import numpy as np

    if not covering.covers(covering.most):
        return None
    if covering.covers(np.zeros_like(covering.most)):
        return Solution(np.zeros_like(covering.most), 0.0, 0.0, True)
    relaxed, bound = _relaxed(covering)
    best = lowered(covering, np.minimum(np.ceil(relaxed - 1e-6), covering.most), relaxed)
    solution = Solution(best, covering.objective(best), bound, False)
    if not exact or solution.gap <= RELATIVE_GAP:
        return solution
    searched, searched_bound = _searched(covering, time_limit)
    bound = max(bound, searched_bound)
    if searched is not None and covering.objective(searched) < solution.objective:
        return Solution(searched, covering.objective(searched), bound, True)
    return Solution(solution.values, solution.objective, bound, False)


def least(covering: Covering) -> float:
    """Return a lower bound of the objective from the relaxation; inf if nothing covers every need."""
    return _relaxed(covering)[1] if covering.covers(covering.most) else inf


def _relaxed(covering: Covering) -> tuple[np.ndarray, float]:
    """Return fractions that cover every need, and their objective; the greatest of each if the solver fails."""
    from scipy.optimize import linprog

    upper = list(zip(covering.most * 0, covering.most, strict=True))
    optimum = linprog(covering.weights, A_ub=-covering.matrix, b_ub=-covering.need, bounds=upper, method="highs")
    return (optimum.x, optimum.fun) if optimum.x is not None else (covering.most, 0.0)


def _searched(covering: Covering, time_limit: float) -> tuple[np.ndarray | None, float]:
    """Whole numbers that cover every need, None where none were found in time; and what none can be below."""
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    optimum = milp(
        covering.weights,
        integrality=np.ones_like(covering.weights),
        bounds=Bounds(0, covering.most),
        constraints=LinearConstraint(covering.matrix, covering.need, inf),
        options={"mip_rel_gap": RELATIVE_GAP, "time_limit": time_limit},
    )
    bound = optimum.mip_dual_bound if optimum.mip_dual_bound is not None else 0.0
    if optimum.x is None:
        return None, bound
    values = np.rint(optimum.x)
    return (lowered(covering, values, optimum.x) if covering.covers(values) else None), bound


def lowered(covering: Covering, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Lower each number as far as the others allow, first those furthest above `wanted`; raise numbers to their maxima
    first where rounding has left a need uncovered.
    """
    import numpy as np

    values = np.where(covering.covers(values), values, covering.most)
    slack = covering.matrix @ values - covering.need * (1 - TOLERANCE)
    pointers, rows, figures = covering.matrix.indptr, covering.matrix.indices, covering.matrix.data
    for index in _by_excess(values - wanted, covering.weights):
        own = slice(pointers[index], pointers[index + 1])
        used, figure = rows[own], figures[own]
        spare = (slack[used] / figure).min(initial=inf)
        down = min(values[index], np.floor(spare)) if spare < inf else values[index]
        if down > 0:
            values[index] -= down
            slack[used] -= down * figure
    return values


def _by_excess(excess: np.ndarray, weights: np.ndarray) -> Iterable[int]:
    import numpy as np

    return [int(index) for index in np.lexsort((-weights, -excess))]
