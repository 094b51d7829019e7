"""The playground in a real browser: first picture, changed settings, a changed order, a deadlock, links, looks."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helixpipe.costs.models import MODELS
from helixpipe.playground.pyodide import FILES, cached
from helixpipe.playground.serve import server
from tests.draw.chromium import Browser, browser, installed
from tests.playground.questions import command_line

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(
        installed() is None or not all((cached() / name).is_file() for name in FILES),
        reason="there is no Chromium or no Pyodide; tools/browser.sh gets both",
    ),
]

IDLE = "document.body?.dataset.ready && document.getElementById('status').textContent === 'Ready'"


class Playground:
    """The page, and what a person does with it."""

    def __init__(self, chromium: Browser, address: str):
        self.browser, self.address = chromium, address

    def open(self, link: str = "", width: int = 1200, dark: bool = False) -> None:
        self.browser.errors.clear()
        self.browser.call("Page.navigate", url="about:blank")
        self.browser.open(self.address + link, width=width, height=1000, dark=dark)

    def idle(self) -> None:
        self.browser.wait(IDLE)
        self.browser.settle()
        assert self.browser.errors == []

    def value(self, expression: str) -> Any:
        return self.browser.evaluate(expression)

    def figures(self, panel: int = 0) -> dict[str, Any]:
        told: dict[str, Any] = self.value(f"page.panels[{panel}].step.figures")
        return told

    def text(self, selector: str) -> str:
        return str(self.value(f"document.querySelector({json.dumps(selector)}).innerText"))

    def place(self, cell: str, share: float = 0.5) -> tuple[float, float]:
        """A point of an op of the first panel, in the window; share: of its time."""
        x, y = self.value(
            f"(() => {{ const {{chart}} = page.panels[0], op = chart.step.ops.cell.indexOf('{cell}');"
            "const at = chart.canvas.getBoundingClientRect(), left = chart.x(chart.start(op));"
            f"return [at.left + left + {share} * (chart.x(chart.end(op)) - left),"
            "at.top + chart.y(chart.step.ops.rank[op]) + chart.row / 2]; })()"
        )
        return x, y

    def choose(self, name: str, value: str, panel: int = 0) -> None:
        self.value(
            f"(() => {{ const input = page.panels[{panel}].element.querySelector('[name={name}]');"
            f"input.value = '{value}'; input.dispatchEvent(new Event('change', {{bubbles: true}})); }})()"
        )
        self.idle()


@pytest.fixture(scope="module")
def opened(playground: Path) -> Iterator[Playground]:
    with server(playground, 0) as serving, browser() as chromium:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield Playground(chromium, f"http://127.0.0.1:{serving.server_port}/")
        serving.shutdown()


def simulated(schedule: str, flags: str = "-p 4 -m 8", costs: str = "") -> dict[str, Any]:
    return command_line({"schedule": schedule, "flags": flags.split(), "costs": costs.split()})


def test_from_the_first_picture_to_an_order_of_ones_own(opened: Playground) -> None:
    opened.open()  # there before Python has started
    assert [opened.figures(panel)["makespan"] for panel in (0, 1)] == [
        simulated(name, "-p 4 -m 8 -L 8", "--message-time 0.5")["makespan"] for name in ("1f1b", "helix")
    ]
    opened.choose("k", "2")
    opened.choose("schedule", "seq1f1b")
    expected = simulated("seq1f1b", "-p 4 -m 8 -k 2 -L 8", "--message-time 0.5")
    assert opened.figures() == {key: expected[key] for key in opened.figures()}
    assert "shorter than helix" in opened.text(".figures") or "longer than helix" in opened.text(".figures")
    opened.choose("schedule", "1f1b")
    opened.choose("k", "1")
    before = opened.figures()["makespan"]
    x, y = opened.place("3F1")
    opened.browser.drag(x, y, opened.place("3B0", 0.1)[0])
    opened.idle()
    assert opened.value("page.panels[0].state.moves") == [[3, 2, 1]]
    assert opened.figures()["makespan"] > before and "1 move" in opened.text(".figures")
    x, y = opened.place("3F0")
    opened.browser.drag(x, y, opened.place("3B0", 0.9)[0])
    opened.idle()
    assert "3B0 comes before 3F0" in opened.text(".error")
    assert "3B0 needs what 3F0 makes" in opened.text(".circle")
    opened.browser.click_on("[data-do=undo]")
    opened.idle()
    link = opened.value("location.hash")
    opened.open(link)
    opened.idle()
    assert opened.value("page.panels[0].state.moves") == [[3, 2, 1]]
    assert opened.figures()["makespan"] > before


def test_it_is_used_by_keyboard(opened: Playground) -> None:
    opened.open("#a:schedule=1f1b;L=8")
    opened.idle()
    opened.value("document.querySelector('.timeline').focus()")
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight", "ArrowRight"):
        opened.browser.key(key)
    assert opened.text(".selected").startswith("3F1: forward of microbatch 1 on stage 3, rank 3; from")
    opened.browser.key("ArrowLeft", shift=True)
    opened.idle()
    assert opened.value("page.panels[0].state.moves") == [[3, 2, 1]]
    assert opened.text(".selected").startswith("3F1:")  # still the same op
    opened.browser.click_on("[data-do=later]")
    opened.idle()
    assert opened.figures()["makespan"] == simulated("1f1b", "-p 4 -m 8 -L 8")["makespan"]
    opened.browser.click_on("[data-do=reset]")
    opened.idle()
    assert opened.value("page.panels[0].state.moves") == []


def test_two_are_on_one_axis_and_one_can_go(opened: Playground) -> None:
    opened.open("#a:schedule=gpipe;m=4")
    opened.idle()
    opened.browser.click_on("#second")
    opened.choose("schedule", "zb1p", panel=1)
    assert opened.value("page.panels[0].chart.until === page.panels[1].chart.until")
    assert "b:schedule=zb1p;m=4" in opened.value("location.hash")
    opened.browser.click_on(".remove")
    assert opened.value("page.panels.length") == 1 and opened.value("location.hash") == "#a:schedule=gpipe;m=4"


def test_a_model_shows_its_own_controls_and_limit(opened: Playground) -> None:
    opened.open("#a:schedule=1f1b;model=qwen3-4b;hardware=a800;tokens=4096")
    opened.idle()
    expected = simulated("1f1b", "-p 4 -m 8", "--model qwen3-4b --hardware a800 --seq-length 4096")
    assert opened.figures()["step"] == expected["step"]
    assert not opened.value("document.querySelector('[data-key=attn]').checkVisibility()")
    assert opened.value("document.querySelector('[data-key=tokens]').checkVisibility()")
    assert "within 73.1 GiB" in opened.text(".figures") and "tokens/s a GPU" in opened.text(".figures")
    opened.choose("limit", "1")
    assert "more than 1.0 GiB" in opened.text(".figures")


def test_choosing_a_model_sets_its_sizes(opened: Playground) -> None:
    """All its layers and tokens, in place of those of the example or of the model before."""
    opened.open("#a:schedule=zbv;L=8")
    opened.idle()
    for name in ("llama2-7b", "llama2-13b"):
        opened.choose("model", name)
        size = f"-p 4 -m 8 -L {MODELS[name].layers}"
        costs = f"--model {name} --hardware h100 --seq-length {MODELS[name].seq_length}"
        assert opened.figures() == simulated("zbv", size, costs)
        for key, value in (("L", MODELS[name].layers), ("tokens", MODELS[name].seq_length)):
            assert opened.value(f"document.querySelector('[name={key}]').value") == str(value)
    opened.choose("model", "")
    assert opened.figures() == simulated("zbv", "-p 4 -m 8")


def test_a_schedule_made_for_chunks_finds_their_number(opened: Playground) -> None:
    opened.open("#a:schedule=seq1f1b;m=4")
    opened.idle()
    found = simulated("seq1f1b", "-p 4 -m 4")
    assert opened.figures() == {key: found[key] for key in opened.figures()} and found["chunks"] > 1
    opened.choose("k", "1")
    assert opened.figures() == simulated("seq1f1b", "-p 4 -m 4 -k 1")


@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_a_telephone(opened: Playground, dark: bool) -> None:
    opened.open("#a:schedule=zbv;p=8;m=16", width=390, dark=dark)
    opened.idle()
    assert opened.value("document.documentElement.scrollWidth") == 390
    assert opened.value("[...document.querySelectorAll('button, input, select')].every(each =>"
                        "!each.checkVisibility() || each.getBoundingClientRect().height >= 32)")  # fmt: skip
    ink = opened.value("getComputedStyle(document.body).color")
    assert (int(ink.split("(")[1].split(",")[0]) > 200) == dark


def test_a_damaged_link_does_no_harm(opened: Playground) -> None:
    opened.open("#a:schedule=%3Cb%3E;moves=1.2_a.b.c_0.99.1;nonsense=1;=;&c:&b")
    opened.idle()
    assert "<b>" in opened.text(".error")
