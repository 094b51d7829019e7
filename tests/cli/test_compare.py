"""`helixpipe compare`: schedules side by side."""

from __future__ import annotations

import json
from typing import Any

import pytest

from schedules import CATALOGUE, command


def compared(capsys: pytest.CaptureFixture[str], words: str) -> list[dict[str, Any]]:
    assert command.main(["compare", *words.split(), "--json"]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return rows


def simulated(capsys: pytest.CaptureFixture[str], words: str) -> dict[str, Any]:
    assert command.main(["simulate", *words.split(), "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_all_schedules_are_compared_at_one_size(capsys: pytest.CaptureFixture[str]) -> None:
    rows = compared(capsys, "-p 2 -m 4 -k 1,2 --helix-folds 2")
    assert {row["schedule"] for row in rows} == {name for name, each in CATALOGUE.items() if not each.one_rank}
    assert {row["chunks"] for row in rows if row["schedule"] == "seq1f1b"} == {1, 2}
    assert {row["chunks"] for row in rows if row["schedule"] == "1f1b"} == {1}
    times = [row["time"] for row in rows if row["time"] is not None]
    assert times == sorted(times)
    by_name = {row["schedule"]: row for row in rows if row["chunks"] == 1}
    for name in ("1f1b", "zbv"):
        alone = simulated(capsys, f"{name} -p 2 -m 4 -L 4")
        assert by_name[name]["time"] == alone["makespan"] and by_name[name]["bubble"] == pytest.approx(
            alone["bubble_ratio"]
        )


def test_named_schedules_of_several_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    rows = compared(capsys, "1f1b interleaved-1f1b -p 2 -m 4,8 -v 2,4")
    sizes = [(row["schedule"], row["microbatches"], row["virtual_stages"]) for row in rows]
    wanted = [("interleaved-1f1b", m, v) for m in (4, 8) for v in (2, 4)]
    assert sorted(sizes) == sorted([("1f1b", 4, 1), ("1f1b", 8, 1), *wanted])


def test_a_model_has_seconds_bytes_and_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    rows = compared(capsys, "1f1b gpipe --model llama2-7b -p 8 -m 32")
    assert [(row["schedule"], row["fits"]) for row in rows] == [("1f1b", True), ("gpipe", False)]
    assert rows[0]["memory"] < 80 < rows[1]["memory"]
    assert command.main(["compare", "1f1b", "gpipe", "--model", "llama2-7b", "-p", "8", "-m", "32"]) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert "time (s)" in head and "memory (GiB)" in head
    assert first.split()[0] == "1f1b" and first.split()[-1] == "yes" and second.split()[-1] == "no"


def test_what_a_schedule_cannot_do_is_said_below_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["compare", "1f1b", "gpipe", "interleaved-1f1b", "-p", "4", "-m", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and lines[-1].startswith("interleaved-1f1b: ") and "4 and 8" in lines[-1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("1f1b -m 8,x", "-m: 'x' is not a whole number"),
        ("1f1b -m 0", "-m 0 must be at least 1."),
        ("interleaved-1f1b -m 5", "interleaved-1f1b: "),
        ("1f2b", "did you mean"),
    ],
)
def test_one_sentence(capsys: pytest.CaptureFixture[str], words: str, says: str) -> None:
    assert command.main(["compare", *words.split()]) == command.USER_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
