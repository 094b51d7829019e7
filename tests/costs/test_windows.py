"""Costs count what a window lets see: pairs of a query and a key, bytes, and the times that are measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helixpipe.common.errors import UserError
from helixpipe.costs.layer_patterns import kinds_of_layers, parse_frequency, pattern_values, shape_fields
from helixpipe.costs.measured_chunks import MeasuredChunk, MeasuredChunks
from helixpipe.costs.models import Chunk, Layout
from helixpipe.costs.piece_kinds import flops, work
from helixpipe.program.program import OP_KINDS
from helixpipe.program.stages import LAYER_PIECES, NO_ROPE, WINDOW
from helixpipe.program.workload import Extent, attention_pairs
from tests.costs.windows import MIXED, saved
from tests.distributed import run_ranks

PARTS = st.lists(st.builds(Extent, st.integers(1, 40), st.integers(0, 60)), min_size=1, max_size=4)
WINDOWS = st.integers(1, 120)


def counted(parts: list[Extent], window: int) -> int:
    """Pairs, one by one."""
    return sum(
        1
        for part in parts
        for query in range(int(part.earlier), int(part.earlier + part.tokens))
        for key in range(query + 1)
        if query - key < window
    )


@given(PARTS, WINDOWS)
def test_pairs_are_those_inside_the_window(parts: list[Extent], window: int) -> None:
    """But for half of each diagonal, as without a window: causal attention counts as half a square, and a window that
    is full has no diagonal."""
    diagonal = sum(max(min(part.earlier + part.tokens, window) - part.earlier, 0) for part in parts)
    assert attention_pairs(tuple(parts), window) == pytest.approx(counted(parts, window) - diagonal / 2)


@given(PARTS, WINDOWS)
def test_keys_read_are_those_that_some_query_sees(parts: list[Extent], window: int) -> None:
    chunk = Chunk(sum(part.tokens for part in parts), slices=tuple(parts), window=window)
    seen = [
        {key for query in range(int(part.tokens)) for key in range(query + int(part.earlier) + 1)
         if query + part.earlier - key < window}
        for part in parts
    ]  # fmt: skip
    assert chunk.seen == sum(map(len, seen))


@given(PARTS, st.sampled_from("FI"))
def test_a_window_that_holds_all_costs_what_no_window_costs(parts: list[Extent], op: str) -> None:
    wide = replace(MIXED, window=200)
    chunk = Chunk(sum(part.tokens for part in parts), slices=tuple(parts))
    assert work(wide, Layout(), WINDOW, op, chunk) == work(wide, Layout(), "attn", op, chunk)


@given(PARTS, WINDOWS, st.sampled_from("FI"))
def test_attention_to_a_window_computes_its_pairs_and_moves_no_more(parts: list[Extent], window: int, op: str) -> None:
    model, chunk = replace(MIXED, window=window), Chunk(sum(part.tokens for part in parts), slices=tuple(parts))
    factor = {"F": 4, "I": 10}[op] * model.query_hidden
    assert flops(model, Layout(), WINDOW, op, chunk) == pytest.approx(factor * attention_pairs(tuple(parts), window))
    own, whole = (sum(each.bytes for each in work(model, Layout(), kind, op, chunk)) for kind in (WINDOW, "attn"))
    assert own <= whole


def test_what_is_not_rotated_moves_less_and_is_saved_as_it_is() -> None:
    rotated, plain = (
        sum(each.bytes for each in work(MIXED, Layout(), kind, "F", Chunk(24))) for kind in ("qkv", NO_ROPE)
    )
    assert plain == rotated - 24 * (7 * MIXED.query_hidden + (7 + 2) * MIXED.kv_hidden) * 2


def test_layers_keep_what_is_counted() -> None:
    (rows,) = run_ranks(saved, 1)
    assert [(what, theirs) for what, theirs, _ in rows] == [(what, ours) for what, _, ours in rows]


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 300))
def test_flags_say_which_layers_are_which(skipped: int, unrotated: int, left: int) -> None:
    """As megatron-core counts: layer_number is 1 for the first."""
    layers = skipped * unrotated
    found = shape_fields(f"{left},0", str(skipped), str(unrotated), layers)
    kinds = kinds_of_layers(layers, found["windowed"], found["unrotated"])
    for number, own in enumerate(kinds, start=1):
        assert (WINDOW in own) == (number % skipped != 0) and (NO_ROPE in own) == (number % unrotated == 0)
    assert found["window"] == left + 1
    again = shape_fields(**pattern_values(layers, **found))
    assert kinds_of_layers(layers, again["windowed"], again["unrotated"]) == kinds


@given(st.lists(st.integers(0, 1), min_size=1, max_size=8), st.integers(1, 3))
def test_a_list_has_a_number_for_each_layer(pattern: list[int], times: int) -> None:
    layers = len(pattern) * times
    found = shape_fields("7,0", f"{pattern}*{times}", None, layers)
    kinds = kinds_of_layers(layers, found["windowed"], found["unrotated"])
    assert kinds == tuple(
        tuple(WINDOW if kind == "attn" and one else kind for kind in LAYER_PIECES) for one in pattern * times
    )
    with pytest.raises(UserError, match=rf"--window-attn-skip-freq .* is a list for {layers} layers, but --num-layers"):
        shape_fields("7,0", f"{pattern}*{times}", None, layers + 1)


@pytest.mark.parametrize("text", ["0", "-1", "x", "[]", "[2]", "[1]*9999999", "[[1]]", "[True]", "1.5", "((((", "a()"])
def test_what_is_no_frequency_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--no-rope-freq .* is neither a whole number from 1 to 100000 nor a list"):
        parse_frequency("--no-rope-freq", text)


@pytest.mark.parametrize(
    ("window", "skipped", "unrotated", "sentence"),
    [
        ("5", None, None, "--window-size 5 is not LEFT,0"),
        ("-2,0", None, None, "--window-size -2,0 is not LEFT,0"),
        ("4,4", None, None, "--window-size 4,4 must be LEFT,0: attention is causal"),
        (None, "2", None, "--window-attn-skip-freq 2 says which layers have a window: give --window-size"),
        (None, None, "3", "--no-rope-freq 3 must divide --num-layers 4"),
    ],
)
def test_flags_that_cannot_be_are_refused(
    window: str | None, skipped: str | None, unrotated: str | None, sentence: str
) -> None:
    with pytest.raises(UserError) as caught:
        shape_fields(window, skipped, unrotated, 4)
    assert str(caught.value).startswith(sentence) and str(caught.value).endswith(".")


def test_times_of_attention_to_a_window_follow_its_pairs() -> None:
    """Of chunks that were not measured, from those that were."""
    window, own = 32, {"F": 1.0, "I": 2.0, "W": 0.0, "B": 2.0, "R": 1.0}

    def measured(tokens: int, earlier: int) -> MeasuredChunk:
        within = Chunk(tokens, earlier, window=window)
        pieces = {"attn": Chunk(tokens, earlier).pairs, WINDOW: within.pairs, "mlp": float(tokens)}
        times = {piece: {kind: own[kind] * seconds for kind in OP_KINDS} for piece, seconds in pieces.items()}
        return MeasuredChunk(tokens, earlier, times, dict.fromkeys(OP_KINDS, 0.0))

    known = MeasuredChunks([measured(*place) for place in ((256, 0), (128, 0), (64, 0), (64, 64), (64, 128))], window)
    found = known.times(Chunk(96, 160)).pieces
    assert found[WINDOW]["F"] == pytest.approx(Chunk(96, 160, window=window).pairs, rel=0.02)
    assert found["attn"]["F"] == pytest.approx(Chunk(96, 160).pairs, rel=0.02)
