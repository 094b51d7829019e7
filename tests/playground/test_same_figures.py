"""The page's Python gives the figures of the command line: the same core, in WebAssembly."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from helixpipe.cli.answers import Answers
from helixpipe.playground.pyodide import FILES, cached
from schedules import CATALOGUE
from tests.playground.questions import command_line, random_questions

pytestmark = pytest.mark.skipif(
    shutil.which("node") is None or not all((cached() / name).is_file() for name in FILES),
    reason="there is no node or no Pyodide; tools/browser.sh fetches that",
)


def in_wasm(playground: Path, questions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    script = Path(__file__).with_name("run.mjs")
    done = subprocess.run(
        ["node", str(script), str(playground)], input=json.dumps(questions), capture_output=True, text=True, check=True
    )
    told: list[dict[str, Any]] = json.loads(done.stdout)
    return told


def close(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal, numbers to 1e-9 of themselves."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(close(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(close, one, other))
    if isinstance(one, float) or isinstance(other, float):
        return bool(one == pytest.approx(other, rel=1e-9, abs=1e-12))
    return bool(one == other)


@pytest.mark.thorough
def test_equal_to_the_command_line_on_200_random_settings(playground: Path) -> None:
    questions = random_questions(200, seed=34)
    told = in_wasm(playground, questions)
    answers, simulated = Answers(CATALOGUE), 0
    for question, each in zip(questions, told, strict=True):
        answer, bound, expected = each["answer"], each["bound"], command_line(question)
        if "error" in expected or "error" in answer:
            assert answer.get("error") == expected.get("error"), question
            continue
        figures = answer["figures"]
        assert close(figures, {key: expected[key] for key in figures}), question
        assert close(bound["bound"], json.loads(answers.bound(json.dumps(question)))["bound"]), question
        assert bound["bound"] <= figures["makespan"] * (1 + 1e-8)  # printed with nine digits
        simulated += 1
    assert simulated >= 120
