"""What a run says of itself before its first step."""

from __future__ import annotations

import sys
from pathlib import Path

import megatron.core
import pytest

from helixpipe import megatron as command
from megatron.pretrain.log.summary import (
    MOST_LINES,
    first_of,
    format_arguments,
    model_line,
    print_arguments,
    ranks_line,
    record_arguments,
    step_line,
)
from tests.training.helpers import config


def test_model_step_and_ranks_have_a_line_each() -> None:
    chosen = config(
        "--swiglu --group-query-attention --num-query-groups 2 --global-batch-size 16 --tensor-model-parallel-size 2",
        world=4,
    ).replace("data", padded_vocab_size=1024)
    assert model_line(chosen, 123456) == (
        "model: 123,456 parameters; 4 layers of width 64, gated MLP 128, 4 heads in 2 groups, LayerNorm, positions "
        "learned_absolute, vocabulary 1,024"
    )
    mixed = config("--position-embedding-type rope --window-size 7,0 --window-attn-skip-freq 4 --no-rope-freq 4")
    line = model_line(mixed.replace("data", padded_vocab_size=64), 1)
    assert line.endswith("positions rope, vocabulary 64, windows of 8 tokens in 3 layers, no RoPE in 1 layer")
    assert step_line(chosen, 4) == (
        "step: 16 sequences of 32 tokens, 4 microbatches of 2 on each of 2 data-parallel ranks"
    )
    assert ranks_line(chosen, (10, 2000)) == "ranks: tensor 2 x pipeline 1 x data 2, 10 to 2,000 parameters each"
    assert ranks_line(chosen, (10, 10)) == "ranks: tensor 2 x pipeline 1 x data 2, 10 parameters each"


def test_a_long_summary_is_cut_and_says_so() -> None:
    assert first_of(["x"] * MOST_LINES) == ["x"] * MOST_LINES
    cut = first_of([str(i) for i in range(MOST_LINES + 5)])
    assert len(cut) == MOST_LINES
    assert cut[-2:] == [str(MOST_LINES - 2), "(6 lines more, of `helixpipe simulate`)"]


def test_all_values_are_printed_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    print_arguments(config())
    assert capsys.readouterr().out == ""
    chosen = config("--log-arguments")
    print_arguments(chosen)
    assert capsys.readouterr().out == format_arguments(chosen) + "\n"


@pytest.mark.parametrize(
    ("version", "newer"), [("0.16.1", False), ("0.20.0", False), ("0.21.0rc1", True), ("1.0", True)]
)
def test_a_release_newer_than_all_that_were_tested_is_told_once(
    version: str, newer: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """By the trainer and by the command that runs NVIDIA's script, on the first rank alone."""
    monkeypatch.setattr(megatron.core, "__version__", version)
    told = f"WARNING: megatron-core {version} is newer than 0.20, the newest that was tested.\n" if newer else ""
    script = tmp_path / "script.py"
    script.write_text("")
    monkeypatch.setattr(command, "_install", lambda asked: None)
    monkeypatch.setattr(sys, "argv", ["command"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    for rank, wanted in (("0", told), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        assert command.main([str(script), "--pipeline-schedule", "1f1b"]) == 0
        print_arguments(config(rank=1, world=2) if rank == "1" else config())
        assert capsys.readouterr().err == wanted * 2


def test_all_values_are_written_beside_the_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_arguments(config())
    record_arguments(config(f"--save {tmp_path}", rank=1, world=2))
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().out == ""
    chosen = config(f"--save {tmp_path}")
    record_arguments(chosen)
    assert [file.name for file in tmp_path.iterdir()] == ["arguments.txt"]
    assert (tmp_path / "arguments.txt").read_text() == format_arguments(chosen) + "\n"
    assert "--log-arguments prints them" in capsys.readouterr().out
    record_arguments(config(f"--save {tmp_path}/nowhere"))
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(f"WARNING: cannot write {tmp_path}/nowhere/arguments.txt")
