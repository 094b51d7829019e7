"""Ring stages: weights pass from rank to rank in the order of their uses, gradients add up on the way to the owner."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixpipe.costs.by_hand import PieceTimes
from helixpipe.costs.hardware import HARDWARE
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import MODELS, Layout
from helixpipe.costs.sizes import GRADIENT_BYTES
from helixpipe.lowering.build import build_graph
from helixpipe.lowering.lower import lower
from helixpipe.lowering.project import Action
from helixpipe.planning.memory.early import peak_memory
from helixpipe.program.program import Op, Program, forward_only
from helixpipe.program.stages import RingOptions, ring_stages
from helixpipe.program.text import parse_rows
from helixpipe.program.transfer import Transfer
from helixpipe.program.workload import uniform
from helixpipe.simulate.memory import rank_memory
from helixpipe.simulate.simulator import simulate
from tests.costs.asking import borrowed, message_bytes
from tests.lowering.random_programs import random_costs, random_program
from tests.lowering.rendezvous import Machine

COSTS = ModelCosts(MODELS["llama2-7b"], HARDWARE["a100-80"], Layout(), seq_length=4096)
CYCLE = "0F{0} 1F{0} 2F{0} 3F{0} 4F{0} 4B{0} 3B{0} 2B{0} 1B{0} 0B{0}"
SPLIT = "0F{0} 1F{0} 2F{0} 3F{0} 4F{0} 4B{0} 3I{0} 2I{0} 1I{0} 0B{0} 1W{0} 2W{0} 3W{0}"


def ring(microbatches: int = 3, ring: RingOptions | None = None, cycle: str = CYCLE) -> Program:
    """Three ranks; the ring stages 1, 2, 3 belong to ranks 0, 2, 1; microbatch i runs on rank i mod 3."""
    rows = [" ".join(cycle.format(i) for i in range(rank, microbatches, 3)).split() for rank in range(3)]
    return Program("ring", ring_stages(3, 3), parse_rows(rows), uniform(microbatches), ring=ring or RingOptions(1))


def travels(program: Program, kind: str, stage: int) -> list[tuple[str, int, int, str]]:
    """(op, source, target, op of the message it follows or a dash) of each message of a stage."""
    messages = lower(program).messages
    return [
        (str(m.producer), m.source, m.target, str(messages[m.follows].producer) if m.follows >= 0 else "-")
        for m in messages
        if m.kind == kind and m.producer.stage == stage
    ]


def test_stages_and_owners() -> None:
    stages = ring_stages(7, 3)
    assert [stage.placement for stage in stages] == ["replicated", "ring", "ring", "ring", "replicated"]
    assert [stage.owner for stage in stages] == [None, 0, 2, 1, None]
    assert [len(stage.pieces) for stage in stages] == [1, 10, 10, 15, 1]
    program = ring()
    assert [sorted({piece.layer for piece in program.pieces_of_rank(r)}) for r in range(3)] == [
        [-1, 0],
        [-1, 2],
        [-1, 1],
    ]


def test_weights_pass_on_and_start_anew_at_the_owner() -> None:
    """With room for one copy, a forward and the backward right after it share it; nothing else does."""
    assert travels(ring(), "weights", 1) == [  # rank 0 owns it
        ("1F1", 0, 1, "-"),
        ("1F2", 1, 2, "1F1"),
        ("1B1", 0, 1, "-"),
        ("1B2", 1, 2, "1B1"),
    ]
    assert travels(ring(), "weights", 2) == [  # rank 2 owns it
        ("2F0", 2, 0, "-"),
        ("2F1", 0, 1, "2F0"),
        ("2B0", 2, 0, "-"),
    ]  # rank 1, whose own stage 3 comes in between, still has it for 2B1
    assert travels(ring(), "weights", 3) == [("3F0", 1, 0, "-"), ("3F2", 1, 2, "-")]
    assert travels(ring(6), "weights", 3) == [*travels(ring(), "weights", 3), ("3F3", 1, 0, "-"), ("3F5", 1, 2, "-")]


def test_gradients_add_up_on_the_way_to_the_owner() -> None:
    assert sorted(travels(ring(), "weight_gradients", 1)) == [("1B1", 1, 2, "-"), ("1B2", 2, 0, "1B1")]
    assert sorted(travels(ring(), "weight_gradients", 2)) == [("2B0", 0, 1, "-"), ("2B1", 1, 2, "2B0")]
    assert sorted(travels(ring(), "weight_gradients", 3)) == [("3B0", 0, 1, "-"), ("3B2", 2, 1, "-")]
    split = ring(cycle=SPLIT)
    assert sorted(travels(split, "weight_gradients", 1)) == [("1W1", 1, 2, "-"), ("1W2", 2, 0, "1W1")]
    assert len(travels(split, "weights", 1)) == 4  # W needs none


def test_with_room_for_all_weights_travel_once_a_step() -> None:
    program = ring(9, RingOptions(2))
    for stage in (1, 2, 3):
        assert len(travels(program, "weights", stage)) == len(travels(program, "weight_gradients", stage)) == 2
    assert travels(program, "weights", 1) == [("1F1", 0, 1, "-"), ("1F2", 1, 2, "1F1")]


def test_evaluation_moves_weights_alone() -> None:
    assert {m.kind for m in lower(forward_only(ring())).messages} == {"weights"}


def test_owners_alone_have_no_messages() -> None:
    rows = parse_rows([CYCLE.format(0).split()])
    program = Program("one", ring_stages(3, 1), (tuple(op for op in rows[0] if op.stage < 3),), uniform(1))
    assert lower(program).messages == []


def test_chunks_and_recomputation_of_a_unit_share_a_copy() -> None:
    cells = "0F{0} 0F{0}.1 1F{0} 1F{0}.1 2F{0} 2F{0}.1 3F{0} 3F{0}.1 3B{0}.1 3B{0} "
    cells += "2B{0}.1 2B{0} 1R{0}.1 1B{0}.1 1R{0} 1B{0} 0B{0}.1 0B{0}"
    stages = ring_stages(2, 2)
    stages = (stages[0], replace(stages[1], recompute=(stages[1].pieces,)), *stages[2:])
    rows = parse_rows([cells.format(rank).split() for rank in range(2)])
    program = Program("chunks", stages, rows, uniform(2, 2), ring=RingOptions(1))
    assert travels(program, "weights", 1) == [("1F1", 0, 1, "-")]  # still there for the backward
    assert travels(program, "weights", 2) == [("2F0", 1, 0, "-")]
    graph = lower(program).graph
    assert {op for op, message in graph.weights_of.items() if message.target == 1} == {
        op for op in program.ranks[1] if op.stage == 1
    }
    assert travels(program, "weight_gradients", 1) == [("1B1", 1, 0, "-")]


# ------------------------------------------------------------------------------------------------------------- timing


def test_weights_that_are_passed_on_wait_for_no_op() -> None:
    """Forward 1, messages 1: weights of stage 1 reach rank 2 after two messages."""
    costs = PieceTimes({"mlp": 1.0}, message=1.0)
    timeline = simulate(lower(ring(), costs), costs).timeline
    assert [event.start for event in timeline.ops if str(event.op) in ("1F0", "1F1", "1F2")] == [0, 1, 2]


def test_a_copy_waits_for_its_place_and_a_sum_for_its_own() -> None:
    costs = PieceTimes({"mlp": 1.0}, message=0.25)
    for slots in (1, 2):
        lowered = lower(ring(9, RingOptions(slots)), costs)
        timeline = simulate(lowered, costs).timeline
        ends = {event.op: event.end for event in timeline.ops}
        events = zip(lowered.messages, timeline.messages, strict=True)
        spans = {message.number: (event.start, event.end) for message, event in events}
        for message in lowered.messages:
            if message.follows >= 0:
                assert spans[message.number][0] >= spans[message.follows][1]
            if message.kind == "weight_gradients":
                assert message.producer is not None and spans[message.number][0] >= ends[message.producer]
        for rank in range(3):
            assert _most(lowered.graph.weights_of, lowered.messages, rank, ends, spans) <= slots


def _most(
    weights_of: dict[Op, Transfer],
    messages: list[Transfer],
    rank: int,
    ends: dict[Op, float],
    spans: dict[int, tuple[float, float]],
) -> int:
    """Copies that a rank holds at once, each from the start of its message to its last use and its passing on."""
    last: dict[int, float] = {}
    for op, message in weights_of.items():
        if message.target == rank:
            last[message.number] = max(last.get(message.number, 0.0), ends[op])
    for message in messages:
        if message.kind == "weights" and message.follows in last:
            last[message.follows] = max(last[message.follows], spans[message.number][1])
    moments = [(spans[number][0], 1) for number in last] + [(end, -1) for end in last.values()]
    now = most = 0
    for _, change in sorted(moments):
        now += change
        most = max(most, now)
    return most


# ------------------------------------------------------------------------------------------------------------ streams


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_streams(slots: int) -> None:
    """What the contract in lowering's text promises, of every message."""
    for cycle in (CYCLE, SPLIT):
        lowered = lower(ring(7, RingOptions(slots), cycle))
        for rank, stream in enumerate(lowered.streams):
            places = {(each.action, each.op or each.transfer): at for at, each in enumerate(stream)}
            assert len(places) == len(stream)
            for message in lowered.messages:
                if message.kind == "weights" and message.target == rank:
                    wait = places[Action.WAIT, message]
                    assert places[Action.RECV, message] < wait < places[Action.RUN, message.consumer]
                    assert stream[wait + 1].action in (Action.WAIT, Action.RUN)
                    users = [op for op, of in lowered.graph.weights_of.items() if of == message]
                    assert places[Action.FREE, message] > max(places[Action.RUN, op] for op in users)
                if message.source == rank and message.follows >= 0:
                    send, before = places[Action.SEND, message], lowered.messages[message.follows]
                    assert places[Action.RECV, before] < send
                    if message.kind == "weights":
                        assert send < places[Action.FREE, before]
                    else:
                        assert stream[send - 1][:3] == (Action.WAIT, None, before)
        for seed in range(3):
            assert Machine(lowered, Random(seed), blocking=seed == 1).run()


@settings(max_examples=300)
@given(seed=st.integers(0, 2**32))
def test_any_program_with_ring_stages_ends(seed: int) -> None:
    """Whatever orders ranks run what in, and with room for a single copy: the theorem of `lowering.borrowed`."""
    rng = Random(seed)
    program = random_program(rng, ("ring",), turned=True)
    assert set(build_graph(program).weights_of) == set(_foreign(program))
    for slots in (1, 2):
        lowered = lower(replace(program, ring=replace(program.ring, slots=slots)), random_costs(rng))
        assert Machine(lowered, rng, blocking=rng.random() < 0.5).run()


def _foreign(program: Program) -> list[Op]:
    """Ops that need weights that are another rank's."""
    return [
        op
        for rank, ops in enumerate(program.ranks)
        for op in ops
        if op.kind != "W" and program.stages[op.stage].owner not in (None, rank)
    ]


def test_a_circle_of_ops_is_told_as_before() -> None:
    program = ring()
    crossed = replace(program, ranks=(program.ranks[0][::-1], *program.ranks[1:]))
    assert not [message for message in build_graph(crossed).messages if message.of_stage]


# ------------------------------------------------------------------------------------------------------------- memory


def test_bytes_and_memory() -> None:
    """A layer a stage; each rank its own, embedding and head, and room for one more; Adam's state of its own alone."""
    program = ring()
    layer = COSTS.bytes.parameters(program.stages[1].pieces)
    ends = COSTS.bytes.parameters((program.stages[0].pieces[0], program.stages[4].pieces[0]))
    assert borrowed(COSTS, program, 1) == (2 * layer, GRADIENT_BYTES * layer)
    half = replace(program, ring=RingOptions(1, gradient_bytes=2))
    sizes = {message.kind: message_bytes(COSTS, half, message) for message in lower(half).messages}
    assert sizes == {"weights": 2 * layer, "weight_gradients": 2 * layer}
    lowered = lower(program, COSTS)
    for rank in range(3):
        memory = rank_memory(lowered, COSTS, rank)
        assert memory.optimizer == 12 * (layer + ends)
        assert 2 * (layer + ends) <= memory.weights <= 2 * (2 * layer + ends)
        assert 4 * (layer + ends) <= memory.gradients <= 4 * (2 * layer + ends)
        hidden = 2 * COSTS.seq_length * 4096  # sums that have come, go, and are on their way; the rank's own activation
        assert memory.weights + memory.messages <= 2 * (2 * layer + ends) + 3 * 4 * layer + hidden
        more = peak_memory(replace(program, ring=RingOptions(2)), COSTS)[rank] - peak_memory(program, COSTS)[rank]
        assert 2 * layer <= more <= (2 + 4 + 4) * layer  # a copy more; maybe a sum, and one on its way
