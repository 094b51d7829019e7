"""The page in a real browser: tip, details, jumps along waits, search, and why one program takes longer."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from helixpipe.draw.style import KIND_STYLES
from helixpipe.draw.why import why_longer
from schedules import Shape, build
from tests.draw.chromium import installed
from tests.draw.pages import of, simulation

pytestmark = pytest.mark.skipif(installed() is None, reason="no Chromium is installed; tools/browser.sh installs one")


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
