"""The memory that CUDA graphs add to what the same units keep without them (`helixpipe.model.graphs`)."""

from __future__ import annotations

from collections import defaultdict

from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import OFF
from helixpipe.lowering.bound import BoundCosts
from helixpipe.program.costs import Contents
from helixpipe.program.graphs import runs, stages_in_graphs
from helixpipe.program.program import Program, Unit
from helixpipe.program.stages import Piece, Segment
from helixpipe.program.tasks import Buffer


def graph_memory(program: Program, costs: ModelCosts, rank: int) -> float:
    """Return the bytes on a rank beyond those of its buffers, once all graphs are there.

    Each kind of unit (a stage's and a chunk's) has slots for as many as are in flight at most, and those of all kinds
    stay, though not all are in flight at once. A slot has copies of the inputs of its runs, and keeps for itself what a
    forward needs for a moment, about what the run gives. All share what one backward needs, with the gradients of a
    run's weights, inputs and outputs.
    """
    layout = costs.layout
    if layout.cuda_graphs == OFF or layout.tensor_parallel * layout.context_parallel > 1 or layout.mlp_chunk:
        return 0.0
    bound, stages = BoundCosts(program, costs), stages_in_graphs(program, rank)
    now: dict[tuple[int, int], int] = defaultdict(int)
    most: dict[tuple[int, int], int] = defaultdict(int)
    kept: dict[tuple[int, int], float] = defaultdict(float)
    beside: dict[tuple[int, int], float] = defaultdict(float)
    together = at_most = shared = 0.0
    for op in program.ranks[rank]:
        kind, activations = (op.stage, op.chunk), program.activations_of(op.unit)
        if op.stage not in stages or activations.offload:
            continue
        again = bool(activations.recompute)  # then graphs are there between R, or what B begins with, and the end of B
        buffer = Buffer("recomputed" if again else "saved", rank, *op.unit)
        size, contents = bound.size(buffer), bound.contents(buffer)
        assert contents is not None
        if op.kind == ("B" if again else "F"):
            now[kind] += 1
            together += size
            most[kind] = max(most[kind], now[kind])
            kept[kind] = max(kept[kind], costs.size(contents._replace(in_backward=False)))
            at_most = max(at_most, together)
            captured = _captured(program, op.stage)
            cuts = [(run, _cut(bound, op.unit, run[0]) + _cut(bound, op.unit, after)) for run, after in captured]
            beside[kind] = max(beside[kind], sum(crossing for _, crossing in cuts))
            workspace = bound.workspace(op._replace(kind="B"))
            weights = max((costs.kept_parameters(run) for run, _ in cuts), default=0.0) * layout.element_bytes
            shared = max(shared, max((crossing for _, crossing in cuts), default=0.0) + workspace + weights)
        if op.kind == "B":
            now[kind] -= 1
            together -= size
    return sum(number * (kept[kind] + beside[kind]) for kind, number in most.items()) - at_most + shared


def _captured(program: Program, stage: int) -> list[tuple[tuple[Piece, ...], Piece | None]]:
    """Return each captured run of a stage, and the piece after it; None: the model ends."""
    following = program.stages[stage + 1].pieces[:1] if stage + 1 < len(program.stages) else ()
    pieces = (*program.stages[stage].pieces, *following)
    return [
        (run, next(iter(pieces[pieces.index(run[-1]) + 1 :]), None))
        for captured, run in runs(program.stages[stage].pieces)
        if captured
    ]


def _cut(bound: BoundCosts, unit: Unit, after: Piece | None) -> float:
    """Return the bytes of what crosses the cut before a piece."""
    if after is None:
        return 0.0
    extents = bound.program.workload.extents[unit.microbatch][unit.chunk]
    return bound.costs.size(Contents("activation", (Segment((after,), False),), extents, bound.whole))
