"""The live state of a run: a JSON file that it writes every few steps, and what is shown of it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from helixpipe.common.errors import UserError
from helixpipe.common.files import whole_file
from helixpipe.common.json_values import parse_json

FILE = "live.json"

LINES = 20
"""Lines that are kept of what was found and done."""


@dataclass(frozen=True)
class SlowPart:
    """A rank, link or rank's copies. speed: of its first speed."""

    name: str
    speed: float


@dataclass(frozen=True)
class Live:
    """The state of a run after a step.

    step, steps: done, and to do in all. seconds: of the last step that was timed, from its first op to its last.
    bubble: the share of it in which ranks ran no op. cost: how many times as long a step takes as at first. plan: what
    orders the steps, and since which step. slow: parts that are not as at first. lines: what was found and done, the
    last one last. updated: when this was written, in seconds since 1970.
    """

    step: int
    steps: int
    seconds: float
    bubble: float
    cost: float
    plan: str
    since: int
    loss: float | None = None
    slow: Sequence[SlowPart] = ()
    lines: Sequence[str] = ()
    updated: float = field(default_factory=time.time)

    def save(self, folder: str | Path) -> None:
        """Write the state into a folder, whole or not at all. Raises UserError."""
        with whole_file(Path(folder) / FILE) as path:
            path.write_text(json.dumps(asdict(self)), encoding="utf-8")


def load(folder: str | Path) -> Live:
    """Read the state that a run has written into a folder. Raises UserError where there is none."""
    path = Path(folder) / FILE
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(
            f"{path} cannot be read ({reason}): give the folder that a run was started with as --save or --watch-dir."
        ) from None
    try:
        values: Any = parse_json(text)
        values["slow"] = [SlowPart(**each) for each in values["slow"]]
        return Live(**values)
    except (ValueError, TypeError, KeyError):
        raise UserError(f"{path} is not the state of a run.") from None
