"""`helixpipe simulate`, `memory` and `draw` with documents of all lengths."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from schedules import command as cli
from tests.cli.commands import run, run_json

MODEL = "--model infinipipe-7b --hardware a800 -L 4"
TWO = (
    "--lengths github --documents 24 --max-length 16384 --infinipipe-chunks 4 "
    f"{MODEL} -p 2 --tensor-parallel 2 --nodes 1"
)
GITHUB = "--lengths github --documents 24 --max-length 16384"


def test_simulate_says_what_the_documents_became(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, f"simulate seq1f1b {TWO}")
    batch, step = found["documents"], found["step"]
    assert batch["documents"] == step["global_batch_size"] == 24 and batch["longest"] <= 16384
    assert len(batch["pipelines"]) == step["data_parallel"] == 2 and sum(batch["pipelines"]) == pytest.approx(2)
    assert 0 < batch["tokens_of_pipeline"] < batch["tokens"] and batch["chunks"] >= batch["rows"]
    assert batch["spread_of_time"] < 0.2 and batch["padding_or_cut"] < 2 * batch["rows"]
    rate = batch["tokens"] / step["step_time"] / step["gpus"]
    assert step["tokens_per_second_per_gpu"] == pytest.approx(rate)
    again = run_json(capsys, f"simulate seq1f1b {TWO}")
    assert again == found


def test_packing_beats_what_is_compared_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    common = f"{GITHUB} {MODEL} -p 4 --nodes 1 --gpus-per-node 4"
    ours = run_json(capsys, f"simulate seq1f1b --infinipipe-chunks 8 {common}")
    for how in ("pad", "whole", "concatenate", "isolate"):
        other = run_json(capsys, f"simulate 1f1b --document-packing {how} {common}")
        assert other["documents"]["most_chunks"] == 1 and other["makespan"] > 1.04 * ours["makespan"]
    fixed = run_json(capsys, f"simulate seq1f1b --infinipipe-split fixed --infinipipe-chunks 4 {common}")
    assert fixed["documents"]["most_chunks"] == 4 and fixed["documents"]["spread_of_tokens"] < 0.3


@pytest.mark.parametrize("how", ["infinipipe", "pad", "whole"])
def test_chunks_are_multiples_of_what_ranks_share(capsys: pytest.CaptureFixture[str], how: str) -> None:
    parallel = "-p 2 --tensor-parallel 2 --context-parallel 2 --nodes 1"
    chunks = "--infinipipe-chunks 3" if how == "infinipipe" else ""
    command = f"simulate seq1f1b --lengths github --documents 6 --max-length 5000 {chunks} --document-packing {how}"
    found = run_json(capsys, f"{command} {MODEL} {parallel}")
    assert all(tokens % 4 == 0 for tokens in found["documents"]["chunk_tokens"])


def test_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lengths = tmp_path / "lengths"
    lengths.write_text("\n".join(map(str, [300, 80, 7, 7, 20, 33, 900, 64])))
    out = run(capsys, f"simulate seq1f1b --lengths {lengths} --max-length 500 -p 2 --infinipipe-chunks 3")
    assert f"7 documents from {lengths}, 511 tokens, the longest 300; 1 left out" in out
    assert "up to 3 in one" in out and "spread (standard deviation over mean of all chunks): time" in out
    out = run(capsys, f"memory seq1f1b --lengths {lengths} {MODEL} -p 2")
    assert "Memory of each GPU" in out
    assert run(capsys, f"memory seq1f1b --lengths {lengths} {MODEL} -p 2 --cuda-graphs auto") == out  # rows run in none
    picture = tmp_path / "p.json"
    run(capsys, f"draw seq1f1b 1f1b --lengths {lengths} --document-packing whole -p 2 -o {picture}")
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--max-length 9", "--max-length needs --lengths"),
        ("--infinipipe-chunks 4", "--infinipipe-chunks needs --lengths"),
        ("--document-packing pad", "--document-packing needs --lengths"),
        ("--lengths github -m 8", "-m 8 is for sequences that are all alike"),
        ("--lengths github --pipe-sp-splits 4", "--pipe-sp-splits 4 is for sequences .* give --infinipipe-chunks"),
        ("--lengths github --model infinipipe-7b --seq-length 9", "with --lengths give --max-length"),
        ("--lengths github -v 2", "-v 2 cannot be given beside --lengths"),
        ("--lengths github --documents 3 --infinipipe-chunks 2 --chunk-alignment 0", "--chunk-alignment"),
        (
            "--lengths github --model infinipipe-7b -p 2 --tensor-parallel 4 --nodes 1 --chunk-alignment 6",
            "--chunk-alignment 6 must be a multiple of 4",
        ),
        ("--lengths nowhere.txt", "nowhere.txt is no name of a histogram"),
        ("--lengths github --model infinipipe-7b --nodes 1 -p 2 --documents 3", "3 documents a step are too few for 4"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], flags: str, said: str) -> None:
    assert cli.main(f"simulate seq1f1b {flags}".split()) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert re.search(said, error), error


def test_a_schedule_of_whole_microbatches_and_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    size = "--lengths github --documents 20 --infinipipe-chunks 4"
    assert all(run_json(capsys, f"simulate {name} {size}")["chunks"] > 1 for name in ("1f1b", "zbv", "weipipe"))
    program = tmp_path / "p.json"
    run(capsys, f"simulate gpipe -p 2 -m 2 --save-program {program}")
    assert cli.main(f"simulate {program} --lengths github".split()) == 2
    assert "leave --lengths out" in capsys.readouterr().err
