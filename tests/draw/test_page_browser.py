"""The page in a real browser: pointer, keys, table, form, looks. `tools/browser.sh` installs one."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helixpipe.costs.by_hand import PieceTimes
from helixpipe.draw.page import circle_page
from helixpipe.draw.style import KIND_STYLES, LANE_STYLES
from helixpipe.lowering.lower import lower
from helixpipe.lowering.validate import CircleError
from helixpipe.program.text import from_csv
from helixpipe.program.timeline import OpEvent, Timeline
from helixpipe.simulate.simulator import Simulation, simulate
from schedules import Shape, build
from tests.draw.chromium import Browser, installed
from tests.draw.opened import Opened
from tests.draw.pages import COSTS, of, simulation
from tests.simulate.test_copying import leaving

pytestmark = pytest.mark.skipif(installed() is None, reason="no Chromium is installed; tools/browser.sh installs one")


def measured(made: Simulation) -> Timeline:
    """As training would have recorded it: in seconds; backwards take a quarter longer, from their start."""
    ops = [
        OpEvent(rank, op, start / 1e3, (end + (end - start) / 4 * (op.kind == "B")) / 1e3)
        for rank, op, start, end in made.timeline.ops
    ]
    return Timeline("1f1b, measured", 4, ops, (), "s")


def test_pointing_tells_when_and_why(show: Any) -> None:
    opened = show(simulation())
    x, y = opened.place("1B0")
    opened.browser.move(x, y)
    assert opened.text("#tip").splitlines() == [
        "1B0: backward",
        "stage 1, microbatch 0, rank 1",
        "98.5 to 122.5, took 24",
        "Rank 1 was idle for 50 before it: it waited for the gradient of 2B0 for 1B0 (rank 2 to rank 1), "
        "which left at 98 and arrived at 98.5.",
        "Critical: any delay of it makes the step longer.",
    ]
    opened.browser.move(*opened.place("0F1"))
    assert "Did not wait: it follows 0F0 at once." in opened.text("#tip")
    assert "Could end " in opened.text("#tip") and " later without making the step longer." in opened.text("#tip")
    opened.browser.move(5, 5)
    assert opened.browser.evaluate("document.getElementById('tip').hidden")


def test_boxes_have_the_colours_of_the_picture(show: Any) -> None:
    opened = show(of(leaving(build("1f1b", Shape(4, 8, 8)), 1), replace(COSTS, copy=3.0)))
    for cell in ("0F0", "3B7"):
        x, y = opened.place(cell)
        assert opened.colour(x, y - 10) == KIND_STYLES[cell[1]].colour
    lane = "page.panels[0].canvas.getBoundingClientRect().top + page.panels[0].strips[1].top + 2.5"
    x = opened.edges("0F0")[1] + 2
    assert opened.colour(x, opened.browser.evaluate(lane)) == LANE_STYLES["out"].colour


def test_a_click_keeps_it_and_buttons_follow_the_waits(show: Any) -> None:
    opened = show(simulation())
    opened.browser.click(*opened.place("1B0"))
    assert opened.text("#details h2") == "1B0: backward · 1f1b"
    assert opened.text("#jumps + .links") == "Waits for: 1F02B0 (gradient, sent 98, arrived 98.5)"
    before = opened.picture()
    opened.browser.click_on("#jumps + .links button:nth-of-type(2)")
    assert opened.text("#details h2") == "2B0: backward · 1f1b"
    assert (before != opened.picture()).any()
    opened.browser.click_on("#details > button")
    assert opened.browser.evaluate("document.getElementById('details').hidden")


def test_zoom_and_pan(show: Any) -> None:
    opened = show(simulation())
    page, (x, y) = opened.browser, opened.place("1B0")
    assert opened.view() == [0, 404]
    page.wheel(x, y, -200)
    assert opened.view() == [0, 404], "the wheel scrolls the page until the chart has been clicked"
    page.click(x, y)
    page.wheel(x, y, -200)
    start, end = opened.view()
    assert 0 < start < 98.5 and 122.5 < end < 404
    assert opened.place("1B0")[0] == pytest.approx(x, abs=1)
    page.drag(x, y, x + 60)
    assert opened.view()[0] < start
    assert opened.place("1B0")[0] == pytest.approx(x + 60, abs=1)
    page.click_on("#closer")
    assert opened.view()[1] - opened.view()[0] < end - start
    page.click_on("#all")
    assert opened.view() == [0, 404]


def test_keys_go_from_op_to_op_and_are_read_out(show: Any) -> None:
    opened = show(simulation())
    page = opened.browser
    page.evaluate("page.panels[0].canvas.focus()")
    said = []
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "End", "w", "n", "Home"):
        page.key(key)
        said.append(re.split("[:.] ", opened.text("#live"))[0])
    assert said == ["0F0", "0F1", "1F0", "1B7", "2B7", "1B7", "1F0"]
    page.key("+")
    page.key("ArrowRight", shift=True)
    assert opened.view()[0] > 0 and opened.view()[1] < 404
    page.key("0")
    page.key("Escape")
    assert opened.view() == [0, 404] and page.evaluate("document.getElementById('details').hidden")


def test_it_can_be_read_without_seeing_it(show: Any) -> None:
    opened = show(simulation())
    nodes = opened.browser.call("Accessibility.getFullAXTree")["nodes"]
    named = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node["ignored"]]
    assert all(
        name for role, name in named if role in ("button", "checkbox", "combobox", "slider", "application", "searchbox")
    )
    assert ("searchbox", "find op") in named and ("button", "Next op found") in named
    assert ("button", "Zoom in") in named and ("checkbox", "critical path") in named
    charts = [name for role, name in named if role == "application"]
    assert len(charts) == 1 and charts[0].startswith(
        "1f1b: 4 ranks, 8 microbatches, makespan 404, bubble 28.7 %. Arrow keys"
    )
    assert opened.text("main .summary") == (
        "Every rank is idle for 28.7 % of the step. The critical path, 38 tasks long: backward 65.3 %, forward 32.7 %, "
        "transfers 2.0 %. Most memory on a device: 8 microbatch-layers (rank 0)."
    )


def test_the_table(show: Any) -> None:
    """Of 8192 rows those in sight are there."""
    opened = show(simulation(ranks=32, microbatches=64))
    page = opened.browser
    assert page.evaluate("document.querySelectorAll('*').length") < 150
    page.click_on("#ops summary")
    page.wait("document.querySelector('.row')")
    rows = "[...document.querySelectorAll('.row')].map(row => row.firstChild.textContent)"
    assert page.evaluate(rows)[:3] == ["0F0", "0F1", "1F0"] and len(page.evaluate(rows)) < 40
    assert opened.text("#count") == "4096 ops"
    header = "#head [data-name=\\'idle before\\']"
    page.click_on("#head [data-name='idle before'] button")
    page.click_on("#head [data-name='idle before'] button")
    assert page.evaluate(f"document.querySelector('{header}').ariaSort") == "descending"
    assert page.evaluate(rows)[0] == "0B0"
    page.evaluate("document.getElementById('table').scrollTop = 26 * 3000")
    page.settle()
    page.settle()
    assert 2990 < page.evaluate("+document.querySelector('.row').ariaRowIndex") < 3003
    page.evaluate("document.getElementById('filter').focus()")
    page.type("31B63")
    assert opened.text("#count") == "1 op" and page.evaluate(rows) == ["31B63"]
    page.click_on(".row")
    assert opened.text("#details h2").startswith("31B63: backward")


def test_other_times_in_the_page(show: Any) -> None:
    made = simulation()
    opened = show(made)
    page = opened.browser
    page.click_on("#times summary")
    page.click_on("input[name=attn]")
    page.evaluate("document.activeElement.select()")
    page.type("0.5")
    page.click_on("#form button[type=submit]")
    again = simulate(made.lowered, PieceTimes({"qkv": 1, "attn": 0.5, "mlp": 2}, message=0.5))
    assert page.evaluate("page.panels[0].times.makespan") == again.makespan
    assert opened.text("#again").startswith(f"1f1b: 404 → {again.makespan:g} (−")
    assert f"makespan {again.makespan:g}" in opened.text("main h2")
    assert "Compared with the times given: 40.8 % shorter" in opened.text("main .summary + .summary")
    assert opened.view() == [0, again.makespan]
    page.click_on("#form button[type=reset]")
    assert opened.text("main h2") == "1f1b: 4 ranks, 8 microbatches, makespan 404, bubble 28.7 %"
    assert opened.view() == [0, 404] and opened.text("#again") == "As given."


def test_a_measured_run_below_a_simulated_one(show: Any) -> None:
    made = simulation(costs=PieceTimes({"qkv": 1e-3, "attn": 3e-3, "mlp": 2e-3}, message=5e-4))
    in_seconds = replace(made, unit="s")
    opened = show(in_seconds, measured(simulation()), height=1000)
    said = opened.text("section:nth-of-type(2) .summary + .summary")
    assert said.startswith("Compared with 1f1b: 1.5 % longer; ") and "times of ops F 1.000 ×, B 1.250 ×" in said
    opened.browser.move(*opened.place("2B3", panel=1))
    tip = opened.text("#tip")
    assert "begins at the same time, takes 1.25 × as long." in tip
    x, y = opened.place("2B3", panel=1)
    assert opened.colour(x - 12, y - 10) == KIND_STYLES["B"].colour
    opened.browser.evaluate("document.getElementById('colour').focus()")
    opened.browser.key("ArrowDown")
    opened.browser.move(5, 5)
    assert opened.colour(x - 12, y - 10) == "#b35806", "longer by as much as any"
    assert opened.colour(*[value - 10 for value in opened.place("2B3")]) == KIND_STYLES["B"].colour


def test_switches_change_the_picture(show: Any) -> None:
    opened = show(of(leaving(build("1f1b", Shape(4, 8, 8)), 1), replace(COSTS, copy=3.0)))
    page, height = opened.browser, "page.panels[0].canvas.clientHeight"
    tall, shown = page.evaluate(height), opened.picture()
    for name, change in (("links", 1), ("copies", -1), ("memory", -1)):
        before = page.evaluate(height)
        page.click_on(f"#show-{name}")
        assert (page.evaluate(height) - before) * change > 0, name
        page.click_on(f"#show-{name}")
        assert page.evaluate(height) == before == tall
    for name in ("path", "messages"):
        page.click_on(f"#show-{name}")
        page.move(5, 5)
        assert (opened.picture() != shown).sum() > 500, name
        page.click_on(f"#show-{name}")
    assert "host memory" in opened.text("#legend") and "in: copy back" in opened.text("#legend")


def test_dark_and_light_small_and_large(show: Any) -> None:
    for dark, width in ((False, 1400), (True, 1400), (True, 400), (False, 400)):
        opened = show(simulation(), simulation("zb1p"), dark=dark, width=width, height=900)
        assert (np.median(opened.picture()) < 60) == dark
        assert opened.browser.evaluate("document.documentElement.scrollWidth") <= width
        left, _, right, _ = opened.box("canvas")
        assert right - left > 0.9 * width - 50 - (350 if width == 1400 else 0), "but for the details beside it"


def test_the_circle_is_drawn(chromium: Browser, tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    with pytest.raises(CircleError) as caught:
        lower(from_csv(tmp_path / "mine.csv"))
    opened = Opened(chromium, tmp_path / "x.html", circle_page(caught.value))
    assert opened.text("main h2").endswith("cannot run")
    assert "circle: 0B0 (rank 0) waits for 1B0 (rank 1)" in opened.text("main .summary")
    red = (opened.picture() == [0xC2, 0x18, 0x5B]).all(axis=2).sum()
    assert red > 1000, "the circle's colour"
    opened.browser.move(*opened.place("1F0"))
    assert "Stands behind 1B1 in the order of its rank." in opened.text("#tip")
    opened.browser.move(*opened.place("0B1"))
    assert "It cannot run either" in opened.text("#tip")
