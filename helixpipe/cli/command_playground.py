"""`helixpipe playground`: the planning core in a browser, served to this machine or written as static files."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from helixpipe.cli.playground_options import PlaygroundOptions
from helixpipe.common.flags import dataclass_from_namespace
from helixpipe.common.json_values import parse_json
from helixpipe.planning.catalogue import Catalogue


def run(namespace: argparse.Namespace) -> None:
    from helixpipe.playground.serve import ADDRESS, server  # slow to import: only who serves waits for it

    options = dataclass_from_namespace(PlaygroundOptions, namespace)
    if options.output is not None:
        write(Path(options.output), namespace.catalogue, options.pyodide)
        print(f"wrote {options.output}; any web server shows it")
        return
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), namespace.catalogue, options.pyodide)
        with server(Path(folder), options.port) as serving:
            print(f"http://{ADDRESS}:{serving.server_port}/ (Ctrl-C ends it)", flush=True)
            serving.serve_forever()


def write(folder: Path, catalogue: Catalogue, package: str | None = None) -> None:
    """Write the playground's files. package: see `pyodide_files`. Raises UserError."""
    from helixpipe.playground.pyodide import pyodide_files
    from helixpipe.playground.site import write_site

    write_site(folder, pyodide_files(package), first(catalogue))


def first(catalogue: Catalogue) -> dict[str, Any]:
    """Return what the page can show before its Python has started: the choices, and the steps of its example."""
    from helixpipe.cli.answers import Answers
    from helixpipe.playground.site import example

    answers = Answers(catalogue)
    shown = []
    for question in example():
        text = json.dumps(question)
        shown.append(
            {"question": question, "answer": parse_json(answers.answer(text)), "bound": parse_json(answers.bound(text))}
        )
    return {"choices": parse_json(answers.choices()), "first": shown}
