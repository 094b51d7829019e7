"""The page in a real browser: pointer, keys, table, form, looks. `tools/browser.sh` installs one."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from helixpipe.costs.by_hand import PieceTimes
from helixpipe.draw.page import circle_page, html_page
from helixpipe.draw.style import KIND_STYLES, LANE_STYLES
from helixpipe.draw.why import why_longer
from helixpipe.lowering.lower import lower
from helixpipe.lowering.validate import CircleError
from helixpipe.program.text import from_csv
from helixpipe.program.timeline import OpEvent, Timeline
from helixpipe.simulate.simulator import Simulation, simulate
from schedules import Shape, build
from tests.draw.chromium import Browser, browser, installed
from tests.draw.pages import COSTS, of, simulation
from tests.simulate.test_copying import leaving

pytestmark = pytest.mark.skipif(installed() is None, reason="no Chromium is installed; tools/browser.sh installs one")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


class Opened:
    """A page that is shown, and what a person does with it."""

    def __init__(self, chromium: Browser, path: Path, page: str, **looks: Any):
        self.browser = chromium
        path.write_text(page, encoding="utf-8")
        chromium.errors.clear()
        chromium.open(path, **looks)
        assert chromium.errors == [] and self.text("#failed") == ""

    def text(self, selector: str) -> str:
        return str(self.browser.evaluate(f"document.querySelector('{selector}')?.textContent ?? 'nothing'"))

    def place(self, cell: str, panel: int = 0) -> tuple[float, float]:
        """The middle of an op, in the window."""
        x, y = self.browser.evaluate(
            f"(() => {{ const panel = page.panels[{panel}], box = boxOf(panel, panel.byCell.get('{cell}'));"
            "const at = panel.canvas.getBoundingClientRect();"
            "return [at.left + box.x + box.wide / 2, at.top + box.y + box.tall / 2]; })()"
        )
        return x, y

    def edges(self, cell: str, panel: int = 0) -> tuple[float, float]:
        """Where an op begins and ends, in the window."""
        x, _ = self.place(cell, panel)
        wide = self.browser.evaluate(f"boxOf(page.panels[{panel}], page.panels[{panel}].byCell.get('{cell}')).wide")
        return x - wide / 2, x + wide / 2

    def box(self, selector: str) -> tuple[float, float, float, float]:
        """Left, top, right, bottom of an element in the window."""
        left, top, right, bottom = self.browser.evaluate(
            f"(({{left, top, right, bottom}}) => [left, top, right, bottom])"
            f"(document.querySelector('{selector}').getBoundingClientRect())"
        )
        return left, top, right, bottom

    def shows(self, selector: str) -> bool:
        """Whether an element is there to be seen."""
        return bool(self.browser.evaluate(f"document.querySelector('{selector}').checkVisibility()"))

    def focused(self) -> str:
        """The id of what has the focus, or its tag."""
        return str(self.browser.evaluate("document.activeElement.id || document.activeElement.tagName"))

    def picture(self) -> np.ndarray:
        """What is in sight: rows, columns, and red, green and blue from 0 to 255."""
        shown = imread(io.BytesIO(self.browser.screenshot()), format="png")
        return np.asarray(np.round(shown[:, :, :3] * 255), dtype=int)

    def colour(self, x: float, y: float) -> str:
        red, green, blue = self.picture()[round(y), round(x)]
        return f"#{red:02x}{green:02x}{blue:02x}"

    def view(self) -> list[float]:
        found: list[float] = self.browser.evaluate("[page.panels[0].view.from, page.panels[0].view.to]")
        return found


@pytest.fixture
def show(chromium: Browser, tmp_path: Path) -> Any:
    def open_page(*shown: Simulation | Timeline, **looks: Any) -> Opened:
        return Opened(chromium, tmp_path / "x.html", html_page(shown), **looks)

    return open_page


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


@pytest.mark.parametrize(("width", "height"), [(1440, 900), (1024, 768), (390, 800), (390, 250)])
def test_the_tip_covers_no_part_of_the_row(show: Any, width: int, height: int) -> None:
    """Of ops and of memory, wherever in the window the row is."""
    opened = show(simulation(), simulation("gpipe"), width=width, height=height)
    for cell, panel, part in itertools.product(("0F0", "3B7"), (0, 1), (0.2, 0.5, 0.85)):
        opened.browser.evaluate(f"scrollBy(0, {opened.place(cell, panel)[1]} - {part} * innerHeight)")
        opened.browser.settle()
        for below in (0, 26):  # its memory
            x, y = opened.place(cell, panel)
            opened.browser.move(x, y + below)
            assert opened.shows("#tip") and (cell in opened.text("#tip")) != (below > 0)
            canvas = opened.box(f"section:nth-of-type({panel + 1}) canvas")[1]
            strip = f"stripAt(page.panels[{panel}], {y + below - canvas})"
            top = canvas + opened.browser.evaluate(f"{strip}.top")
            bottom = top + opened.browser.evaluate(f"{strip}.height")
            left, over, right, under = opened.box("#tip")
            assert (under <= top or over >= bottom) and over >= 0 and under <= height and left >= 0 and right <= width
            assert under - over > 40, "it can be read"


def test_the_tip_is_gone_after_a_click(show: Any) -> None:
    """The details say the same; another op's tip comes as before."""
    opened = show(simulation())
    x, y = opened.place("1B0")
    opened.browser.move(x, y)
    assert opened.shows("#tip")
    opened.browser.click(x, y)
    assert not opened.shows("#tip") and opened.shows("#details")
    opened.browser.move(x + 2, y)
    assert not opened.shows("#tip")
    opened.browser.move(*opened.place("1B1"))
    assert opened.shows("#tip") and "1B1" in opened.text("#tip")


def test_the_tip_is_gone_when_the_chart_moves(show: Any) -> None:
    opened = show(simulation(), simulation("zb1p"), height=500)
    page, (x, y) = opened.browser, opened.place("1B1")
    page.click(*opened.place("1B0"))
    for action in (
        lambda: page.wheel(x, y, -20),
        lambda: page.key("ArrowRight"),
        lambda: page.evaluate("scrollBy(0, 1)"),
        lambda: page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + 1, y=y, button="left", buttons=1),
    ):
        page.move(*opened.place("1B3"))
        page.move(*opened.place("1B1"))
        assert opened.shows("#tip")
        action()
        page.settle()
        assert not opened.shows("#tip")


@pytest.mark.parametrize(("width", "beside"), [(1440, True), (1200, True), (1024, False), (390, False)])
@pytest.mark.parametrize("cell", ["0F0", "3B7"])
def test_details_hide_no_chart(show: Any, width: int, beside: bool, cell: str) -> None:
    """They lie beside the charts or below them; whatever is scrolled to is to be seen, and so is the op itself."""
    opened = show(simulation(), simulation("helix"), width=width, height=600)
    page, charts = opened.browser, [f"section:nth-of-type({number}) canvas" for number in (1, 2)]
    page.evaluate(f"scrollBy(0, {opened.place(cell)[1]} - 595)")
    before = [opened.box(chart) for chart in charts]
    page.click(*opened.place(cell))
    seen = "(([x, y]) => document.elementFromPoint(x, y))"
    assert page.evaluate(f"{seen}({list(opened.place(cell))}) === page.panels[0].canvas")
    left, top, _, _ = opened.box("#side")
    if beside:
        assert [opened.box(chart) for chart in charts] == before, "nothing moves"
        assert all(right < left for _, _, right, _ in before)
        return
    assert 300 < top < 600
    for chart in charts:
        page.evaluate(f"document.querySelector('{chart}').scrollIntoView({{block: 'end'}})")
        under = opened.box(chart)
        assert under[3] <= top + 0.5
        x, y = (under[0] + under[2]) / 2, under[3] - 2
        assert page.evaluate(f"{seen}([{x}, {y}]) === document.querySelector('{chart}')")
    page.evaluate("scrollTo(0, 1e6)")
    assert opened.box("#help")[3] <= top, "the page's end"


def test_the_waits_are_followed_and_back(show: Any) -> None:
    """From the chart, and from the details, where the focus stays."""
    opened = show(simulation())
    page = opened.browser
    page.click(*opened.place("1B0"))

    def press(*keys: str) -> list[str]:
        found = []
        for key in keys:
            page.key(key)
            found.append(opened.text("#details h2").split(":")[0])
        return found

    assert opened.text("#jumps") == "Go to 2B0, which it waited for w"
    assert press("w", "w", "b", "b") == ["2B0", "3B0", "2B0", "1B0"]
    assert press("b") == ["1B0"], "there is nothing to go back to"
    page.click_on("#jumps button")
    assert opened.text("#jumps") == "Go to 3B0, which it waited for wBack to 1B0 b"
    assert page.evaluate("document.activeElement === document.querySelector('#details h2')")
    assert press("w", "b", "n", "b") == ["3B0", "2B0", "1B0", "2B0"]
    page.click_on("#jumps button:nth-of-type(2)")
    assert opened.text("#details h2") == "1B0: backward · 1f1b"
    assert press("w", "w")[-1] == "3B0" and opened.text("#jumps").startswith("Go to 3F0, which it followed at once w")
    page.key("Escape")
    assert not opened.shows("#details") and opened.focused() == "CANVAS"
    assert page.evaluate("page.trail") == []


def test_an_op_is_found_by_its_name(show: Any) -> None:
    opened = show(simulation(), simulation("helix"))
    page = opened.browser
    page.evaluate("document.getElementById('help').open = true")
    page.key("/")
    assert opened.focused() == "find"
    page.type("1B3")
    assert opened.text("#live") == "2 ops found. Enter goes to the first."
    page.key("Enter")
    assert opened.text("#details h2") == "1B3: backward · 1f1b" and opened.text("#found") == "1 of 2"
    assert opened.text("#live").startswith("1 of 2. 1B3: backward. stage 1, microbatch 3, rank 1. ")
    page.key("Enter")
    assert opened.text("#details h2") == "1B3: backward · helix"
    top, bottom = opened.place("1B3", panel=1)[1], page.evaluate("innerHeight")
    assert 0 < top < bottom, "it is brought into view"
    page.key("Enter")
    assert opened.text("#found") == "1 of 2"
    page.key("Enter", shift=True)
    assert opened.text("#found") == "2 of 2" and opened.focused() == "find"
    page.key("Escape")
    assert opened.text("#found") == page.evaluate("document.getElementById('find').value") == ""
    assert opened.focused() == "CANVAS" and page.evaluate("document.activeElement === page.panels[1].canvas")
    page.key("b")
    assert opened.text("#details h2") == "1B3: backward · 1f1b", "from one timeline to the other"


def test_what_a_name_leaves_out_may_be_any(show: Any) -> None:
    opened = show(of(build("seq1f1b", Shape(4, 8, 8, chunks=2))))
    page = opened.browser

    def found(text: str) -> list[str]:
        page.evaluate(f"findOps('{text}')")
        return list(page.evaluate("page.found.ops.map(({panel, task}) => cellOf(panel, task))"))

    assert found("f5") == ["0F5", "1F5", "2F5", "3F5", "0F5.1", "1F5.1", "2F5.1", "3F5.1"]
    assert found("2B5") == ["2B5", "2B5.1"], "the very name first, though chunk 1 runs before"
    assert found(" 2B5.1 ") == ["2B5.1"] and found("2B5.0") == ["2B5"]
    assert len(found("3F")) == 16 and len(found("B")) == 64
    assert found("2F9") == [] and opened.text("#found") == "none" and opened.text("#live") == "No such op."
    for text in ("5", "2X5", "2F5x", "F5."):
        assert found(text) == [] and opened.text("#found") == "no name"
    assert found("") == [] and opened.text("#found") == opened.text("#live") == ""


def test_ops_not_found_are_pale(show: Any) -> None:
    opened = show(simulation())
    at = {cell: (opened.edges(cell)[0] + 3, opened.place(cell)[1]) for cell in ("1F2", "1F1")}
    before = {cell: opened.colour(*place) for cell, place in at.items()}
    assert set(before.values()) == {KIND_STYLES["F"].colour}
    opened.browser.evaluate("findOps('1F2')")
    opened.browser.settle()
    assert opened.colour(*at["1F2"]) == before["1F2"] and opened.colour(*at["1F1"]) != before["1F1"]
    opened.browser.evaluate("findOps('1F99')")
    opened.browser.settle()
    assert opened.colour(*at["1F1"]) == before["1F1"], "nothing is, where nothing is found"


def test_a_slash_in_a_field_is_a_slash(show: Any) -> None:
    opened = show(simulation())
    opened.browser.click_on("#ops summary")
    opened.browser.evaluate("document.getElementById('filter').focus()")
    opened.browser.key("/")
    assert opened.focused() == "filter"


def test_why_one_takes_longer(show: Any) -> None:
    """As Python says it, while the times are those it was said of."""
    one, other = simulation(), simulation("helix")
    opened = show(one, other)
    page, said = opened.browser, "section:nth-of-type({}) .why"
    assert opened.text(said.format(2)) == why_longer(other, one) != ""
    assert opened.shows(said.format(2)) and not opened.shows(said.format(1))
    page.click_on("#times summary")
    page.evaluate("document.querySelector('input[name=attn]').value = 0.5")
    page.click_on("#form button[type=submit]")
    assert not opened.shows(said.format(2))
    page.click_on("#form button[type=reset]")
    assert opened.text(said.format(2)) == why_longer(other, one)


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
    in_seconds = replace(made, timeline=replace(made.timeline, unit="s"))
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
