"""Shipped stages: weights travel once a step to each rank that runs a copy, their gradients come back once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from helixpipe.costs.by_hand import PieceTimes
from helixpipe.costs.hardware import HARDWARE
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import MODELS, Layout
from helixpipe.costs.sizes import GRADIENT_BYTES
from helixpipe.lowering.lower import lower
from helixpipe.lowering.passes.transfers import WEIGHTS_AHEAD
from helixpipe.lowering.project import Action
from helixpipe.planning.memory.early import peak_memory
from helixpipe.program.program import Op, Program, forward_only
from helixpipe.program.stages import Stage, even_stages, model_pieces
from helixpipe.program.transfer import Transfer
from helixpipe.program.workload import uniform
from helixpipe.simulate.memory import rank_memory
from helixpipe.simulate.simulator import simulate
from schedules import Shape, build
from schedules.helix import HelixOptions
from tests.costs.asking import borrowed, message_bytes

COSTS = ModelCosts(MODELS["llama2-7b"], HARDWARE["a100-80"], Layout(), seq_length=4096)


def shared_middle(owner: int = 0) -> Program:
    """Rank 0 runs the ends; the middle stage of two microbatches on rank 0, of two on rank 1."""
    chain = model_pieces(3)
    stages = (Stage(chain[:6]), Stage(chain[6:11], "shipped", owner=owner), Stage(chain[11:]))
    first = "0F0 0F1 0F2 0F3 1F0 1F1 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 1B0 1B1 0B0 0B1 0B2 0B3"
    orders = [first.split(), ["1F2", "1F3", "1B2", "1B3"]]
    ranks = tuple(tuple(Op(cell[1], int(cell[0]), int(cell[2])) for cell in order) for order in orders)
    return Program("shared", stages, ranks, uniform(4))


def shipped(program: Program) -> list[Transfer]:
    return [message for message in lower(program).messages if message.of_stage]


def test_once_there_and_once_back() -> None:
    program = shared_middle()
    first, last = Op("F", 1, 2), Op("B", 1, 3)
    found = [(each.kind, each.producer, each.consumer, each.ranks) for each in shipped(program)]
    assert found == [("weights", first, first, (0, 1)), ("weight_gradients", last, last, (1, 0))]
    assert program.copied_stages(1) == (1,) and program.copied_stages(0) == ()
    assert program.pieces_of_rank(1) == () and program.pieces_of_rank(0) == model_pieces(3)


def test_the_owner_need_not_be_first() -> None:
    program = shared_middle(owner=1)
    assert [(each.kind, each.producer, each.consumer, each.ranks) for each in shipped(program)] == [
        ("weights", Op("F", 1, 0), Op("F", 1, 0), (1, 0)),
        ("weight_gradients", Op("B", 1, 1), Op("B", 1, 1), (0, 1)),
    ]
    assert program.pieces_of_rank(1) == program.stages[1].pieces
    timeline = simulate(lower(program), PieceTimes(message=7.0)).timeline
    assert [event.start for event in timeline.messages if event.kind == "weights"] == [0]  # rank 1 has run nothing yet


def test_split_backward_returns_after_the_last_w() -> None:
    program = shared_middle()
    split = tuple(Op(*cell) for cell in (("F", 1, 2), ("F", 1, 3), ("I", 1, 2), ("I", 1, 3), ("W", 1, 3), ("W", 1, 2)))
    assert shipped(replace(program, ranks=(program.ranks[0], split)))[-1].producer == Op("W", 1, 2)


def test_evaluation_ships_weights_alone() -> None:
    assert [message.kind for message in shipped(forward_only(shared_middle()))] == ["weights"]


def test_streams() -> None:
    """The copy is there before its first F and goes after its last B; gradients leave then and are taken in by the
    owner's end."""
    weights, gradients = shipped(shared_middle())
    owner, copy = lower(shared_middle()).streams
    assert [each.action for each in owner if each.transfer in (weights, gradients)] == [
        Action.SEND,
        Action.RECV,
        Action.WAIT,
    ]
    places = [
        next(i for i, each in enumerate(copy) if each.transfer is not None and each.transfer == m)
        for m in (weights, gradients)
    ]
    runs = {each.op: i for i, each in enumerate(copy) if each.action is Action.RUN}
    assert places[0] < runs[Op("F", 1, 2)] and places[1] > runs[Op("B", 1, 3)]
    assert [each.action for each in copy if each.transfer == weights] == [Action.RECV, Action.WAIT, Action.FREE]
    freed = next(i for i, each in enumerate(copy) if each[:3] == (Action.FREE, None, weights))
    assert freed > runs[Op("B", 1, 3)]


@pytest.mark.parametrize("message", [0.0, 0.5, 20.0])
def test_gradients_end_the_step(message: float) -> None:
    program = shared_middle()
    costs = PieceTimes(message=message)
    result = simulate(lower(program, costs), costs)
    back = next(event for event in result.timeline.messages if event.kind == "weight_gradients")
    ends = {event.op: event.end for event in result.timeline.ops}
    assert back.start >= ends[Op("B", 1, 3)] and back.end - back.start == message
    assert result.makespan == max(back.end, *ends.values())


@pytest.mark.parametrize("ship", ["qkv", "attention"])
def test_prefetched_and_bounded(ship: str) -> None:
    """In helix every copy's weights leave `WEIGHTS_AHEAD` ops before what it works on, or at the start."""
    program = build("helix", Shape(4, 16, 8), HelixOptions(2, ship, helix_recompute=False))
    costs = PieceTimes({"qkv": 1.0, "attn": 3.0, "mlp": 2.0}, message=1.0)
    lowered = lower(program, costs)
    timeline = simulate(lowered, costs).timeline
    ends = {event.op: event.end for event in timeline.ops}
    starts = {event.op: event.start for event in timeline.ops}
    sent = [event for event in timeline.messages if event.kind == "weights"]
    assert len(sent) == 8 * 3
    for event in sent:
        assert event.consumer is not None
        order = program.ranks[event.source]
        passed = order.index(event.consumer._replace(stage=event.consumer.stage - 1))
        before = ends[order[passed - WEIGHTS_AHEAD]] if passed >= WEIGHTS_AHEAD else 0.0
        assert before <= event.start <= before + 8
        assert event.end <= starts[event.consumer]
    returned = Counter(
        (e.source, e.target, e.producer.stage) for e in timeline.messages if e.kind == "weight_gradients"
    )
    assert returned == Counter((event.target, event.source, event.consumer.stage) for event in sent)


def test_memory_and_bytes() -> None:
    """One copy on rank 1 of a middle stage of a layer; with nothing of its own."""
    program = shared_middle()
    layer = COSTS.bytes.parameters(program.stages[1].pieces)
    assert layer == 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    assert borrowed(COSTS, program, 1) == (2 * layer, GRADIENT_BYTES * layer)
    weights, gradients = shipped(program)
    assert message_bytes(COSTS, program, weights) == 2 * layer
    assert message_bytes(COSTS, program, gradients) == 4 * layer
    lowered = lower(program, COSTS)
    copy = rank_memory(lowered, COSTS, 1)
    assert (copy.weights, copy.gradients, copy.optimizer) == (2 * layer, 4 * layer, 0)
    whole = rank_memory(lowered, COSTS, 0)
    total = COSTS.bytes.parameters(model_pieces(3))
    assert (whole.weights, whole.gradients) == (2 * total, 4 * total)
    assert borrowed(PieceTimes(), program, 1) == (0.0, 0.0)


def test_a_copy_is_part_of_the_peak() -> None:
    program = shared_middle()
    layer = COSTS.bytes.parameters(program.stages[1].pieces)
    resident = replace(program, stages=even_stages(3, 3))  # of the same sizes, were rank 1 to keep them
    kept = peak_memory(program, COSTS)[1] - COSTS.static_memory(program.pieces_of_rank(1))
    alone = peak_memory(resident, COSTS)[1] - COSTS.static_memory(resident.pieces_of_rank(1))
    assert kept - alone == 6 * layer
