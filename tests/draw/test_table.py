"""Lists of figures and tables whose cells stand to the right."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from helixpipe.draw.table import figure_lines, right_aligned

TEXT = st.text("abc 1.5%", max_size=14).map(str.strip)


def test_figures_stand_in_columns() -> None:
    figures = [("step time", "1.25 s", "of one step"), ("throughput", "8", "tokens"), ("bubble", "10.5 %", "")]
    assert figure_lines(figures) == [
        "step time   1.25 s  of one step",
        "throughput       8  tokens",
        "bubble      10.5 %",
    ]
    assert figure_lines(figures[2:], 6) == ["bubble  10.5 %"]


def test_a_column_is_as_wide_as_its_header_or_more() -> None:
    lines = right_aligned(("rank", "activations"), [("0", "1.25"), ("10", "-")], (7, 7))
    assert lines == ["   rank  activations", "      0         1.25", "     10            -"]


@given(st.lists(st.tuples(TEXT, TEXT, TEXT), min_size=1, max_size=5))
def test_values_end_in_one_column(figures: list[tuple[str, str, str]]) -> None:
    width = max(len(value) for _, value, _ in figures)
    for line, (name, value, note) in zip(figure_lines(figures, 14), figures, strict=True):
        padded = line.ljust(14 + 2 + width)
        assert padded[:14].rstrip() == name and padded[16 : 16 + width] == value.rjust(width)
        assert padded[16 + width :].strip() == note
