"""The page of timelines: one file with all that it shows, its styles and its programs.

The parts lie beside this file in `web/`, as they are read: `page.html` is the frame, `page.css` the looks, and the
programs of `SCRIPTS` go into it one after the other. They share one scope, and each uses only what stands before it
until all are there.
"""

from __future__ import annotations

import html
import json
import re
import zlib
from base64 import b64encode
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from helixpipe.common.errors import UserError
from helixpipe.common.files import whole_file
from helixpipe.draw.page_data import COLLECTIVE_KINDS, MESSAGE_KINDS, circle_data, knobs, panels_data, takes_no_time
from helixpipe.draw.style import (
    IDLE_COLOUR,
    KIND_STYLES,
    LANE_COLOUR,
    LANE_STYLES,
    TRANSFER_STYLES,
    scale_note,
)
from helixpipe.lowering.validate import CircleError
from helixpipe.program.timeline import Timeline
from helixpipe.simulate.simulator import Simulation

SCRIPTS = (
    "words.js",
    "simulate.js",
    "panels.js",
    "chart.js",
    "marks.js",
    "details.js",
    "input.js",
    "search.js",
    "table.js",
    "controls.js",
    "main.js",
)
LARGE = 200_000
"""Characters of data above which they are compressed."""


def draw_html(shown: Sequence[Timeline | Simulation], path: str | Path) -> None:
    """Write one self-contained page: zoom, pan, and what each op was and waited for.

    Raises UserError when there is nothing to show or the file cannot be written.
    """
    with whole_file(path) as temporary:
        temporary.write_text(html_page(shown), encoding="utf-8")


def html_page(shown: Sequence[Timeline | Simulation]) -> str:
    """Return the page that `draw_html` writes. It loads nothing: its policy forbids it."""
    if not shown:
        raise UserError("there is no timeline to draw.")
    timelines = [each.timeline if isinstance(each, Simulation) else each for each in shown]
    data = {
        "scale": scale_note(timelines),
        "knobs": knobs([each for each in shown if isinstance(each, Simulation)]),
        "panels": panels_data(shown),
    }
    return _page(" / ".join(timeline.title for timeline in timelines), data)


def draw_circle(error: CircleError, path: str | Path) -> None:
    """Write such a page of a program that cannot run. Raises UserError when the file cannot be written."""
    with whole_file(path) as temporary:
        temporary.write_text(circle_page(error), encoding="utf-8")


def circle_page(error: CircleError) -> str:
    """Return a page that shows why a program cannot run."""
    return _page(error.program.schedule, {"scale": "", "knobs": [], "panels": [circle_data(error)]})


def scripts(names: Sequence[str] = SCRIPTS) -> str:
    """Return the page's programs, as one."""
    return "\n".join(_part(name) for name in names)


def _page(title: str, data: dict[str, Any]) -> str:
    styles = {
        "kinds": {kind: {"name": style.name, "colour": style.colour} for kind, style in KIND_STYLES.items()},
        "lanes": [{"lane": lane, "name": style.name, "colour": style.colour} for lane, style in LANE_STYLES.items()],
        "links": [TRANSFER_STYLES[kind]._asdict() for kind in MESSAGE_KINDS],
        "sharing": [TRANSFER_STYLES[kind]._asdict() for kind in COLLECTIVE_KINDS if not takes_no_time(kind)],
        "lane": LANE_COLOUR,
        "idle": IDLE_COLOUR,
    }
    text = json.dumps(styles | data, separators=(",", ":"))
    packed = len(text) > LARGE
    fields = {
        "TITLE": html.escape(title),
        "STYLE": _part("page.css"),
        "SCRIPT": scripts(),
        "ENCODING": "deflate" if packed else "none",
        # `<` could end the script element or open a comment in it; JSON may write it as an escape wherever it occurs.
        "DATA": b64encode(zlib.compress(text.encode(), 9)).decode() if packed else text.replace("<", "\\u003c"),
    }
    return re.sub(r"@@(TITLE|STYLE|SCRIPT|ENCODING|DATA)@@", lambda match: fields[match[1]], _part("page.html"))


def _part(name: str) -> str:
    return (resources.files("helixpipe.draw") / "web" / name).read_text(encoding="utf-8")
