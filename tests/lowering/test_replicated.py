"""Replicated stages: every rank that runs units of one has a copy, and gradients are summed once a step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helixpipe.costs.hardware import HARDWARE
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import MODELS, Layout
from helixpipe.costs.sizes import GRADIENT_BYTES
from helixpipe.lowering.lower import lower
from helixpipe.planning.memory.early import peak_memory
from helixpipe.program.program import Op, Program, forward_only
from helixpipe.program.stages import Piece, Stage, even_stages, model_pieces
from helixpipe.program.transfer import Transfer
from helixpipe.program.workload import uniform
from helixpipe.simulate.memory import rank_memory

COSTS = ModelCosts(MODELS["llama2-7b"], HARDWARE["a100-80"], Layout(), seq_length=4096)


def shared_ends() -> Program:
    """Rank 0 runs the first stage and the head of two microbatches, rank 1 the middle and the head of the other two."""
    chain = model_pieces(3)
    stages = (Stage(chain[:6]), Stage(chain[6:-1]), Stage(chain[-1:], "replicated"))
    orders = (
        "0F0 0F1 0F2 0F3 2F0 2B0 2F1 2B1 0B0 0B1 0B2 0B3",
        "1F0 1F1 1F2 1F3 2F2 2B2 2F3 2B3 1B0 1B1 1B2 1B3",
    )
    ranks = tuple(tuple(Op(cell[1], int(cell[0]), int(cell[2])) for cell in order.split()) for order in orders)
    return Program("shared", stages, ranks, uniform(4))


def crossing(program: Program) -> list[Transfer]:
    return lower(program).messages


def test_who_holds_what() -> None:
    program, head = shared_ends(), Piece("head")
    assert [head in program.pieces_of_rank(rank) for rank in (0, 1)] == [True, True]
    assert [program.copies(rank) for rank in (0, 1)] == [{head: 0}, {head: 1}]
    assert [program.copied_stages(rank) for rank in (0, 1)] == [(), ()]
    assert forward_only(program).copies(1) == {head: 1}


def test_a_stage_that_one_rank_runs_has_no_copies() -> None:
    program = shared_ends()
    alone = replace(program, stages=(replace(program.stages[0], placement="replicated"), *program.stages[1:]))
    assert set(alone.copies(0)) == {Piece("head")}
    resident = Program("alone", even_stages(1, 1), ((Op("F", 0, 0), Op("B", 0, 0)),), uniform(1))
    assert resident.copies(0) == {}


def test_weights_do_not_travel() -> None:
    """What crosses is hidden states and their gradients: four there and back in the middle, of the head two."""
    messages = crossing(shared_ends())
    assert not any(message.of_stage for message in messages)
    assert sorted(message.kind for message in messages) == ["activation"] * 6 + ["gradient"] * 6


@pytest.mark.parametrize("data_parallel", [1, 4])
def test_every_copy_has_weights_gradients_and_optimizer_state(data_parallel: int) -> None:
    program, costs = shared_ends(), replace(COSTS, data_parallel=data_parallel)
    head = costs.bytes.parameters([Piece("head")])
    for rank in (0, 1):
        own = costs.bytes.parameters(program.stages[rank].pieces) + head
        memory = rank_memory(lower(program, costs), costs, rank)
        assert (memory.weights, memory.gradients) == (2 * own, GRADIENT_BYTES * own)
        assert memory.optimizer == 12 * own / data_parallel
        assert peak_memory(program, costs)[rank] >= memory.weights + memory.gradients + memory.optimizer


def test_the_sum_of_gradients_takes_time() -> None:
    """A ring over two ranks moves each gradient once out and once in."""
    program = shared_ends()
    resident = replace(program, stages=(*program.stages[:-1], replace(program.stages[-1], placement="resident")))
    head = COSTS.bytes.parameters([Piece("head")])
    added = COSTS.after_time(program)[0] - COSTS.after_time(resident)[0]
    assert added == pytest.approx(head * GRADIENT_BYTES / COSTS.hardware.peer_bandwidth(1, same_node=True))
