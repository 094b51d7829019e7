"""Weights behind one interface: in shards they give the same gradients as whole. And which weights are replicas."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from helixpipe.planning.memory.recompute import RecomputeOptions
from helixpipe.planning.memory.sharding import shared_out
from helixpipe.program.stages import HEAD_MTP, Piece
from helixpipe.runtime.replicas import replica_groups, replicated_weights
from helixpipe.runtime.sharded_weights import FlatWeights
from tests.distributed import run_ranks
from tests.runtime.equality import Case
from tests.runtime.happens_before.cuda import Simulation
from tests.runtime.happens_before.nccl import Communicators, Nowhere
from tests.runtime.sharded import run_sharded

CASES = [
    Case("weipipe", 2, 4, "gpt", tied=True),
    Case("zb1p", 2, 3, "llama", recompute=RecomputeOptions("without-attention")),
    Case("helix", 2, 4, "llama", folds=1, ship="qkv"),
    Case("helix", 2, 4, "gpt", folds=1, recompute=RecomputeOptions("full")),
    Case("seq1f1b", 2, 3, "gpt", lengths=(5, 7)),
    Case("interleaved-1f1b", 2, 4, "llama", v=2, dropout=0.1),
    Case("zb1p", 2, 3, "llama", recompute=RecomputeOptions("without-attention"), gathered_once=True),
    Case("1f1b", 2, 3, "gpt", gathered_once=True),
    Case("helix", 2, 4, "llama", folds=1, ship="qkv", gathered_once=True),
    Case("interleaved-1f1b", 2, 4, "llama", v=2, gathered_once=True),
    # experts over both pipelines, whose other weights are in parts over these
    Case("zb1p", 2, 3, "experts", ep=2),
    Case("weipipe", 2, 4, "experts", layers=4, ep=2),
    Case("seq1f1b", 2, 2, "experts", lengths=(5, 7), ep=2, gathered_once=True),
]


@pytest.fixture(scope="module")
def results() -> dict[Case, list[dict[str, Any]]]:
    """By case, of every rank."""
    by_rank = run_ranks(run_sharded, 4, CASES)
    return {case: [found[index] for found in by_rank] for index, case in enumerate(CASES)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sharded_weights_give_the_same_gradients(case: Case, results: dict[Case, list[dict[str, Any]]]) -> None:
    """And after an update again: weights that travel leave their owner whole, and gradients come back to it."""
    for found in results[case]:
        assert found["differing"] == []
        assert all(whole == pytest.approx(sharded, rel=1e-11) for whole, sharded in found["losses"])
    first, second, _ = zip(*(found["losses"] for found in results[case]), strict=True)
    assert first != second, "the update matters"


@pytest.mark.parametrize("case", [case for case in CASES if case.schedule in ("zb1p", "interleaved-1f1b")], ids=str)
def test_no_more_is_whole_than_the_sweep_counts(case: Case, results: dict[Case, list[dict[str, Any]]]) -> None:
    """Of weights that embedding and head do not share, and that do not travel."""
    for found in results[case]:
        measured, swept = found["whole"]
        assert 0.98 * swept <= measured <= 1.02 * swept


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_stage_is_complete_once_after_its_last_backward(
    case: Case, results: dict[Case, list[dict[str, Any]]]
) -> None:
    """But for those that travel. Nothing came after it, as the store has asserted."""
    program = shared_out(case.program(), 2)
    for found in results[case]:
        ops = [op for op in program.ranks[found["rank"]] if op.kind in "BW" and program.stages[op.stage].owner is None]
        order = dict.fromkeys(op.stage for op in reversed(ops))
        assert found["completed"] == [program.stages[stage].pieces for stage in reversed(order)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_replicated_stages_are_summed_once_in_one_order(case: Case, results: dict[Case, list[dict[str, Any]]]) -> None:
    replicated = [stage.pieces for stage in shared_out(case.program(), 2).stages if stage.placement == "replicated"]
    assert sorted(results[case][0]["summed"]) == sorted(replicated)
    assert all(found["summed"] == results[case][0]["summed"] for found in results[case])


class Tied:
    share_embeddings_and_output_weights = True

    def replicated_parameters(self) -> dict[str, torch.nn.Parameter]:
        names = ("embedding.word_embeddings.weight", "embedding.position_embeddings.weight")
        return {name: torch.nn.Parameter(torch.zeros(1)) for name in names}

    def piece_of(self, parameter: str) -> Piece:
        return Piece("embed")


def test_a_tied_weight_is_held_where_the_head_is() -> None:
    """And no other weight of the embedding."""
    embed, head, core = Piece("embed"), Piece("head"), Piece("attn", 0)
    held = [{embed, core}, {embed, core}, {head, core}]
    position, word = replicated_weights(Tied(), held)
    assert (position.pieces, position.ranks) == ({embed}, (0, 1))
    assert (word.pieces, word.ranks) == ({embed, head}, (0, 1, 2))
    assert replica_groups(held, tied=True) == [(0, 1), (0, 1, 2)]
    assert replica_groups(held, tied=False) == [(0, 1)]


def test_the_embedding_is_held_where_the_head_predicts_further_tokens() -> None:
    """All of it, whether the head's weight is tied or not."""
    embed, head = Piece("embed"), Piece(HEAD_MTP)
    held = [{embed}, {Piece("mlp", 0)}, {head}]
    for weight in replicated_weights(Tied(), held):
        assert (weight.pieces, weight.ranks) == ({embed, head}, (0, 2))
    assert replica_groups(held, tied=False) == replica_groups(held, tied=True) == [(0, 2)]


def test_weights_that_are_being_gathered_are_not_freed() -> None:
    """A step that is given up forgets what it gathers; the memory may be given out again at once."""
    simulation, group = Simulation(), SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    with Communicators(simulation, Nowhere()).replaced(), simulation.replaced():
        weights = FlatWeights({"w": torch.nn.Parameter(torch.ones(4))}, frozenset(), cast(Any, group), torch.float32)
        weights.start_gathering(0)
        weights.forget()
        torch.zeros(weights.numel)
        simulation.memories.settle()
    assert not simulation.world.findings
