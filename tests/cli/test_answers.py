"""What the playground's page is answered: the command's figures, when everything runs, and why an order cannot run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from helixpipe.cli.answers import Answers, moved
from helixpipe.common.errors import ProgramError
from helixpipe.program.text import parse_cell
from schedules import CATALOGUE
from tests.playground.questions import command_line, random_questions
from tests.selection import graded


@pytest.fixture(scope="module")
def answers() -> Answers:
    return Answers(CATALOGUE)


def question(schedule: str, flags: str, costs: str = "", moves: list[list[int]] | None = None) -> dict[str, Any]:
    return {"schedule": schedule, "flags": flags.split(), "costs": costs.split(), "moves": moves or []}


def asked(answers: Answers, *words: Any) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(answers.answer(json.dumps(question(*words))))
    return told


def row(told: dict[str, Any], rank: int) -> list[str]:
    return [cell for cell, where in zip(told["ops"]["cell"], told["ops"]["rank"], strict=True) if where == rank]


CORE = ("gpipe", "1f1b", "zb1p", "seq1f1b", "helix", "weipipe")
SETTINGS = graded(random_questions(24, seed=7), lambda each: each["schedule"] in CORE)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda each: each["schedule"])
def test_figures_are_the_command_lines(answers: Answers, setting: dict[str, Any]) -> None:
    told, expected = json.loads(answers.answer(json.dumps(setting))), command_line(setting)
    if "error" in expected:
        assert told == expected
        return
    assert told["figures"] == {key: expected[key] for key in told["figures"]}
    assert told["figures"].keys() >= {"makespan", "bubble_ratio", "busy", "peak_activation"}
    assert max(told["ops"]["end"]) <= told["figures"]["makespan"] * (1 + 1e-8)


def test_ops_stand_in_their_ranks_order_with_their_times(answers: Answers) -> None:
    told = asked(answers, "1f1b", "-p 2 -m 3 -L 2", "--piece-times attn=1 --message-time 0.5")
    assert row(told, 0) == ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"]
    start, end = (dict(zip(told["ops"]["cell"], told["ops"][name], strict=True)) for name in ("start", "end"))
    assert (start["0F0"], end["0F0"], start["1F0"], end["1B0"], start["0B0"]) == (0, 1, 1.5, 4.5, 5)
    assert ["activation", 0, 1, 1, 1.5, "0F0", "1F0"] in told["transfers"]
    assert max(level for _, level in told["memory"]["ranks"][0]) == told["figures"]["peak_activation"][0]


def test_an_order_that_was_changed_is_simulated_anew(answers: Answers) -> None:
    before = asked(answers, "1f1b", "-p 4 -m 8 -L 8")
    after = asked(answers, "1f1b", "-p 4 -m 8 -L 8", "", [[3, 2, 1]])
    assert row(before, 3)[:4] == ["3F0", "3B0", "3F1", "3B1"] and row(after, 3)[:4] == ["3F0", "3F1", "3B0", "3B1"]
    assert after["figures"]["makespan"] > before["figures"]["makespan"]
    assert asked(answers, "1f1b", "-p 4 -m 8 -L 8", "", [[3, 2, 1], [3, 1, 2]])["ops"] == before["ops"]


def test_an_order_that_hangs_is_explained(answers: Answers) -> None:
    told = asked(answers, "1f1b", "-p 2 -m 2 -L 2", "", [[0, 2, 1], [1, 2, 0], [1, 3, 1]])
    assert (row(told, 0), row(told, 1)) == (["0F0", "0B0", "0F1", "0B1"], ["1F1", "1B1", "1F0", "1B0"])
    cells, circle = told["ops"]["cell"], told["circle"]
    assert "wait" in told["error"] and "edited.json" not in told["error"]
    assert [after for _, after, _ in circle] == [before for before, _, _ in circle[1:]] + [circle[0][0]]
    assert {cells[op] for op, _, _ in circle} >= {"1F0", "0B0"}
    assert told["ended"][cells.index("0F0")] == 1 and told["ended"][circle[0][0]] == 0
    assert "start" not in told["ops"]


def test_mistakes_are_sentences(answers: Answers) -> None:
    assert "did you mean" in asked(answers, "1f1", "-p 4")["error"]
    assert asked(answers, "1f1b", "-p 4 -m 4,8")["error"].startswith("the page shows one size")
    assert "more than" in asked(answers, "gpipe", "-p 8 -m 4096")["error"]
    assert "no op to move" in asked(answers, "1f1b", "-p 2 -m 2", "", [[0, 9, 1]])["error"]
    assert "unknown" in asked(answers, "1f1b", "--rank 4")["error"]


@pytest.mark.parametrize("move", [(4, 0, 0), (0, 3, 0), (0, 0, 3), (-1, 0, 0), (0, -1, 0)])
def test_moves_are_within_a_rank(move: tuple[int, int, int]) -> None:
    ranks = tuple(tuple(parse_cell(f"0F{number}") for number in range(3)) for _ in range(4))
    with pytest.raises(ProgramError):
        moved(ranks, [move])


def test_files_are_those_of_the_command(answers: Answers, tmp_path: Any) -> None:
    text = json.dumps(question("1f1b", "-p 2 -m 4", "", [[1, 2, 1]]))
    program = tmp_path / "mine.json"
    program.write_text(json.loads(answers.file(text, ".json"))["content"])
    told = json.loads(answers.answer(text))
    assert command_line({"schedule": str(program), "flags": [], "costs": []})["makespan"] == told["figures"]["makespan"]
    assert json.loads(answers.file(text, ".csv"))["content"].splitlines()[1].startswith("1F0,1F1,1B0")
    assert "<title>1f1b</title>" in json.loads(answers.file(text, ".html"))["content"]
    assert "cannot hold" in json.loads(answers.file(json.dumps(question("helix", "-p 2 -m 4")), ".csv"))["error"]


def test_the_bound_is_the_certificates() -> None:
    one = question("1f1b", "-p 4 -m 8 -L 8 --certify", "--message-time 0.5")
    certified = command_line(one)["certified"]
    bound = json.loads(Answers(CATALOGUE).bound(json.dumps(one)))
    assert bound == certified
    assert (bound["bound"], bound["gap"]) == (399, pytest.approx(404 / 399 - 1))


def test_choices_are_the_commands(answers: Answers) -> None:
    choices = json.loads(answers.choices())
    assert [each["name"] for each in choices["schedules"]] == list(CATALOGUE)
    assert choices["kinds"]["F"]["colour"].startswith("#")
    assert {each["name"]: each["virtual"] for each in choices["schedules"]}["hanayo"]
