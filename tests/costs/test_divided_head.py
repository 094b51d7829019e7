"""Costs of a head that is divided over ranks: times of its parts and of what they exchange, and memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from helixpipe.costs.by_hand import PieceTimes, unit_costs
from helixpipe.costs.hardware import HARDWARE
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import Chunk, Layout, find_model
from helixpipe.costs.piece_kinds import work
from helixpipe.costs.profile_costs import Profile, ProfileCosts
from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.graph import Graph
from helixpipe.lowering.lower import lower
from helixpipe.planning.vocabulary.choice import split_heads
from helixpipe.program.costs import Work
from helixpipe.program.program import Program
from helixpipe.program.stages import Piece, split_head
from helixpipe.program.transfer import Transfer
from helixpipe.program.workload import Extent
from helixpipe.simulate.sweep import sweep
from schedules import Shape, build

TOKENS, RANKS = 4096, 4
COSTS = ModelCosts(find_model("llama2-7b"), HARDWARE["h100"], Layout(tensor_parallel=2), TOKENS)
HIDDEN = TOKENS * 4096 * 2
SUMS = TOKENS * 3 * 4 * RANKS


def divided(costs: ModelCosts = COSTS, microbatches: int = 1, schedule: str = "1f1b") -> Program:
    return split_heads(build(schedule, Shape(RANKS, microbatches, 32, costs=costs)), costs)


def of_kind(graph: Graph, kind: str) -> Transfer:
    return next(transfer for transfer in graph.transfers if transfer.kind == kind)


@pytest.mark.parametrize("sliced", [0, 1024])
@pytest.mark.parametrize("op", ["I", "W", "B"])
def test_norm_and_parts_compute_what_the_head_does(op: str, sliced: int) -> None:
    layout = Layout(tensor_parallel=2, loss_chunk=sliced)

    def total(piece: Piece, of: str) -> tuple[float, float]:
        kernels = work(COSTS.model, layout, piece.kind, of, Chunk(TOKENS), shares=piece.shares)
        flops = sum(kernel.flops for kernel in kernels)
        return flops, sum(kernel.flops > 0 for kernel in kernels)

    whole, products = total(Piece("head"), op)
    parts = [total(piece, op) for piece in split_head(RANKS)]
    assert sum(flops for flops, _ in parts) == pytest.approx(whole)
    assert [count for _, count in parts] == [0, *[products] * RANKS]
    # Over slices the logits are made in F as well, for their sums.
    forward = total(Piece("head"), "F")[0] if not sliced else whole / 3
    if op == "B":
        assert sum(total(piece, "F")[0] for piece in split_head(RANKS)) == pytest.approx(forward)


@pytest.mark.parametrize("gpus", [8, 4])
def test_times_of_what_parts_exchange(gpus: int) -> None:
    """Rings over the ranks of the pipeline: hidden states and gradients pass every rank whole, sums in parts. On nodes
    of 4 GPUs two of the four ranks are on another one."""
    costs = replace(COSTS, hardware=replace(COSTS.hardware, gpus_per_node=gpus))
    program = divided(costs)
    lowered = lower(program, costs)
    bound, latency = BoundCosts(lowered.program, costs), costs.hardware.latency
    bandwidth = costs.hardware.peer_bandwidth(2, same_node=gpus == 8)
    for kind, nbytes in (("head_input", HIDDEN), ("head_gradient", HIDDEN), ("head_sums", SUMS * 3 / 4)):
        found = bound.transfer_time(of_kind(lowered.graph, kind))
        assert found == pytest.approx(3 * latency + nbytes / bandwidth), kind


def test_ranks_share_weights_and_flops() -> None:
    program, ends = divided(), build("1f1b", Shape(RANKS, 1, 32))
    weights = [COSTS.bytes.parameters(program.pieces_of_rank(rank)) for rank in range(RANKS)]
    before = [COSTS.bytes.parameters(ends.pieces_of_rank(rank)) for rank in range(RANKS)]
    rows = COSTS.model.padded_vocab(2) // 2 // RANKS * 4096
    assert [now - then for now, then in zip(weights, before, strict=True)] == [rows, rows, rows, -3 * rows]
    assert COSTS.step_flops(program) == pytest.approx(COSTS.step_flops(ends))


def test_memory_of_what_parts_exchange() -> None:
    """Sizes of the collectives' buffers, and what a part keeps and needs."""
    lowered = lower(divided(), COSTS)
    graph, bound = lowered.graph, BoundCosts(lowered.program, COSTS)
    sizes = {
        kind: [bound.size(graph.buffers[number]) for number in graph.writes[graph.task(of_kind(graph, kind))]]
        for kind in ("head_input", "head_sums", "head_gradient")
    }
    assert sizes == {"head_input": [HIDDEN] * 4, "head_sums": [SUMS] * 4, "head_gradient": [HIDDEN]}
    logits = TOKENS * COSTS.model.padded_vocab(2) / 2 / RANKS
    for part in range(lowered.program.chain, len(lowered.program.stages)):
        saved = next(each for each in graph.buffers if (each.kind, each.stage) == ("saved", part))
        assert bound.size(saved) == HIDDEN + logits * 4 + TOKENS * 8
        assert bound.size(saved._replace(kind="workspace")) == max(logits * 2, 2 * HIDDEN)


def test_nothing_is_counted_on_a_rank_that_another_has() -> None:
    """Hidden states that are brought are there once on each rank, until its part has run."""
    costs = PieceTimes({"mlp": 1.0}, message=1.0)
    lowered = lower(divided(microbatches=3), costs)

    class Bytes(BoundCosts):
        def size(self, buffer: object) -> float:
            return float(getattr(buffer, "kind", "") in ("activation", "gradient", "sums"))

    for rank in range(RANKS):
        peak = sweep(lowered, Bytes(lowered.program, costs), rank)
        held = [each for each in lowered.graph.buffers if each.rank == rank and each.kind in ("activation", "gradient")]
        assert peak.activations == 0.0
        assert 0 < peak.total <= 6 < len(held)


def test_times_given_by_hand_are_shared_out() -> None:
    times = PieceTimes({"head": 8.0, "mlp": 1.0})
    whole = Work("F", (Piece("head"),), (Extent(1.0, 0.0),), None)
    norm, *parts = split_head(RANKS)
    assert times.op_time(whole._replace(pieces=(norm,))) == 0
    assert [times.op_time(whole._replace(pieces=(part,), kind=kind)) for part in parts for kind in "FB"] == [2, 4] * 4
    lowered = lower(split_heads(build("1f1b", Shape(2, 2, 2)), unit_costs()), times)
    assert lowered.program.chain == 2


@pytest.mark.parametrize("sliced", [0, 16])
def test_times_of_a_profile_are_shared_out(sliced: int) -> None:
    """Of a head that was measured whole: norm and parts take together what it does, over slices their F a product
    more."""
    profile = Profile.load(Path("tests/pins/profile.json"))
    costs = ProfileCosts(replace(profile, layout=replace(profile.layout, loss_chunk=sliced)))
    work = Work("B", (Piece("head"),), (Extent(1.0, 0.0),), None)

    def time(pieces: tuple[Piece, ...], kind: str) -> float:
        return sum(costs.op_time(work._replace(pieces=(piece,), kind=kind)) for piece in pieces) - len(pieces) * (
            costs.op_time(work._replace(pieces=(), kind=kind))
        )

    norm, *parts = split_head(RANKS)
    for kind in "BIW" if not sliced else "BI":
        assert time((norm, *parts), kind) == pytest.approx(time((Piece("head"),), kind), rel=1e-6)
    product = (time((Piece("head"),), "B") - time((norm,), "B")) / 3
    forward = product if sliced else time((Piece("head"),), "F") - time((norm,), "F")
    assert time(tuple(parts), "F") == pytest.approx(forward, rel=1e-6)
