"""HelixPipe: the bubbles of the paper's closed forms and of its order, memory, and no program that cannot run."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import pytest

from helixpipe.common.errors import ScheduleError
from helixpipe.costs.by_hand import PieceTimes
from helixpipe.costs.hardware import HARDWARE
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import MODELS, Layout
from helixpipe.lowering.lower import lower
from helixpipe.lowering.validate import validate
from helixpipe.planning.memory.recompute import RecomputeOptions
from helixpipe.program.program import Op, Program
from helixpipe.simulate.simulator import Simulation, simulate
from schedules import Shape, build
from schedules.helix import HelixOptions
from tests.costs.asking import message_bytes

PAPER = {"qkv": 1.0, "attn": 3.0, "mlp": 2.0}
INSIDE = RecomputeOptions(recompute_early=False)


def run(
    p: int, m: int, layers: int, options: HelixOptions, message: float = 0.0, times: dict[str, float] | None = None
) -> Simulation:
    """Recomputation, where the options ask for it, inside the backward."""
    costs = PieceTimes(times or PAPER, message=message)
    return simulate(lower(build("helix", Shape(p, m, layers, recompute=INSIDE), options), costs), costs)


def rows(program: Program) -> list[str]:
    return [" ".join(map(str, ops)) for ops in program.ranks]


# --------------------------------------------------------------------------------------------------------------- order


PAPERS_ORDER = (
    "0F0 0F1 1F1 3F0 4F0 0F2 4F1 0F3 1F3 3F2 4F2 4F3 "
    "5F3 5B3 4B3 5F2 5B2 4B2 3B2 1B3 0B3 5F1 5B1 4B1 0B2 5F0 5B0 4B0 3B0 1B1 0B1 0B0",
    "1F0 2F0 2F1 3F1 1F2 2F2 2F3 3F3 3B3 2B3 2B2 1B2 3B1 2B1 2B0 1B0",
)
SPREAD_ORDER = (
    "0F0 0F1 1F1 3F0 4F0 0F2 4F1 0F3 1F3 3F2 4F2 4F3 5F3 5B3 4B3 4B2 3B2 1B3 5F1 5B1 0B3 4B1 0B2 4B0 3B0 1B1 0B1 0B0",
    "1F0 2F0 2F1 3F1 1F2 2F2 2F3 3F3 5F2 5B2 3B3 2B3 2B2 1B2 5F0 5B0 3B1 2B1 2B0 1B0",
)


@pytest.mark.parametrize(("spread", "order"), [(False, PAPERS_ORDER), (True, SPREAD_ORDER)], ids=["one head", "spread"])
def test_the_order(spread: bool, order: tuple[str, str]) -> None:
    """p = 2, one layer a rank, two loops: the attention of layer l and slot i on rank (l + i + 1) mod 2, and the head
    of slot i, where it is spread, on rank (i + 1) mod 2."""
    program = build("helix", Shape(2, 4, 2), HelixOptions(1, "none", helix_recompute=False, helix_spread_head=spread))
    assert [" ".join(map(str, stage.pieces)) for stage in program.stages] == [
        "embed norm[0] qkv[0]",
        "attn[0]",
        "proj[0] mlp[0] norm[1] qkv[1]",
        "attn[1]",
        "proj[1] mlp[1]",
        "head",
    ]
    assert tuple(rows(program)) == order


@pytest.mark.parametrize(("p", "layers", "folds", "loops"), [*product((1, 2, 3, 4, 8), (1, 2), (1, 2, 3), (1, 2))])
@pytest.mark.parametrize("spread", [False, True])
def test_placement_and_reverse(p: int, layers: int, folds: int, loops: int, spread: bool) -> None:
    layers *= p
    m = p * folds * loops
    options = HelixOptions(folds, "none", helix_recompute=False, helix_spread_head=spread)
    program = build("helix", Shape(p, m, layers), options)
    validate(program)
    homes = {op: rank for rank, ops in enumerate(program.ranks) for op in ops}
    head = len(program.stages) - 1
    for microbatch, layer in product(range(m), range(layers + 1)):
        combined = homes[Op("F", 2 * layer, microbatch)]
        assert combined == layer % p
        if layer < layers:
            slot = microbatch // folds % p
            attention = homes[Op("F", 2 * layer + 1, microbatch)]
            assert attention == (layer + slot + 1) % p
            assert (attention == combined) or slot < p - 1
            assert (attention == homes[Op("F", 2 * layer + 2, microbatch)]) or slot > 0
    for ops in program.ranks:
        layered = [op for op in ops if op.stage != head]
        forward = [op.unit for op in layered if op.kind == "F"]
        assert layered == [Op("F", *unit) for unit in forward] + [Op("B", *unit) for unit in reversed(forward)]
        for place, op in enumerate(ops):
            if op.stage == head and op.kind == "F":
                assert ops[place + 1] == op._replace(kind="B"), "one microbatch's logits at a time"
            if op.stage == head - 1 and op.kind == "B" and not spread:
                assert ops[place - 2 : place] == (Op("F", head, op.microbatch), Op("B", head, op.microbatch))
    for microbatch in range(m):
        slot = microbatch // folds % p if spread else p - 1
        last_slot = range(m - folds, m - 1) if spread and p > 1 else ()
        expected = {0, 1} if microbatch in last_slot else {(slot + 1) % p}
        assert homes[Op("F", head, microbatch)] in expected
    elsewhere = sum(homes[Op("F", head, microbatch)] > 0 for microbatch in range(m))
    messages = lower(program).messages
    assert len(messages) == (2 * 2 * layers * (p - 1) * folds * loops + 2 * elsewhere if p > 1 else 0)


@pytest.mark.parametrize("p", [1, 2, 3, 5])
def test_every_shape_runs_or_is_refused(p: int) -> None:
    for layers, m, folds in product((1, p, p + 1, 2 * p), (1, p, 2 * p, 2 * p + 1, 4 * p), (1, 2, 3)):
        shape = Shape(p, m, layers)
        if layers % p or m % (p * folds):
            with pytest.raises(ScheduleError, match="the nearest valid value"):
                build("helix", shape, HelixOptions(folds, "none"))
        else:
            validate(build("helix", shape, HelixOptions(folds, "none")))


@pytest.mark.parametrize(
    ("shape", "folds", "sentence"),
    [
        (
            Shape(4, 12, 8),
            2,
            "helix needs a number of microbatches that is a multiple of the pipeline size times --helix-folds, 8, not "
            "12; the nearest valid values are 8 and 16.",
        ),
        (
            Shape(4, 8, 6),
            2,
            "--num-layers 6 cannot be divided evenly over 4 pipeline stages; the nearest valid values are 4 and 8.",
        ),
        (Shape(4, 8, 8), 0, "--helix-folds 0 must be at least 1."),
    ],
)
def test_what_it_cannot_have(shape: Shape, folds: int, sentence: str) -> None:
    with pytest.raises(ScheduleError, match=f"^{re.escape(sentence)}$"):
        build("helix", shape, HelixOptions(folds, "none"))


# ------------------------------------------------------------------------------------------------------------- bubbles


@pytest.mark.parametrize(
    ("folds", "recompute", "message", "bubble"),
    [
        (1, False, 0, 27),
        (1, True, 0, 36),
        (2, False, 0, 36),
        (2, True, 0, 51),
        (1, True, 1, 96),
        (2, True, 1, 57),
    ],
)
def test_figures(folds: int, recompute: bool, message: int, bubble: int) -> None:
    """p = 4, m = 8, L = 8, pre, attn and post 1, 3 and 2: 288 of work, 336 with recomputation."""
    result = run(4, 8, 8, HelixOptions(folds, "none", helix_recompute=recompute), message)
    assert result.ideal == (336 if recompute else 288)
    assert result.busy == [result.ideal] * 4
    assert result.bubble_time == bubble


@pytest.mark.parametrize(
    ("p", "rounds", "loops"), [(2, 1, 1), (2, 2, 3), (3, 1, 2), (3, 2, 1), (4, 1, 3), (4, 2, 2), (8, 1, 2), (8, 2, 1)]
)
@pytest.mark.parametrize("times", [PAPER, {"qkv": 2, "attn": 9, "proj": 1, "mlp": 3}], ids=["132", "294"])
def test_closed_forms(p: int, rounds: int, loops: int, times: dict[str, float]) -> None:
    """3(p-1) combined stages and (p-1) times what is recomputed of one, all but its projection. Neither what attention
    takes nor the number of loops matters."""
    combined = sum(times.values()) - times["attn"]
    for recompute in (False, True):
        bound = (p - 1) * (3 * combined + recompute * (combined - times.get("proj", 0)))
        for folds in (1, 2, 3):
            options = HelixOptions(folds, "none", helix_recompute=recompute)
            bubble = run(p, p * folds * loops, p * rounds, options, times=times).bubble_time
            if folds == 1:
                assert bubble == bound
            else:
                assert 0 < bubble <= folds * bound


@pytest.mark.parametrize(("folds", "shortest", "bubble"), [(1, 0, 36), (2, 5, 48)])
def test_longer_attention_lengthens_no_bubble(folds: int, shortest: int, bubble: int) -> None:
    """Nor do more loops: 4(p-1) combined stages with one fold, a third more with two."""
    for loops, attention in product((1, 2, 4), (0, 5, 30, 300)):
        if attention >= shortest:
            result = run(4, 4 * folds * loops, 8, HelixOptions(folds, "none"), times=PAPER | {"attn": attention})
            assert result.bubble_time == bubble


@pytest.mark.parametrize(("p", "shown"), [(2, 16), (4, 60), (8, 124)])
def test_folds_hide_messages(p: int, shown: int) -> None:
    """Messages of 1: with one microbatch a slot they add to the step at every layer, with two hardly at all."""
    added = []
    for folds in (1, 2):
        free, slow = (run(p, 2 * p, 2 * p, HelixOptions(folds, "none"), message).makespan for message in (0, 1))
        added.append(slow - free)
    assert added[0] == shown
    assert added[1] <= 6


def test_less_idle_than_1f1b_and_zero_bubble() -> None:
    """Where attention is most of a layer."""
    times = {"qkv": 1.0, "attn": 12.0, "mlp": 2.0}
    costs = PieceTimes(times)
    others = [simulate(lower(build(n, Shape(4, 8, 8, costs=costs)), costs), costs).makespan for n in ("1f1b", "zb1p")]
    assert run(4, 8, 8, HelixOptions(2, "none", helix_recompute=False), times=times).makespan < min(others)


def test_recomputing_early_idles_less() -> None:
    costs = PieceTimes(PAPER)
    for folds, inside in ((1, 36), (2, 51)):
        program = build("helix", Shape(4, 8, 8, costs=costs), HelixOptions(folds, "none"))
        assert simulate(lower(program, costs), costs).bubble_time < inside


# ------------------------------------------------------------------------------------------------------------ shipping


def test_three_cuts_of_the_same_chain() -> None:
    first = {
        "none": ["embed norm[0] qkv[0]", "attn[0]", "proj[0] mlp[0] norm[1] qkv[1]"],
        "qkv": ["embed norm[0]", "qkv[0] attn[0]", "proj[0] mlp[0] norm[1]"],
        "attention": ["embed", "norm[0] qkv[0] attn[0] proj[0]", "mlp[0]"],
    }
    options = HelixOptions(2, helix_recompute=False, helix_spread_head=False)
    programs = {ship: build("helix", Shape(4, 8, 8), replace(options, helix_ship=ship)) for ship in first}
    for ship, program in programs.items():
        assert [" ".join(map(str, stage.pieces)) for stage in program.stages[:3]] == first[ship]
        assert program.ranks == programs["none"].ranks
        attention = program.stages[1:-1:2]
        assert {stage.placement for stage in program.stages if stage not in attention} == {"resident"}
        if ship == "none":
            assert {(stage.placement, stage.owner) for stage in attention} == {("resident", None)}
        else:
            assert [(s.placement, s.owner) for s in attention] == [("shipped", layer % 4) for layer in range(8)]
    alone = build("helix", Shape(1, 2, 2), HelixOptions(2, "attention"))
    assert {stage.placement for stage in alone.stages} == {"resident"}


@pytest.mark.parametrize(("p", "rounds", "loops"), [(2, 1, 1), (2, 2, 2), (3, 1, 2), (4, 1, 2), (4, 2, 1), (8, 1, 1)])
def test_closed_forms_of_what_is_shipped(p: int, rounds: int, loops: int) -> None:
    """What is shipped leaves the bubble."""
    times = {"norm": 0.5, "qkv": 1.0, "attn": 3.0, "proj": 0.25, "mlp": 2.0}
    combined, again = {"qkv": 2.75, "attention": 2.0}, {"qkv": 2.5, "attention": 2.0}  # proj is not made again
    for ship, recompute in product(combined, (False, True)):
        bubble = (p - 1) * (3 * combined[ship] + recompute * again[ship])
        result = run(p, p * loops, p * rounds, HelixOptions(1, ship, helix_recompute=recompute), times=times)
        assert result.bubble_time == pytest.approx(bubble)
        result = run(p, 2 * p * loops, p * rounds, HelixOptions(2, ship, helix_recompute=recompute), times=times)
        assert result.bubble_time <= 2 * bubble


@pytest.mark.parametrize("ship", ["qkv", "attention"])
def test_weights_keep_nobody_waiting(ship: str) -> None:
    """With messages as long as a QKV the step is as much longer as without shipping, where no weights travel."""
    for p, loops in ((4, 1), (4, 2), (8, 1)):
        longer = []
        for options in (HelixOptions(2, "none"), HelixOptions(2, ship)):
            free, slow = (run(p, 2 * p * loops, 2 * p, options, message).makespan for message in (0, 1))
            longer.append(slow - free)
        assert longer[1] <= longer[0]


def test_messages_a_layer() -> None:
    """Hidden states that cross both boundaries of a layer's attention, and weights and gradients once a step."""
    costs = ModelCosts(MODELS["llama2-7b"], HARDWARE["h20"], Layout(), seq_length=1024)
    hidden = 1024 * 4096 * 2
    for ship, crossing in (("none", 6), ("qkv", 4), ("attention", 2)):
        for m in (8, 16):
            options = HelixOptions(2, ship, helix_recompute=False, helix_spread_head=False)
            program = build("helix", Shape(4, m, 8), options)
            messages = lower(program).messages
            of = [[x for x in messages if x.kind == kind] for kind in ("activation", "weights", "weight_gradients")]
            assert sum(message_bytes(costs, program, message) for message in of[0]) == crossing * hidden * 8 * m * 3 / 4
            assert len(of[1]) == len(of[2]) == (8 * 3 if ship != "none" else 0)
