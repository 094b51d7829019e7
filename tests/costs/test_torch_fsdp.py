"""What torch's FSDP and its companions keep and compute: parts in float32, one kernel for the loss, checkpoints that
stop early, hidden states that need no transposing, collectives that slow down what they run beside."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helixpipe.costs.hardware import HARDWARE
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import AUTOGRAD, FUSED, IN_PLACE, MODELS, Chunk, Layout
from helixpipe.costs.piece_bytes import PieceBytes
from helixpipe.costs.piece_kinds import flops, work
from helixpipe.lowering.lower import lower
from helixpipe.program.stages import Piece
from helixpipe.simulate.memory import rank_memory
from helixpipe.simulate.simulator import simulate
from schedules import Shape, build

SEVEN = MODELS["llama2-7b"]
COSTS = ModelCosts(SEVEN, HARDWARE["a100-80"], Layout(), 4096, data_parallel=8, shards_weights=True)
HEAD, CHUNK = Piece("head", -1), Chunk(4096)


def test_what_losses_keep_and_make_for_a_logit() -> None:
    """One kernel keeps the logits as they are; torch's makes two gradients in float32, megatron-core's none."""
    logits = 4096 * SEVEN.padded_vocab(1)
    plain, torchs, fused = (PieceBytes(SEVEN, Layout(loss=each)) for each in (IN_PLACE, AUTOGRAD, FUSED))
    for own in (plain, torchs):
        assert own.saved([HEAD], CHUNK)["probabilities", -1] == 4 * logits
    assert fused.saved([HEAD], CHUNK)["logits", -1] == 2 * logits
    assert [own.workspace([HEAD], CHUNK) / logits for own in (plain, torchs)] == [2, 8]
    # where the loss makes no more than it frees: the gradients of the linear layer's input and weight
    products = (4096 + SEVEN.padded_vocab(1)) * SEVEN.hidden
    assert fused.workspace([HEAD], CHUNK) == products * 2
    assert fused.workspace([HEAD], CHUNK, "I") == fused.workspace([HEAD], CHUNK, "F") == 2 * logits
    wide = PieceBytes(SEVEN, Layout(element_bytes=4))
    assert wide.workspace([HEAD], CHUNK) == products * 4
    moved = [kernel.bytes for op in "FI" for kernel in work(SEVEN, fused.layout, "head", op, CHUNK)]
    assert moved.count(2 * logits) == 1 and moved.count(4 * logits) == 1  # read; read and written


def test_recomputing_stops_before_the_second_product_of_the_mlp() -> None:
    """Of the layer's 8 h^2 + 3 h f weights these are f h; a forward still has them, and so has another checkpoint."""
    layout = Layout(stops_recomputing=True)
    again, whole = (flops(SEVEN, layout, "mlp", op, CHUNK) for op in "RF")
    assert whole - again == 2 * 4096 * SEVEN.ffn * SEVEN.hidden
    assert flops(SEVEN, Layout(), "mlp", "R", CHUNK) == whole
    assert len(work(SEVEN, layout, "mlp", "R", CHUNK)) == len(work(SEVEN, layout, "mlp", "F", CHUNK)) - 2


@pytest.mark.parametrize(("batch_first", "copies"), [(False, 1), (True, 0)])
def test_what_attention_gives_is_transposed_where_the_sequence_comes_first(batch_first: bool, copies: int) -> None:
    layout = Layout(micro_batch_size=2, batch_first=batch_first)
    saved = PieceBytes(SEVEN, layout).saved([Piece("attn", 0), Piece("proj", 0)], CHUNK)
    assert sum(name == "projected" for name, _ in saved) == copies


def test_parts_in_float32_are_adams_own_copy() -> None:
    """16 bytes a weight, where parts of 16 bits have 18; what is gathered is the same."""
    lowered = lower(build("1f1b", Shape(2, 4, 32, costs=COSTS, sharded=8)), COSTS)
    pieces, wide = lowered.program.pieces_of_rank(0), replace(COSTS, float32_weights=True)
    parts = COSTS.bytes.parameters(pieces) / 8
    assert wide.static_memory(pieces) == pytest.approx(16 * parts)
    assert COSTS.static_memory(pieces) == pytest.approx(18 * parts)
    there, here = (rank_memory(lowered, each, 0) for each in (wide, COSTS))
    assert there.total == pytest.approx(here.total - 2 * parts) and there.weights == here.weights + 2 * parts


def test_gathers_and_scatters_slow_down_the_ops_beside_them() -> None:
    """By a tenth of their own time, also where none waits for them."""
    program = build("1f1b", Shape(1, 4, 32, costs=COSTS, sharded=8))
    alone = replace(COSTS, hardware=replace(COSTS.hardware, interference=0.0))
    busy = {each: simulate(lower(program, each), each).busy[0] for each in (COSTS, alone)}
    shared = simulate(lower(program, alone), alone).timeline.sharing
    assert busy[COSTS] - busy[alone] == pytest.approx(0.1 * sum(event.end - event.start for event in shared))
