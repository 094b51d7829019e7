"""Costs of a head that predicts further tokens: its weights, products and keys beside those of a plain one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helixpipe.costs.models import MODELS, Chunk, Layout
from helixpipe.costs.piece_bytes import PieceBytes
from helixpipe.costs.piece_kinds import flops, num_parameters
from helixpipe.program.stages import HEAD_MTP, Piece, layer_pieces
from tests.costs import further
from tests.distributed import run_ranks

PLAIN = replace(MODELS["llama3-8b"], seq_length=8192)
FURTHER = replace(PLAIN, further=2)
HEAD, LAYER = Piece(HEAD_MTP), layer_pieces(PLAIN.kinds_of(1))
JOINING = 2 * PLAIN.hidden * PLAIN.hidden


def test_weights() -> None:
    layer = PieceBytes(PLAIN, Layout()).parameters(LAYER)
    assert num_parameters(FURTHER) == num_parameters(PLAIN) + 2 * (layer + JOINING + 3 * PLAIN.hidden)
    apart, together = (PieceBytes(FURTHER, Layout()).parameters(own) for own in ([HEAD], [Piece("embed"), HEAD]))
    assert apart == together  # away from the embedding it has a copy
    tied = PieceBytes(replace(FURTHER, tied=True), Layout())
    assert tied.parameters([HEAD]) == tied.parameters([Piece("embed"), HEAD])


@pytest.mark.parametrize("op", ["F", "I", "W"])
@pytest.mark.parametrize("tp", [1, 4])
def test_products(op: str, tp: int) -> None:
    chunk, layout = Chunk(1024.0, 2048.0), Layout(tensor_parallel=tp, sequence_parallel=tp > 1)
    layer = sum(flops(PLAIN, layout, piece.kind, op, chunk) for piece in LAYER)
    head = flops(PLAIN, layout, "head", op, chunk)
    joining = 2 * 1024 * JOINING / tp
    for kind in ("head", HEAD_MTP):
        assert flops(FURTHER, layout, kind, op, chunk) == pytest.approx(3 * head + 2 * (layer + joining))


def test_memory() -> None:
    own, plain = PieceBytes(FURTHER, Layout()), PieceBytes(PLAIN, Layout())
    assert own.keys_values([HEAD], 8192) == 2 * plain.keys_values(LAYER, 8192) > 0
    chunk = Chunk(1024.0)
    least = 3 * plain.stash([Piece("head")], chunk) + 2 * plain.stash(LAYER, chunk)
    assert least < own.stash([HEAD], chunk) < 1.1 * least
    assert own.deferred_stash([HEAD], chunk) > 3 * plain.deferred_stash([Piece("head")], chunk)


def test_bytes_are_those_that_torch_keeps() -> None:
    (found,) = run_ranks(further.bytes_of_head, 1)
    for what, (theirs, ours) in found.items():
        assert ours == theirs, what
