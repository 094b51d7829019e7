"""Writes the playground as a folder of static files, for `helixpipe playground` and for any web server.

index.html, *.js, style.css   the page, from web/
python.zip                    the planning core as it is here
first.json                    what the page shows until its Python has started: choices, and the first steps
pyodide/                      Python for browsers
"""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import helixpipe
from helixpipe.common.json_values import parse_json
from helixpipe.playground.pyodide import FILES

CORE = (
    *("common", "compiled", "program", "costs", "lowering", "simulate", "certify", "planning", "draw", "playground"),
    *("adapt", "cli"),
)
"""Folders of helixpipe that go into the browser: those without torch."""


def write_site(folder: Path, pyodide: Path, first: Mapping[str, object]) -> None:
    """Write the files. pyodide: the folder with `FILES`. first: the content of first.json."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in (resources.files("helixpipe.playground") / "web").iterdir():
        (folder / part.name).write_bytes(part.read_bytes())
    (folder / "first.json").write_text(json.dumps(first), encoding="utf-8")
    write_core(folder / "python.zip")
    (folder / "pyodide").mkdir(exist_ok=True)
    for name in FILES:
        shutil.copyfile(pyodide / name, folder / "pyodide" / name)


def example() -> list[dict[str, Any]]:
    """Return the questions of the steps that the page shows first."""
    text = (resources.files("helixpipe.playground") / "web" / "example.json").read_text(encoding="utf-8")
    questions: list[dict[str, Any]] = parse_json(text)
    return questions


def write_core(path: Path) -> None:
    """Write the planning core's sources as an archive."""
    package = Path(helixpipe.__file__).parent
    schedules = package.parent / "schedules"
    sources = [package / "__init__.py", *schedules.glob("*.py")]
    for name in CORE:
        sources += (package / name).rglob("*.py")
    sources += (package / "draw" / "web").iterdir()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for source in sorted(sources):
            archive.write(source, source.relative_to(package.parent))
