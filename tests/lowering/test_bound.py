"""Costs bound to a program: work, payloads and contents of its ops, messages and buffers."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice, product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixpipe.costs.by_hand import PieceTimes
from helixpipe.costs.hardware import HARDWARE
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import MODELS, Layout
from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.build import graph_of
from helixpipe.lowering.lower import lower
from helixpipe.program.costs import Work
from helixpipe.program.program import Op, Program, Unit
from helixpipe.program.stages import Activations, Piece, even_stages
from helixpipe.program.tasks import Buffer
from helixpipe.program.workload import Extent, Slice, Workload, uniform
from helixpipe.simulate.simulator import simulate
from schedules import Shape, build
from schedules.helix import HelixOptions
from tests.lowering.random_programs import random_program

MODEL = ModelCosts(MODELS["llama2-7b"], HARDWARE["h100"], Layout(), 4096, fp32_kv_gradients=True)


def test_what_one_unit_recomputes() -> None:
    """One unit alone recomputes its MLP, inside its backward or in an R before it."""
    program = build("1f1b", Shape(2, 2, 2))
    program = replace(program, activations={Unit(0, 1, 0): Activations(((Piece("mlp", 0),),))})
    bound = BoundCosts(program, PieceTimes({"mlp": 5.0, "attn": 1.0}))
    assert [bound.op_time(Op("B", 0, microbatch)) for microbatch in (0, 1)] == [12, 12 + 5]
    assert [bound.recompute_time(Op("B", 0, microbatch)) for microbatch in (0, 1)] == [0, 5]
    recomputed = Buffer("recomputed", 0, 0, 1, 0)
    assert bound.size(recomputed) == 9 / 16 and bound.size(recomputed._replace(microbatch=0)) == 0
    assert bound.size(Buffer("saved", 0, 0, 1, 0)) == bound.size(Buffer("saved", 0, 0, 0, 0)) - 9 / 16
    rows = ((*program.ranks[0][:-1], Op("R", 0, 1), program.ranks[0][-1]), program.ranks[1])
    explicit = BoundCosts(replace(program, ranks=rows), bound.costs)
    assert explicit.op_time(Op("B", 0, 1)) == 12 and explicit.op_time(Op("R", 0, 1)) == 5
    contents = explicit.contents(recomputed)
    assert contents is not None and not contents.in_backward


@pytest.mark.parametrize("first", [0, 1])
def test_units_of_one_stage_that_recompute_otherwise(first: int) -> None:
    """What a unit recomputes says where runs of halves begin: whichever is asked for first, its time is its own."""
    halves = replace(MODEL, layout=Layout(tensor_parallel=2, sequence_parallel=True, overlap_tp_comm="halves"))
    program = build("1f1b", Shape(2, 2, 2))
    runs = (tuple(piece for piece in program.stages[0].pieces if piece.role == "mlp"),)
    program = replace(program, activations={Unit(0, 1, 0): Activations(runs)})
    ops = [Op("I", 0, microbatch) for microbatch in (first, 1 - first)]
    bound = BoundCosts(program, halves)
    own = [bound.op_time(op) - bound.recomputes_inside(op) * bound.recompute_time(op) for op in ops]
    assert own == pytest.approx([halves.op_time(bound.work(op)) for op in ops], rel=1e-12) and own[0] != own[1]
    compiled = simulate(lower(program, halves), halves).timeline.ops
    assert [event.end - event.start for event in compiled] == pytest.approx(
        [bound.op_time(event.op) for event in compiled], rel=1e-9
    )


def test_where_an_op_receives_and_sends() -> None:
    stages = even_stages(3, 3)
    program = Program("three", stages, ((Op("F", 0, 0), Op("F", 1, 0)), (Op("F", 2, 0),)), uniform(1))
    bound = BoundCosts(program, PieceTimes())
    ends = {kind: [bound.work(Op(kind, stage, 0))[4:6] for stage in range(3)] for kind in "FBIW"}
    after = stages[2].pieces[0]
    assert ends["F"] == [(None, None), (None, after), (after, None)]
    assert ends["B"] == ends["I"] == [(None, None), (after, None), (None, after)]
    assert ends["W"] == [(None, None)] * 3


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32))
def test_ops_receive_and_send_what_messages_carry(seed: int) -> None:
    """Wherever the units of a stage run: some beside those of the stage before, others elsewhere."""
    program = random_program(Random(seed))
    messages = [each for each in graph_of(program).messages if each.kind in ("activation", "gradient")]
    bound = BoundCosts(program, PieceTimes())
    works = {op: bound.work(op) for ops in program.ranks for op in ops}
    assert {op for op, work in works.items() if work.receives} == {each.consumer for each in messages}
    assert {op for op, work in works.items() if work.sends} == {each.producer for each in messages}


class Exchanging(PieceTimes):
    """Times by hand, and those of what ranks exchange."""

    def op_time(self, work: Work) -> float:
        return super().op_time(work) + 64 * (work.receives is not None) + 4096 * (work.sends is not None)


@pytest.mark.parametrize("folds", [1, 2])
def test_all_messages_take_time_of_their_ranks(folds: int) -> None:
    """Of helix, whose ranks have both sides of most cuts, though not of one unit's."""
    program = build("helix", Shape(2, 8, 4), HelixOptions(folds))
    messages = sum(each.kind in ("activation", "gradient") for each in graph_of(program).messages)
    busy = [sum(simulate(lower(program), costs).busy) for costs in (Exchanging(), PieceTimes())]
    assert messages > 8 * 4 * 2 and busy[0] - busy[1] == messages * (64 + 4096)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_times_do_not_depend_on_what_was_asked_before(seed: int) -> None:
    program, costs = random_program(Random(seed)), Exchanging()
    bound = BoundCosts(program, costs)
    for ops in program.ranks:
        assert [bound.op_time(op) for op in ops] == [BoundCosts(program, costs).op_time(op) for op in ops]
        forwards, backwards = ([op for op in ops if op.kind in kinds] for kinds in ("F", "BI"))
        for forward, backward in islice(product(forwards, backwards), 20):
            assert bound.pair_time(forward, backward) == BoundCosts(program, costs).pair_time(forward, backward)


@pytest.mark.parametrize(("cuts", "whole", "before_last"), [((3072, 1024), 4096, 3072), ((4096,), 0, 0)])
def test_keys_and_values_of_a_document(cuts: tuple[int, ...], whole: int, before_last: int) -> None:
    stages = even_stages(2, 1)
    bound = BoundCosts(Program("one", stages, ((),), uniform(2, len(cuts), cuts)), MODEL)
    token = 2 * 2 * 4096  # keys and values of two layers
    assert bound.size(Buffer("keys_values", 0, 0, 1)) == token * whole * 2
    assert bound.size(Buffer("kv_gradients", 0, 0, 1)) == token * before_last * 4


CHAIN = (((Slice(0, 0, 512),), (Slice(0, 512, 256), Slice(1, 0, 128))), ((Slice(2, 0, 640),),))
"""A document in two chunks with a short one behind its tail, and a document in one chunk."""


def test_sizes_of_microbatches_that_are_not_alike_are_in_tokens() -> None:
    """Whatever sequence length the costs are of, and whatever the mean of the microbatches is."""
    bound = BoundCosts(Program("chain", even_stages(1, 1), ((),), Workload(CHAIN)), MODEL)
    token = 2 * 4096 * 2  # keys and values of a layer, in two bytes
    assert bound.size(Buffer("keys_values", 0, 0, 0)) == token * (512 + 256 + 128)  # the short one's, too
    assert bound.size(Buffer("kv_gradients", 0, 0, 0)) == token * 512 * 2
    assert bound.size(Buffer("keys_values", 0, 0, 1)) == 0  # one chunk keeps its own
    alone = BoundCosts(Program("alone", even_stages(1, 1), ((),), uniform(1, 1, (640,))), MODEL)
    assert bound.op_time(Op("F", 0, 1)) == alone.op_time(Op("F", 0, 0))
    own = [bound.size(Buffer("saved", 0, 0, *place)) for place in ((0, 0), (0, 1), (1, 0))]
    assert own[0] / 512 == own[1] / 384 < own[2] / 640  # which has its keys and values in its own activations


def test_attention_does_not_look_at_other_documents() -> None:
    """Of two documents side by side half the attention of one as long as both; all else is the same."""
    chunks = (((Slice(0, 0, 2048), Slice(1, 0, 2048)),), ((Slice(2, 0, 4096),),))
    bound = BoundCosts(Program("packed", even_stages(1, 1), ((),), Workload(chunks)), PieceTimes({"attn": 4.0}))
    assert [bound.op_time(Op("F", 0, microbatch)) for microbatch in (0, 1)] == [2, 4]
    attention = (Piece("attn", 0),)
    halves, whole = ((Extent(2048, 0),) * 2, (Extent(4096, 0),))
    times = [MODEL.op_time(Work("F", attention, extents, 4096)) for extents in (halves, whole)]
    assert times[1] == pytest.approx(2 * times[0])
    mlp = [MODEL.op_time(Work("F", (Piece("mlp", 0),), extents, 4096)) for extents in (halves, whole)]
    assert mlp[0] == mlp[1] > 0
