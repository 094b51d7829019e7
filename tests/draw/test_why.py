"""The sentence that says where the difference between two timelines comes from: its numbers add up as they stand."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helixpipe.costs.hardware import find_hardware
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import Layout, find_model
from helixpipe.draw.page_data import panels_data
from helixpipe.draw.why import whole_steps, why_longer
from helixpipe.program.timeline import Timeline
from helixpipe.simulate.simulator import Simulation
from schedules import Shape, build
from tests.draw.pages import of, simulation

NUMBER = re.compile(r"([0-9.]+)(?: (s|ms|µs))? (more|less)")


def numbers(sentence: str) -> list[float]:
    """Signed, as they stand: the sum, then the parts."""
    return [float(value) * (1 if way == "more" else -1) for value, _, way in NUMBER.findall(sentence)]


def seconds(name: str) -> Simulation:
    costs = ModelCosts(find_model("llama2-7b"), find_hardware("h20"), Layout(), 16384)
    return of(build(name, Shape(4, 8, 8)), costs, "s")


BY_HAND = [simulation(name) for name in ("1f1b", "helix", "zb1p", "gpipe", "weipipe", "zbv")]
BY_HAND.append(simulation("helix", 2, 8))
BY_MODEL = [seconds(name) for name in ("1f1b", "helix", "zb1p")]


@pytest.mark.parametrize(
    ("one", "other"), [*itertools.permutations(BY_HAND, 2), *itertools.permutations(BY_MODEL, 2)],
    ids=lambda each: f"{each.timeline.title}-{each.timeline.unit}",
)  # fmt: skip
def test_the_parts_add_up_to_the_difference(one: Simulation, other: Simulation) -> None:
    sentence = why_longer(one, other)
    total, *parts = numbers(sentence) if "as long:" not in sentence else [0.0, *numbers(sentence)]
    units = {unit for _, unit, _ in NUMBER.findall(sentence)}
    assert len(units) == 1
    scale = {"": 1, "s": 1, "ms": 1e3, "µs": 1e6}[units.pop()]
    assert len(parts) >= 1 and math.fsum(parts) == pytest.approx(total, abs=1e-9 * max(map(abs, parts)))
    assert total == pytest.approx((one.makespan - other.makespan) * scale, abs=max(map(abs, parts)) / 100)
    ways = [part > 0 for part in parts]
    assert ways == sorted(ways, reverse=total >= 0), "what makes the difference first, what is against it after"
    assert why_longer(one, one) == ""


def test_helix_is_slower_where_it_recomputes_more_than_others_wait() -> None:
    """Forwards and backwards take as long in both: what ranks do more, in all, is to recompute."""
    costs = simulation().costs
    one, other = (of(build(name, Shape(16, 64, 32)), costs) for name in ("1f1b", "helix"))
    assert other.makespan > one.makespan
    said = why_longer(other, one)
    page = (Path(__file__).parents[2] / "docs" / "page.md").read_text(encoding="utf-8")
    assert said in page.replace("\n> ", " ")
    assert said.startswith(
        f"Why it takes {other.makespan - one.makespan:.0f} more: averaged over the ranks, "
        f"recomputation takes {other.ideal - one.ideal:.0f} more; waiting for "
    )


@given(st.dictionaries(st.text(max_size=3), st.floats(-1e6, 1e6), min_size=1, max_size=9))
def test_rounding_keeps_the_sum(parts: dict[str, float]) -> None:
    steps = whole_steps(parts)
    assert sum(steps.values()) == round(math.fsum(parts.values()))
    assert all(abs(steps[name] - part) < 1 + 1e-9 for name, part in parts.items())


def test_a_recording_is_explained_where_it_has_the_same_unit() -> None:
    made = simulation()
    longer = [
        event._replace(start=event.start * 1.5, end=event.end * 1.5) for event in made.timeline.ops
    ]  # everything, waits too
    recorded = Timeline("measured", 4, longer, unit="s")
    assert why_longer(recorded, made) == ""
    same = replace(made, unit="s")
    total, *parts = numbers(why_longer(recorded, same))
    assert total == pytest.approx(202) and sum(parts) == pytest.approx(202)
    assert "backward takes 96 s more" in why_longer(recorded, same)


def test_the_first_of_the_same_size_is_compared_with() -> None:
    """Or the first; the page has no other choice of its own."""
    helix, one, other = simulation("helix"), simulation(), simulation("gpipe")
    panels = panels_data([helix, one, other, one.timeline])
    assert [panel["base"] for panel in panels] == [None, 0, 1, 1]
    assert [panel["why"] for panel in panels] == ["", why_longer(one, helix), why_longer(other, one), ""]
