"""One order for the rows of several pipelines: what it is made of does not depend on the lengths of their rows."""

from __future__ import annotations

import random

import pytest

from helixpipe.costs.hardware import HARDWARE
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import Layout, find_model
from helixpipe.lowering.lower import lower
from helixpipe.lowering.project import Action, LoweredProgram
from helixpipe.planning.documents.alike import lowered_with_rows, rows_alike, with_rows
from helixpipe.planning.documents.chunk_times import ChunkTimes
from helixpipe.planning.documents.packing import balanced_mesh, pack
from helixpipe.program.program import Program
from helixpipe.program.stages import even_stages
from helixpipe.program.workload import Slice, Workload
from schedules import Shape, build

RANKS, LAYERS, DATA = 2, 4, 3
COSTS = ModelCosts(find_model("llama2-7b"), HARDWARE["h100"], Layout(), 8192, DATA, shards_weights=True)


def packed(seed: int) -> list[Workload]:
    """Rows of three pipelines, as their documents come."""
    random_lengths = random.Random(seed)
    found = []
    for _ in range(DATA):
        lengths = [max(1, int(random_lengths.lognormvariate(6, 1.5))) for _ in range(random_lengths.randint(1, 9))]
        times = ChunkTimes(COSTS, even_stages(LAYERS, 1), 1000)
        slices = min(random_lengths.randint(1, 4), max(lengths))
        found.append(pack(lengths, times, balanced_mesh(lengths, times, slices)).workload)
    return found


def program_of(name: str, workload: Workload) -> Program:
    shape = Shape(RANKS, len(workload), LAYERS, costs=COSTS, ragged=workload, sharded=DATA)
    return build(name, shape)


def sharing(lowered: LoweredProgram, rank: int) -> list[tuple[str, int]]:
    """Return what the data-parallel ranks of a pipeline rank do together, in order."""
    return [
        (each.transfer.kind, each.transfer.unit.stage)
        for each in lowered.streams[rank]
        if each.action is Action.START and each.transfer is not None and each.transfer.kind in ("gather", "scatter")
    ]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["infinipipe", "seq1f1b-zb"])
def test_rows_cut_alike_have_one_graph_and_share_in_one_order(name: str, seed: int) -> None:
    """The graph that each pipeline's own rows make is, edge by edge, the one whose order it runs. Orders of their own
    would not do: they share in another."""
    workloads = packed(seed)
    alike = rows_alike(workloads, 8)
    order = lower(program_of(name, alike[0]), COSTS)
    for before, workload in zip(workloads, alike, strict=True):
        own, lent = lower(with_rows(order.program, workload), COSTS), lowered_with_rows(order, workload)
        assert lent.program.workload == lent.graph.program.workload == workload
        for part in ("ops", "messages", "collectives", "successors", "num_dependencies", "buffers", "frees", "saved"):
            assert getattr(own.graph, part) == getattr(lent.graph, part), part
        assert lent.streams == order.streams
        given = [part for chunks in before.microbatches for chunk in chunks for part in chunk]
        kept = [part for chunks in workload.microbatches for chunk in chunks for part in chunk]
        assert set(given) <= set(kept)
        padding = [part for part in kept if part not in given]
        first = 1 + max(part.document for part in given)
        assert sorted(part.document for part in padding) == list(range(first, first + len(padding)))
        assert all((part.start, part.length) == (0, 8) for part in padding)
    assert all(len(sharing(order, rank)) > len(order.program.workload) for rank in range(RANKS))


def test_orders_of_their_own_share_in_other_orders() -> None:
    """So a job with them would gather different layers together."""
    orders = [lower(program_of("infinipipe", workload), COSTS) for workload in packed(1)]
    assert len({tuple(sharing(lowered, 0)) for lowered in orders}) > 1


def test_rows_are_filled_up_at_their_ends() -> None:
    one = Workload((((Slice(0, 0, 5),),), ((Slice(1, 0, 8),), (Slice(1, 8, 3), Slice(2, 0, 1)))))
    other = Workload((((Slice(0, 0, 2),),),))
    first, second = rows_alike([one, other], 4)
    assert first.microbatches == (one.microbatches[1], one.microbatches[0])
    assert second.microbatches == (((Slice(0, 0, 2),), (Slice(1, 0, 4),)), ((Slice(2, 0, 4),),))
    assert rows_alike([first, second], 4) == [first, second]


def test_rows_of_other_numbers_of_chunks_are_refused() -> None:
    program = program_of("infinipipe", Workload((((Slice(0, 0, 5),), (Slice(0, 5, 5),)),)))
    with pytest.raises(ValueError, match=r"rows of \(1,\) chunks cannot run in the order of rows of \(2,\)"):
        with_rows(program, Workload((((Slice(0, 0, 5),),),)))
