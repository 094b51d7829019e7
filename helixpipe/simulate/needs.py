"""What ranks need of their devices in all: the number that memory limits are compared with."""

from __future__ import annotations

from collections.abc import Sequence

from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.project import LoweredProgram
from helixpipe.program.costs import Costs
from helixpipe.simulate.graph_memory import CostsOutsideGraphs, captures
from helixpipe.simulate.sweep import Peak, peaks, sweep


def device_needs(lowered: LoweredProgram, costs: Costs, found: Sequence[Peak] = ()) -> list[float]:
    """Return the most that each rank has at a time on its device in all, weights and optimizer included, in the costs'
    unit. found: what `sweep.peaks` returns, if it is known."""
    program = lowered.program
    graphs = [0.0] * program.num_ranks
    if captures(program.workload, costs):
        bound = [CostsOutsideGraphs(program, costs, rank) for rank in range(program.num_ranks)]
        found = [sweep(lowered, own, rank) for rank, own in enumerate(bound)]
        graphs = [own.graphs() for own in bound]
    needs = []
    for rank, peak in enumerate(found or peaks(lowered, BoundCosts(program, costs))):
        pieces = program.pieces_of_rank(rank)
        update = 0.0 if program.forward_only else peak.received + costs.update_memory(pieces)
        needs.append(max(peak.total, update) + graphs[rank] + costs.static_memory(pieces))
    return needs


def beside_eager(lowered: LoweredProgram, costs: Costs) -> list[float]:
    """Return how much more each rank needs for its ops with CUDA graphs than if all ran eagerly."""
    program = lowered.program
    eager = peaks(lowered, BoundCosts(program, costs))
    bound = [CostsOutsideGraphs(program, costs, rank) for rank in range(program.num_ranks)]
    return [sweep(lowered, own, rank).total + own.graphs() - eager[rank].total for rank, own in enumerate(bound)]
