"""Run the `helixpipe` command in this process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from schedules import command as cli


def run(capsys: pytest.CaptureFixture[str], command: str) -> str:
    """Return what a command that must succeed prints."""
    assert cli.main(command.split()) == 0
    output = capsys.readouterr()
    assert output.err == ""
    return output.out


def run_json(capsys: pytest.CaptureFixture[str], command: str) -> dict[str, Any]:
    """The object that it prints with --json."""
    result: dict[str, Any] = json.loads(run(capsys, command + " --json"))
    return result
