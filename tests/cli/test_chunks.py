"""`helixpipe simulate`, `memory` and `draw` with sequences cut into chunks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from schedules import CATALOGUE, Shape, build
from schedules import command as cli
from tests.cli.commands import run, run_json

MODEL = "--model seq1f1b-2.7b --hardware a100-80 -p 8 -m 8"


def test_without_attention_chunks_are_equally_long(capsys: pytest.CaptureFixture[str]) -> None:
    for chunks in (3, 4):
        result = run_json(capsys, f"simulate seq1f1b -p 4 -m 8 -k {chunks} --piece-times mlp=1")
        assert (result["chunks"], result["bubble_time"]) == (chunks, 3 * 3 * 2 / chunks)
        assert result["chunk_shares"] == [1 / chunks] * chunks
        assert "chunk_lengths" not in result
    assert run_json(capsys, "simulate seq1f1b -p 4 -m 8 --pipe-sp-splits 4 --piece-times mlp=1") == result


def test_lengths_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    result = run_json(capsys, "simulate seq1f1b -p 2 -m 4 -L 2 --chunk-lengths 5,3,2 --piece-times mlp=1,attn=1")
    assert result["chunk_lengths"] == [5, 3, 2]
    assert result["chunk_times"] == pytest.approx([6 * (0.5 + 0.25), 6 * (0.3 + 0.39), 6 * (0.2 + 0.36)])
    text = run(capsys, "simulate seq1f1b -p 2 -m 4 -L 2 --chunk-lengths 5,3,2 --piece-times mlp=1,attn=1")
    assert (
        "chunk    tokens  time in all stages together\n    0         5       4.5\n    1         3      4.14\n" in text
    )


def test_costs_given_by_hand_are_balanced(capsys: pytest.CaptureFixture[str]) -> None:
    """By default, too: the chunks take equally long, so the bubble is the formula's and seq1f1b beats 1f1b."""
    size = "-p 4 -m 8 -L 8 -k 4"
    slow, fast, usual = (
        run_json(capsys, f"simulate seq1f1b {size} {strategy}")
        for strategy in ("--pipe-sp-strategy average", "--pipe-sp-strategy uniform_comp", "")
    )
    assert slow["chunk_shares"] == [0.25] * 4
    assert max(fast["chunk_times"]) == pytest.approx(min(fast["chunk_times"]), rel=1e-5)
    assert usual == fast
    whole = run_json(capsys, "simulate 1f1b -p 4 -m 8 -L 8")
    assert usual["bubble_time"] == pytest.approx(whole["bubble_time"] / 4, rel=1e-4)
    assert usual["makespan"] < whole["makespan"] < slow["makespan"]


def test_the_text_says_shares_where_nothing_says_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "simulate seq1f1b -p 2 -m 4 -L 2 -k 2 --piece-times attn=1")
    cut = 100 / 2**0.5  # half of the pairs of tokens are before it
    assert f"chunk     share  time in all stages together\n    0   {cut:.2f} %" in text
    assert "chunk " not in run(capsys, "simulate seq1f1b -p 2 -m 4 -L 2 -k 1 --piece-times attn=1")


def test_a_file_keeps_the_shares_it_was_simulated_with(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """They are no tokens, so training takes it at any sequence length."""
    path = tmp_path / "mine.json"
    shares = run_json(capsys, f"simulate seq1f1b -p 2 -m 2 -L 4 -k 2 --save-program {path}")["chunk_shares"]
    program = build(str(path), Shape(2, 2, 4))
    assert program.chunk_lengths is None
    lengths = program.workload.in_tokens(1000).lengths
    assert lengths is not None and lengths == pytest.approx([1000 * share for share in shares], abs=1)
    assert run_json(capsys, f"simulate {path} --piece-times mlp=1")["chunk_shares"] == shares


def test_a_model_balances_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    result = run_json(capsys, f"simulate seq1f1b {MODEL} -k 4")
    assert sum(result["chunk_lengths"]) == 32768 and all(length % 64 == 0 for length in result["chunk_lengths"])
    assert max(result["chunk_times"]) < 1.01 * min(result["chunk_times"])
    average = run_json(capsys, f"simulate seq1f1b {MODEL} -k 4 --pipe-sp-strategy average")
    assert average["chunk_lengths"] == [8192] * 4
    assert result["step"]["step_time"] < 0.9 * average["step"]["step_time"]
    text = run(capsys, f"simulate seq1f1b {MODEL} -k 4")
    assert "chunk    tokens  time in all stages together (s)\n" in text and "Warning" not in text
    assert "Warning: 32 chunks of 1024 tokens of a microbatch are too short to keep a100-80 busy" in run(
        capsys, f"simulate seq1f1b {MODEL} -k 32"
    )


def test_the_best_number_of_chunks(capsys: pytest.CaptureFixture[str]) -> None:
    small = f"{MODEL} --seq-length 8192"
    best = run_json(capsys, f"simulate seq1f1b {small} --pipe-sp-splits auto")
    tried = [run_json(capsys, f"simulate seq1f1b {small} -k {k}") for k in (1, 2, 3, 4)]
    assert best == min(tried, key=lambda result: result["makespan"])
    assert run_json(capsys, "simulate seq1f1b -p 2 -m 2 --pipe-sp-splits auto --message-time 1000")["chunks"] == 1
    # 64k tokens do not fit whole
    assert run_json(capsys, f"memory 1f1b {MODEL} --seq-length 65536")["fits"] is False
    assert run_json(capsys, f"memory seq1f1b {MODEL} --seq-length 65536 --pipe-sp-splits auto")["fits"] is True


@pytest.mark.parametrize("name", [name for name, schedule in CATALOGUE.items() if schedule.chunks])
def test_schedules_made_for_chunks_find_their_number(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The same as with auto, in every command, which says how many; other schedules beside them stay whole."""
    size = f"{name} -p 2 -m 4 -L 4 --op-overhead 0.1"
    found = run_json(capsys, f"simulate {size} --pipe-sp-splits auto")
    assert run_json(capsys, f"simulate {size}") == found and found["chunks"] > 1
    assert run_json(capsys, f"simulate {size} -k 1")["chunks"] == 1
    drawn = run_json(capsys, f"draw 1f1b {size} -o {tmp_path / 'x.json'}")["simulations"]
    assert [each["chunks"] for each in drawn] == [1, found["chunks"]]
    rows: Any = run_json(capsys, f"simulate 1f1b {size}")
    assert {row["schedule"]: row["chunks"] for row in rows} == {"1f1b": 1, name: found["chunks"]}
    for command in (f"simulate {size}", f"draw {size} -o {tmp_path / 'x.svg'}"):
        assert f"{found['chunks']} chunks" in run(capsys, command)
    model = f"{name} {MODEL} --seq-length 8192"
    assert re.search(r"\b\d+ chunks\b", run(capsys, f"memory {model}"))
    assert run_json(capsys, f"memory {model}") == run_json(capsys, f"memory {model} --pipe-sp-splits auto")


def test_schedules_of_whole_sequences_run_chunk_by_chunk(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    output = tmp_path / "both.png"
    for flags in ("-k 3", "--chunk-lengths 4,3,2", "--pipe-sp-splits auto"):
        result = run_json(capsys, f"draw 1f1b zbv seq1f1b -p 2 -m 2 -L 4 {flags} -o {output}")
        assert all(each["chunks"] > 1 for each in result["simulations"])
        assert len({each["chunks"] for each in result["simulations"]}) == 1 or flags.endswith("auto")
    assert output.stat().st_size > 1000


def test_a_file_takes_lengths_from_the_flags(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    size = "-L 4 --chunk-lengths 5,3,2"
    original = run_json(capsys, f"simulate seq1f1b -p 2 -m 4 {size}")
    run(capsys, f"simulate seq1f1b -p 2 -m 4 -k 3 --save-program {path}")
    assert {**run_json(capsys, f"simulate {path} {size}"), "schedule": "seq1f1b"} == original
    beside = run_json(capsys, f"draw 1f1b {path} {size} -o {tmp_path / 'both.json'}")["simulations"]
    assert [each["chunks"] for each in beside] == [3, 3]
    for command, said in (
        (f"simulate {path} --chunk-lengths 5,3", "--chunks 2 does not fit"),
        (f"simulate {path} --pipe-sp-splits auto", f"finds a number of chunks, but {path} has its own; leave it out."),
    ):
        assert cli.main(command.split()) == 2
        assert said in capsys.readouterr().err


def test_lengths_that_nothing_takes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    whole, output = tmp_path / "whole.csv", tmp_path / "x.json"
    run(capsys, f"simulate 1f1b -p 2 -m 4 --save-program {whole}")
    assert cli.main(f"draw {whole} -k 3 -o {output}".split()) == 2
    assert f"-k 3 does not fit {whole}, whose chunks are 1." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("1f1b -k 0", "-k 0 must be at least 1."),
        ("1f1b --pipe-sp-strategy average", "--pipe-sp-strategy needs --pipe-sp-splits of 2 or more, or auto."),
        ("seq1f1b -k 3 --pipe-sp-splits 2", "the flags disagree: -k 3 chunks and --pipe-sp-splits 2 chunks."),
        ("seq1f1b -k 2 --pipe-sp-strategy even", "invalid choice: 'even'"),
        (f"seq1f1b {MODEL} --chunk-lengths 4,4", "add up to 8 tokens, but the sequence has 32768."),
        (f"seq1f1b {MODEL} -k 4 --seq-length 3", "--seq-length 3 is too short for 4 chunks of 1 tokens"),
        ("seq1f1b -k 0", "-k 0 must be at least 1."),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], command: str, said: str) -> None:
    assert cli.main(["simulate", *command.split()]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
