"""A step as coloured bars in a terminal."""

from __future__ import annotations

import os
import re
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helixpipe.costs.by_hand import unit_costs
from helixpipe.draw.style import KIND_STYLES
from helixpipe.draw.text import bars
from helixpipe.lowering.lower import lower
from helixpipe.planning.setup import Setup
from helixpipe.program.timeline import Timeline
from helixpipe.simulate.simulator import simulate
from schedules import CATALOGUE

CODES = re.compile(r"\x1b\[[0-9;]*m")
BOX = re.compile(r"\x1b\[[0-9;]*?(48;2;\d+;\d+;\d+)m([^\x1b]*)")


def rgb(kind: str) -> str:
    """The escape sequence of a kind's colour as a background."""
    return "48;2;" + ";".join(str(int(KIND_STYLES[kind].colour[place : place + 2], 16)) for place in (1, 3, 5))


def timeline(name: str, ranks: int, microbatches: int, chunks: int = 1) -> Timeline:
    costs = unit_costs()
    shape = Setup(ranks, 2 * ranks, costs).shape(microbatches, chunks)
    return simulate(lower(CATALOGUE.build(name, shape), costs), costs).timeline


def test_the_bars_of_a_step() -> None:
    """Six columns a microbatch's forward and backward: two and four."""
    assert (bars(timeline("1f1b", 2, 2), 7 + 18) or "").splitlines() == [
        "rank 0 0 1     0     1   ",
        "rank 1   0 0   1 1       ",
        "        F  forward    B  ",
    ]


@pytest.mark.parametrize("name", ["zbv", "seq1f1b"])
def test_a_kind_has_the_colour_of_pictures(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    step = timeline(name, 2, 4, 2)
    drawn = bars(step, 200)
    assert drawn is not None
    assert all(rgb(event.op.kind) in drawn for event in step.ops)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search("48;", bars(step, 200) or "")


@given(st.sampled_from(["1f1b", "zb1p", "gpipe", "helix"]), st.integers(1, 4), st.integers(1, 5), st.integers(60, 150))
def test_columns_of_a_kind_are_its_share_of_the_step(name: str, ranks: int, half: int, width: int) -> None:
    """But for the rounding of each of its boxes, and no line is longer than the terminal."""
    step = timeline(name, ranks, 2 * ranks * half)
    with patch.dict(os.environ, {"FORCE_COLOR": "1", "COLORTERM": "truecolor"}):
        *lines, _ = (bars(step, width) or "").splitlines()
    columns = width - len("rank 0 ")
    assert len(lines) == ranks
    for rank, line in enumerate(lines):
        assert len(CODES.sub("", line)) <= width
        for kind in KIND_STYLES:
            boxes = [event for event in step.ops if event.rank == rank and event.op.kind == kind]
            shown = sum(len(text) for code, text in BOX.findall(line) if code == rgb(kind))
            share = sum(event.end - event.start for event in boxes) / step.makespan
            assert abs(shown - share * columns) <= len(boxes)
