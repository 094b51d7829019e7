"""Orders in which forwards run beside backwards of other units (`--overlap-tp-comm pairs`).

A pair takes less time than its two ops one after the other, but starts when both could and ends with both. In the order
of 1F1B that costs as much as it gains: the gradient of what a forward gives is waited for all the way to the last rank
and back. So orders are tried in which forwards run further ahead (`vocabulary/lanes.py`), as far as there is memory: a
backward takes along the forward that could start as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from helixpipe.costs.model_costs import ModelCosts
from helixpipe.lowering.lower import scheduled
from helixpipe.planning.memory.early import peak_memory
from helixpipe.planning.vocabulary.lanes import BACKWARDS, FORWARDS, HEAD_BACKWARDS, HEADS, WEIGHTS, reordered
from helixpipe.program.costs import Costs
from helixpipe.program.program import Op, Program

AHEAD = (0, 1, 2, 3, 4, 6, 8, 12, 16)
"""Units more in flight that are tried, for each stage of a rank."""

PATIENCE = 3
"""After so many of `AHEAD` that are no faster no more are tried."""

PREFERENCES: tuple[Sequence[str], ...] = (
    (HEAD_BACKWARDS, HEADS, BACKWARDS, FORWARDS, WEIGHTS),
    (HEAD_BACKWARDS, HEADS, FORWARDS, BACKWARDS, WEIGHTS),
)
"""The preferences of a free rank that are tried."""


def with_pairs(program: Program, costs: Costs, limit: float | None) -> Program:
    """Return the program with the forwards and backwards that run at the same time, in the order that takes least of
    those tried; as it is, where the costs' layout has no pairs, nothing is gained or nothing fits.

    limit: the memory of a rank, in the costs' unit; None: none.
    """
    if not isinstance(costs, ModelCosts) or not costs.layout.pairs or not pairable(program):
        return program
    found = [program, *(order for prefer in PREFERENCES for order in _ahead(program, costs, prefer, limit))]
    return min(found, key=lambda each: float(f"{scheduled(each, costs).makespan:.9g}"))


def pairable(program: Program) -> bool:
    """Return whether ops of the program may run beside others: not where weights come for each op."""
    whole = program.sharded == 1 and all(stage.placement != "ring" for stage in program.stages)
    return whole and not program.forward_only and not program.pairs


def may_pair(program: Program, rank: int, forward: Op, backward: Op) -> bool:
    """Return whether two ops of a rank have collectives to hide and weights that are there."""
    return (
        forward.unit != backward.unit
        and all(program.stages[op.stage].owner in (None, rank) for op in (forward, backward))
        and all(any(piece.layer >= 0 for piece in program.stages[op.stage].pieces) for op in (forward, backward))
    )


def _ahead(program: Program, costs: Costs, prefer: Sequence[str], limit: float | None) -> Iterator[Program]:
    """Yield the orders within the limit that are faster than those with fewer units in flight."""
    stages, last = len(program.stages), len(program.stages) - 1
    apart = program.chain < stages or program.stages[last].placement == "replicated"
    heads = range(min(program.chain, last), stages) if apart else range(stages, stages)
    own = max(len({op.stage for op in ops} - set(heads)) for ops in program.ranks)
    units = sum(map(len, program.workload.microbatches))
    fastest, later = scheduled(program, costs).makespan, 0
    for ahead in AHEAD:
        if ahead > units or later >= PATIENCE:
            break
        order = reordered(program, costs, heads, prefer, ahead * own, lambda *pair: may_pair(program, *pair))
        time = scheduled(order, costs).makespan
        if time >= fastest * (1 - 1e-9):
            later += 1
            continue
        if limit is not None and max(peak_memory(order, costs)) > limit:
            break
        fastest, later = time, 0
        yield order
