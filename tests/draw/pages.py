"""Pages of timelines, taken apart, and their programs run without a browser."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import zlib
from html.parser import HTMLParser
from typing import Any

from helixpipe.costs.by_hand import PieceTimes
from helixpipe.draw.page import scripts
from helixpipe.lowering.lower import lower
from helixpipe.program.costs import Costs
from helixpipe.program.program import Program
from helixpipe.simulate.simulator import Simulation, simulate
from schedules import Shape, build

COSTS = PieceTimes({"qkv": 1, "attn": 3, "mlp": 2}, message=0.5)


def simulation(name: str = "1f1b", ranks: int = 4, microbatches: int = 8, costs: Costs = COSTS) -> Simulation:
    return of(build(name, Shape(ranks, microbatches, 2 * ranks)), costs)


def of(program: Program, costs: Costs = COSTS, unit: str = "") -> Simulation:
    return simulate(lower(program, costs), costs, unit)


class Page(HTMLParser):
    """Collects what a browser would fetch, and the data."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.text, self.encoding = "", ""
        self._in_data = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [str(value) for name, value in attrs if name in ("src", "href", "action")]
        self._in_data = ("id", "data") in attrs
        if self._in_data:
            self.encoding = dict(attrs)["data-encoding"] or ""

    def handle_data(self, data: str) -> None:
        self.text += data if self._in_data else ""

    def handle_endtag(self, tag: str) -> None:
        self._in_data = False

    @property
    def data(self) -> dict[str, Any]:
        text = self.text if self.encoding == "none" else zlib.decompress(base64.b64decode(self.text)).decode()
        found: dict[str, Any] = json.loads(text)
        return found


def node(expression: str, value: Any) -> Any:
    """Return what an expression of `input` gives, with the page's programs that need no browser. Needs node."""
    read = 'const input = JSON.parse(require("fs").readFileSync(0, "utf8"));'
    program = f"{scripts(['words.js', 'simulate.js'])}\n{read}\nconsole.log(JSON.stringify({expression}));"
    run = subprocess.run(["node", "-e", program], input=json.dumps(value), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


HAS_NODE = shutil.which("node") is not None
