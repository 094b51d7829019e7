"""What a pair needs: a forward fills what a backward frees, which is less than both whole and no less than either."""

from __future__ import annotations

import pytest

from helixpipe.costs.models import MODELS, PAIRS, Chunk, Layout
from helixpipe.costs.piece_bytes import PieceBytes
from helixpipe.costs.workspace import between_pauses, pair_most
from helixpipe.program.stages import Segment, model_pieces


@pytest.mark.parametrize(
    ("forward", "backward", "leads", "most"),
    [
        ((3, 5, 9), (10, 6, 2), False, 10),  # 10, 6 + 3, 2 + 5, and 9 alone
        ((3, 5, 9), (10, 6, 2), True, 13),  # 10 + 3, 6 + 5, 2 + 9
        ((9, 5, 3), (4, 2), False, 11),  # 4, 2 + 9, and 5 and 3 alone
        ((1, 2, 30), (4,), False, 30),  # what is left of the forward runs when the backward has ended
        ((1, 1), (4, 3, 8), False, 9),  # all of the forward is there until the backward ends
    ],
)
def test_both_take_a_step_in_turn(
    forward: tuple[float, ...], backward: tuple[float, ...], leads: bool, most: float
) -> None:
    assert pair_most(forward, backward, leads) == most


def test_a_piece_that_pauses_is_there_before_and_after() -> None:
    assert between_pauses([4, 7, 2, 5], [0, 2, 0, 1]) == [7, 7, 7, 5]
    assert between_pauses([4, 7, 2, 5], [0, 2, 0, 1], starts=[9, 3, 9, 3]) == [4, 7, 7, 5]
    assert between_pauses([4, 7, 2, 5], [0, 2, 0, 1], ends=[9, 3, 9, 3]) == [7, 7, 5, 3]


@pytest.mark.parametrize("op", ["B", "I"])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("recomputed", [False, True])
def test_a_pair_needs_less_than_both_whole(op: str, tp: int, layers: int, recomputed: bool) -> None:
    layout = Layout(tensor_parallel=tp, sequence_parallel=True, overlap_tp_comm=PAIRS)
    own, chunk, shorter = PieceBytes(MODELS["llama3-8b"], layout), Chunk(8192), Chunk(2048)
    pieces = tuple(piece for piece in model_pieces(layers) if piece.layer >= 0)
    segments = (Segment(pieces, recomputed),)
    kept, saved = (own.segments_stash(segments, chunk, kind) for kind in "BF")
    backward = kept + own.segments_workspace(segments, chunk, op)
    for other in (chunk, shorter):
        beside = own.segments_stash(segments, other, "F")
        forward = beside + own.segments_workspace(segments, other, "F")
        both = kept + own.pair_workspace(segments, chunk, op, True, segments, other)
        assert max(forward, backward, saved) <= both <= forward + backward
        assert both < forward + backward or layers == 1 or op == "I" or recomputed  # their most may be at the end
