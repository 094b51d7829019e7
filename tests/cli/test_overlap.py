"""`--overlap-tp-comm` of simulate, memory and plan."""

from __future__ import annotations

import json
from typing import Any

import pytest

from schedules.command import main

MODEL = "--model llama3-8b --tensor-parallel 8 -p 2 -m 4 -L 8 --seq-length"


def printed(capsys: pytest.CaptureFixture[str], arguments: str) -> Any:
    assert main([*arguments.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("schedule", "length", "fastest"),
    [
        ("1f1b", 16384, "halves"),
        ("seq1f1b -k 2", 16384, "halves"),
        ("seq1f1b -k 8", 16384, "pairs"),
        ("1f1b", 512, "pairs"),
    ],
)
def test_auto_is_the_fastest_one(capsys: pytest.CaptureFixture[str], schedule: str, length: int, fastest: str) -> None:
    found = {
        way: printed(capsys, f"simulate {schedule} {MODEL} {length} --overlap-tp-comm {way}")["makespan"]
        for way in ("off", "halves", "pairs", "auto")
    }
    assert found["auto"] == found[fastest] == min(found.values())
    assert found["halves"] != found["off"]


def test_without_the_flag_nothing_runs_in_halves(capsys: pytest.CaptureFixture[str]) -> None:
    plain = printed(capsys, f"simulate 1f1b {MODEL} 8192")
    assert plain == printed(capsys, f"simulate 1f1b {MODEL} 8192 --overlap-tp-comm off")


def test_memory_is_that_of_halves(capsys: pytest.CaptureFixture[str]) -> None:
    """Queries, keys and values are tensors of their own in halves, as with RoPE in any case; of rows that are gathered
    for a weight's gradient, and of the buffer that they are gathered into, half is there at a time."""
    whole = printed(capsys, f"memory 1f1b {MODEL} 8192")["memory"][0]["total"]
    halves = printed(capsys, f"memory 1f1b {MODEL} 8192 --overlap-tp-comm halves")["memory"][0]["total"]
    assert whole - halves == 2 * (8192 * 4096 * 2 // 2)


def test_the_report_says_what_is_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    for way, setup, hidden in (
        (
            "off",
            "sequence parallel, pipeline",
            "each backward hides those of layers split by columns, a ring its messages, and nothing else",
        ),
        (
            "pairs",
            "sequence parallel, forwards beside backwards, pipeline",
            "those of a pair hide most behind each other",
        ),
        ("halves", "sequence parallel, tokens in halves, pipeline", "hides most behind the other half of its tokens"),
    ):
        assert main(f"simulate 1f1b {MODEL} 8192 --overlap-tp-comm {way}".split()) == 0
        text = capsys.readouterr().out
        assert setup in text and hidden in text


def test_plan_gives_the_flag_where_it_helps(capsys: pytest.CaptureFixture[str]) -> None:
    question = "plan --model llama3-8b --seq-length 8192 --gpus 8 --global-batch-size 8 --tensor-parallel 4"
    question += " --schedule 1f1b --overlap-tp-comm"
    for way, given in (("auto", True), ("off", False)):
        assert main(f"{question} {way}".split()) == 0
        assert ("--overlap-tp-comm halves" in capsys.readouterr().out) == given
