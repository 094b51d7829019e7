"""Figures asked at a few numbers of tokens: what they are at each, whatever was asked before."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixpipe.costs.hardware import HARDWARE
from helixpipe.costs.lines import CELL, FIRST, Lines
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import Chunk, Layout, find_model
from helixpipe.costs.piece_kinds import work
from helixpipe.program.costs import Contents
from helixpipe.program.stages import even_stages
from helixpipe.program.workload import Extent

LONG = FIRST * CELL
TOKENS = st.one_of(st.integers(1, LONG), st.integers(LONG, 40 * CELL), st.floats(LONG, 40 * CELL))
NAMES = ("llama3-8b", "gpt-175b", "qwen3-8b", "mixtral-8x7b", "deepseek-v2-lite")


@given(
    lines=st.lists(st.tuples(st.floats(0, 1e9), st.floats(-1e3, 1e6)), min_size=1, max_size=3),
    asked=st.lists(TOKENS, min_size=1, max_size=20),
)
def test_the_most_of_several_lines(lines: Sequence[tuple[float, float]], asked: Sequence[float]) -> None:
    def exact(tokens: float) -> float:
        return max(start + rise * tokens for start, rise in lines)

    figures, backwards = Lines(exact), Lines(exact)
    found = [figures(tokens) for tokens in asked]
    assert found == pytest.approx([exact(tokens) for tokens in asked], rel=1e-9, abs=1e-3)
    assert found == [backwards(tokens) for tokens in reversed(asked)][::-1]


def test_few_questions_for_many_numbers() -> None:
    asked: list[float] = []

    def exact(tokens: float) -> float:
        asked.append(tokens)
        return 3.0 * tokens + 5.0

    figures = Lines(exact)
    assert all(figures(tokens) == 3.0 * tokens + 5.0 for tokens in range(LONG, 4 * LONG))
    assert asked == [LONG, LONG * 3 // 2, 2 * LONG, 3 * LONG, 4 * LONG]  # of a line: the ends and middles of two ranges


def test_a_bend_is_looked_for_in_halves() -> None:
    """Down to a cell, within which alone each number is asked for."""
    bend = LONG + CELL // 4
    asked: list[float] = []

    def exact(tokens: float) -> float:
        asked.append(tokens)
        return max(3.0 * tokens, 5.0 * tokens - 2 * bend)

    figures = Lines(exact)
    assert [figures(tokens) for tokens in range(LONG, 2 * LONG)] == [*map(exact, range(LONG, 2 * LONG))]
    of_halves = {LONG * eighths // 8 for eighths in (10, 11, 12, 14, 16)}
    assert set(asked[:-LONG]) - set(range(LONG, LONG + CELL)) == of_halves


@settings(max_examples=40)
@given(tokens=TOKENS, stored=st.booleans(), name=st.sampled_from(NAMES), tp=st.sampled_from((1, 4, 8)))
def test_times_and_sizes_are_those_of_the_number_itself(tokens: float, stored: bool, name: str, tp: int) -> None:
    model = find_model(name)
    layout = Layout(tensor_parallel=tp, sequence_parallel=tp > 1 and model.experts > 1)  # which experts need
    costs = ModelCosts(model, HARDWARE["h100"], layout, 65536)
    chunk = Chunk(tokens, stored=stored)
    for piece in model.kinds:
        for op in "FBIWR":
            kernels = work(costs.model, costs.layout, piece, op, chunk)
            alone = sum(costs._kernel_time(kernel) for kernel in kernels)
            assert costs.piece_time(piece, op, chunk) == pytest.approx(alone, rel=1e-9)
    for stage in even_stages(model.kinds_of(4), 2):
        for kind in ("saved", "workspace", "activation", "gradient", "deferred", "recomputed"):
            for op in "FBIW" if kind == "workspace" else "B":
                contents = Contents(kind, stage.segments, (Extent(tokens, 0, stored),), tokens, True, op=op)
                assert costs.size(contents) == pytest.approx(costs._size_of(contents, chunk), rel=1e-9, abs=1e-3)
