"""HelixPipe: what ranks keep, and as little recomputation as fits."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from typing import Literal

import pytest

from helixpipe.costs.by_hand import segments_stash
from helixpipe.costs.hardware import GIB, HARDWARE
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import MODELS, Layout
from helixpipe.lowering.lower import lower
from helixpipe.planning.memory.early import peak_memory
from helixpipe.planning.memory.recompute import RecomputeOptions
from helixpipe.program.program import Program
from helixpipe.program.stages import Piece
from helixpipe.simulate.simulator import simulate
from megatron.pretrain.arguments import parse_and_plan
from schedules import Shape, build
from schedules.helix import HelixOptions
from tests.schedules.test_helix import INSIDE, run

# -------------------------------------------------------------------------------------------------------------- memory


def test_stash_of_a_layer_and_microbatch() -> None:
    """16 elements of b·s·h without recomputation. With it the inputs of both stages: attention's output and the
    residual in the combined stage, queries, keys and values in attention."""
    shape = Shape(4, 8, 8)
    plain = build("helix", shape, HelixOptions(2, "none", helix_recompute=False)).stages
    recomputed = build("helix", shape, HelixOptions(2, "none")).stages
    assert [16 * segments_stash(stage.segments, "F") for stage in plain[2:4]] == [13, 3]
    assert [16 * segments_stash(stage.segments, "F") for stage in recomputed[2:4]] == [2, 3]
    assert [stage.recompute for stage in recomputed[:3]] == [
        ((Piece("norm", 0), Piece("qkv", 0)),),
        (),
        (recomputed[2].pieces[1:],),
    ]
    assert recomputed[-1].recompute == ()


@pytest.mark.parametrize(("ship", "elements"), [("none", (2, 3)), ("qkv", (2, 1)), ("attention", (1, 2))])
def test_stash_of_what_is_shipped(ship: Literal["none", "qkv", "attention"], elements: tuple[int, int]) -> None:
    """Combined stage and attention, with recomputation: attention's own output is the next stage's input, or the
    projection's, and counts there. Queries, keys and values are made again where the QKV layer is beside attention."""
    stages = build("helix", Shape(4, 8, 8), HelixOptions(2, ship)).stages
    assert tuple(16 * segments_stash(stage.segments, "F") for stage in (stages[2], stages[1])) == elements
    plain = build("helix", Shape(4, 8, 8), HelixOptions(2, ship, helix_recompute=False)).stages
    assert sum(16 * segments_stash(stage.segments, "F") for stage in plain[1:3]) == 16


@pytest.mark.parametrize(("p", "rounds", "loops", "folds"), [*product((2, 4, 8), (1, 2), (1, 2), (1, 2))])
def test_every_rank_keeps_the_same(p: int, rounds: int, loops: int, folds: int) -> None:
    """m microbatches of L/p layers without recomputation; with it 5/16 of that and a combined stage at work."""
    m = p * folds * loops
    result = run(p, m, p * rounds, HelixOptions(folds, "none", helix_recompute=False))
    assert result.peak_activation == pytest.approx([m * rounds] * p)
    result = run(p, m, p * rounds, HelixOptions(folds, "none"))
    assert max(result.peak_activation) <= 5 / 16 * m * rounds + 1 + 2 / 16 * m


@pytest.mark.parametrize("ship", ["none", "qkv", "attention"])
def test_recomputes_as_little_as_fits(ship: Literal["none", "qkv", "attention"]) -> None:
    """Less memory, more recomputation, from none to all but attention; what is chosen fits, and less would not."""
    costs = ModelCosts(MODELS["llama2-7b"], HARDWARE["h20"], Layout(8, True), 65536)
    options = HelixOptions(2, ship)

    def peak(program: Program) -> float:
        return max(peak_memory(program, costs))

    def chosen(limit: float | None, recompute: RecomputeOptions = INSIDE) -> Program:
        return build("helix", Shape(4, 8, 8, costs=costs, memory_limit=limit, recompute=recompute), options)

    everything = build("helix", Shape(4, 8, 8, costs=costs), replace(options, helix_recompute=False))
    most, least = peak(everything), peak(chosen(None))
    assert chosen(None).stages == chosen(least).stages == chosen(least / 2).stages
    assert chosen(None).stages == chosen(most, replace(INSIDE, recompute_granularity="without-attention")).stages
    assert chosen(most).stages == everything.stages
    found = [chosen(least + (most - least) * part / 10) for part in range(11)]
    work = [simulate(lower(program, costs), costs).ideal for program in found]
    assert work == sorted(work, reverse=True) and len(set(work)) >= 3
    for program, following in pairwise(found):
        assert peak(program) <= peak(following) <= most
    for part, program in enumerate(found):
        assert peak(program) <= least + (most - least) * part / 10


def test_recomputation_asked_for_is_the_schedules() -> None:
    selective = RecomputeOptions("selective", recompute_early=False)
    program = build("helix", Shape(2, 4, 2, recompute=selective))
    assert [stage.recompute for stage in program.stages] == [
        ((Piece("attn", stage // 2),),) if stage in (1, 3) else () for stage in range(6)
    ]
    program = build("helix", Shape(2, 4, 2), HelixOptions(2, "none", helix_recompute=False))
    assert not any(stage.recompute for stage in program.stages)


def test_the_papers_flags_keep_the_papers_memory() -> None:
    """Its Fig. 10: even over the ranks, but for the first one's embedding and head; 3B at 128k on 8 nodes of H20."""
    environ = {"WORLD_SIZE": "64", "RANK": "0", "LOCAL_RANK": "0"}
    authors = "--attention-pipeline --num-fold 2 --transfer-weight --checkpoint-without-attn"
    words = (
        "--num-layers 16 --hidden-size 4096 --num-attention-heads 32 --seq-length 131072 --bf16 --mock-data "
        "--max-position-embeddings 131072 --micro-batch-size 1 --global-batch-size 16 --train-iters 1 --lr 1e-4 "
        "--tokenizer-type NullTokenizer --vocab-size 50257 --attention-dropout 0 --hidden-dropout 0 --hardware h20 "
        "--tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 8 --loss-chunk-size 0 "
        f"--no-helix-spread-head {authors}"
    )
    config, plans = parse_and_plan(words.split(), environ=environ)
    first, *others = plans.plan(16).simulation.device_needs
    assert config.parallel.pipeline_schedule == "helix" and not config.recompute.recompute_early
    assert first < 30 * GIB and max(others) < 22 * GIB and max(others) < 1.02 * min(others)
    early = parse_and_plan([*words.split(), "--recompute-early"], environ=environ)[1].plan(16).simulation
    assert max(early.device_needs) > 2 * first
