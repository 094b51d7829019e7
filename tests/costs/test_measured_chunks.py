"""Times of chunks that were not measured, from those of a few that were."""

from __future__ import annotations

import pytest

from helixpipe.costs.measured_chunks import MeasuredChunk, MeasuredChunks
from helixpipe.costs.models import Chunk
from helixpipe.program.program import OP_KINDS
from helixpipe.program.stages import PIECE_KINDS
from helixpipe.program.workload import Extent

ONCE, DOCUMENT, TOKEN, KEY, PAIR = 5.0, 3.0, 0.25, 0.125, 0.001
"""Of attention, in seconds."""


def attention(chunk: Chunk) -> float:
    documents = max(len(chunk.slices), 1)
    return ONCE + DOCUMENT * documents + TOKEN * chunk.tokens + KEY * chunk.seen + PAIR * chunk.pairs


def other(tokens: float) -> float:
    """A product that is slow on few rows: not a line."""
    return 2.0 + 0.5 * tokens if tokens <= 64 else 34.0 + 0.25 * (tokens - 64)


def made(tokens: int, earlier: int = 0, documents: int = 1) -> MeasuredChunk:
    times = MeasuredChunk(tokens, earlier, {}, dict.fromkeys(OP_KINDS, 7.0 + tokens / 64), documents)
    own = {piece: attention(times.chunk) if piece == "attn" else other(tokens) for piece in PIECE_KINDS}
    pieces = {piece: {kind: own[piece] * (1 + OP_KINDS.index(kind)) for kind in OP_KINDS} for piece in PIECE_KINDS}
    return MeasuredChunk(tokens, earlier, pieces, times.overhead, documents)


MEASURED = [made(512), made(16), made(64), made(128, 128), made(128, 256), made(128, 384), made(128, documents=8)]


@pytest.mark.parametrize(
    "chunk",
    [
        Chunk(100),
        Chunk(40, 300),
        Chunk(200, 0, False, (Extent(50, 0), Extent(30, 0), Extent(120, 0))),
        Chunk(90, 400, True, (Extent(50, 400), Extent(40, 0))),
        Chunk(16, 400),
    ],
)
@pytest.mark.parametrize("kind", ["F", "W"])
def test_attention_is_fitted_and_the_rest_interpolated(chunk: Chunk, kind: str) -> None:
    """Fits of what was measured exactly are exact, whatever is before the chunk and in it."""
    times, factor = MeasuredChunks(MEASURED).times(chunk), 1 + OP_KINDS.index(kind)
    assert times.pieces["attn"][kind] == pytest.approx(factor * attention(chunk), rel=1e-6)
    for piece in ("norm", "mlp", "head"):
        assert times.pieces[piece][kind] == pytest.approx(factor * other(chunk.tokens))
    assert times.overhead[kind] == pytest.approx(7.0 + chunk.tokens / 64)


def test_beyond_what_was_measured() -> None:
    """Longer and shorter chunks lie on the nearest line, no shorter one below its share; overhead stays."""
    measured = MeasuredChunks(MEASURED)
    assert measured.times(Chunk(1024)).pieces["mlp"]["F"] == pytest.approx(factor_of("F") * other(1024))
    assert measured.times(Chunk(4)).pieces["mlp"]["F"] == pytest.approx(factor_of("F") * other(4))
    assert measured.times(Chunk(4)).overhead["F"] == pytest.approx(7.25)
    assert measured.times(Chunk(1024)).overhead["F"] == pytest.approx(15.0)
    steep = MeasuredChunks([_with_mlp(100, 9.0), _with_mlp(10, 0.1)])  # a line through these is below 0 at 8
    assert steep.times(Chunk(8)).pieces["mlp"]["F"] == pytest.approx(0.08)


def factor_of(kind: str) -> int:
    return 1 + OP_KINDS.index(kind)


def _with_mlp(tokens: int, seconds: float) -> MeasuredChunk:
    times = made(tokens)
    return MeasuredChunk(tokens, 0, {**times.pieces, "mlp": dict.fromkeys(OP_KINDS, seconds)}, times.overhead)


def test_what_was_measured_is_taken_as_it_is() -> None:
    late = made(128, 384)
    late = MeasuredChunk(128, 384, {**late.pieces, "attn": dict.fromkeys(OP_KINDS, 1e3)}, late.overhead)
    measured = MeasuredChunks([made(512), late, made(64)])
    assert measured.times(Chunk(128, 384, True)).pieces["attn"]["F"] == 1e3
    assert measured.times(Chunk(128, 384, False, (Extent(64, 384), Extent(64, 0)))).pieces["attn"]["F"] < 1e3


def test_weights_are_never_negative() -> None:
    """Noise that says that more documents are faster says nothing."""
    fast = made(128, documents=8)
    fast = MeasuredChunk(128, 0, {**fast.pieces, "attn": dict.fromkeys(OP_KINDS, 1.0)}, fast.overhead, 8)
    measured = MeasuredChunks([made(512), made(64), made(16), fast])
    for documents in (1, 8, 32):
        parts = (Extent(128 / documents, 0.0),) * documents
        assert measured.times(Chunk(128, 0, False, parts if documents > 1 else ())).pieces["attn"]["F"] > 0


@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_a_time_that_is_far_off_changes_little(factor: float) -> None:
    """As something else on the machine makes it."""
    off = made(128, 256)
    spoiled = {**off.pieces, "attn": {kind: factor * time for kind, time in off.pieces["attn"].items()}}
    others = [each for each in MEASURED if each.earlier != 256]
    measured = MeasuredChunks([*others, MeasuredChunk(128, 256, spoiled, off.overhead)])
    for chunk in (Chunk(100), Chunk(300, 100)):
        assert measured.times(chunk).pieces["attn"]["F"] == pytest.approx(attention(chunk), rel=0.1)


def test_one_alone_is_scaled() -> None:
    measured = MeasuredChunks([made(512)])
    times, whole = measured.times(Chunk(128, 384)), made(512)
    assert times.pieces["mlp"]["B"] == pytest.approx(whole.pieces["mlp"]["B"] / 4)
    assert times.pieces["attn"]["B"] == pytest.approx(whole.pieces["attn"]["B"] * 128 * 448 / (512 * 256))
    assert times.overhead == whole.overhead
