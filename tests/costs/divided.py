"""What torch counts of a head that is divided, beside what helixpipe counts; runs inside ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.accounting import SavedBytes
from helixpipe.costs.models import Chunk, Layout, ModelShape
from helixpipe.costs.piece_bytes import PieceBytes
from helixpipe.program.stages import Piece, split_head
from tests.costs.layouts import BATCH, TOKENS, layouts
from tests.costs.leaving import Row
from tests.costs.pieces import CONTEXT, batch, flops_of_piece, has_turn, make

CASES = ("gpt-tp1", "llama-tp2", "llama-tp2-sp", "gpt-tp2-sp-slices", "llama-tp1-slices", "gpt-centered-tp2")
CASES_OVER_CONTEXT = ("llama-cp2-p2p", "gpt-cp2-p2p", "gpt-gqa-cp2-a2a")
EVEN, UNEVEN = 4, 3


def compare(rank: int, world_size: int, cases: Sequence[str]) -> dict[str, list[Row]]:
    """For each model and layout, (what, torch's count, ours) of the final norm and of a part."""
    results: dict[str, list[Row]] = {}
    for turn, (case, shape, layout) in enumerate(layouts(cases)):
        turns = has_turn(turn, layout)
        results[case] = [row for piece in split_head(EVEN)[:2] for row in _piece(shape, layout, piece)] * turns
        results[case] += [_parameters(shape, layout, piece) for piece in split_head(UNEVEN)] * turns
    return results


def _piece(shape: ModelShape, layout: Layout, piece: Piece) -> list[Row]:
    model, own, data, chunk = make(shape, layout, (piece,)), PieceBytes(shape, layout), batch(), Chunk(TOKENS)
    (size,) = model.payload_shapes(split_head(EVEN)[0], BATCH, TOKENS)

    def hidden() -> torch.Tensor:
        return torch.randn(size, requires_grad=True)

    found = flops_of_piece(model, shape, layout, piece, (hidden(),))
    given = hidden()
    with SavedBytes([*model.parameters(), data.tokens, data.labels, data.loss_mask]) as account:
        (output,) = model.run((piece,), (given,), data, CONTEXT)
        found.append((f"saved {piece}", account.now, sum(own.saved((piece,), chunk).values())))
    found.append((f"message {piece}", given.nbytes, own.message(piece, chunk)))
    if piece.part is not None:
        found.append((f"sums of all parts, {piece}", output.nbytes * EVEN, own.sums((piece,), chunk)))
    return found


def _parameters(shape: ModelShape, layout: Layout, piece: Piece) -> Row:
    count = sum(parameter.numel() for parameter in make(shape, layout, (piece,)).parameters())
    return f"parameters {piece}", count, PieceBytes(shape, layout).parameters((piece,))
