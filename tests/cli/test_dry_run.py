"""`helixpipe dry-run`: ranks of a job on the fake device, what it prints of them, and a user's mistakes."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

import pytest

from helixpipe.cli import command_dry_run
from helixpipe.cli.command_dry_run import _split
from helixpipe.common.errors import UserError
from helixpipe.costs.verdict import MemoryVerdict
from helixpipe.fake_cuda.report import RankReport, StepCount
from helixpipe.fake_cuda.sequences import Calls, GroupCall
from schedules import command

FLAGS = (
    "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel --bf16 --lr 1e-3 "
    "--pipeline-schedule 1f1b --num-layers 4 --hidden-size 128 --num-attention-heads 8 --seq-length 256 "
    "--max-position-embeddings 256 --micro-batch-size 1 --global-batch-size 128 --train-iters 50 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 1000"
)
JOB = FLAGS.split()


@pytest.mark.thorough
def test_ranks_of_a_job_that_this_host_could_not_run(capfd: pytest.CaptureFixture[str]) -> None:
    """256 GPUs: the first rank and one of the last pipeline rank, whose data-parallel peers are elsewhere."""
    assert command.main(["dry-run", "--world-size", "256", "--json", "--", *JOB, "--ranks", "0,255"]) == 0
    figures = json.loads(capfd.readouterr().out)
    assert figures["differences"] == []
    first, last = figures["ranks"]
    assert (first["rank"], first["pipeline_rank"], last["rank"], last["pipeline_rank"]) == (0, 0, 255, 1)
    for rank in (first, last):
        kept = sum(rank["predicted"][kind] for kind in ("weights", "gradients", "optimizer"))
        assert 0.98 * kept < rank["allocated"] < 1.1 * kept
        assert rank["peak"] > rank["allocated"] > rank["allocated_before_steps"] > 0
        assert rank["unexpected_waits"] == {}
        calls = {call["kind"]: call for call in rank["calls"] if call["dtype"] == "BFloat16"}
        assert (calls["send"]["number"], calls["recv"]["number"]) == (2, 2)  # two microbatches on 64 pipelines
        assert calls["send"]["elements"] == 2 * (256 // 2) * 128


def test_what_several_ranks_refuse_is_told_once_and_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["helixpipe: --lr is not a rate", "a warning"]
    monkeypatch.setattr(command_dry_run, "_run", lambda *arguments: command_dry_run._Ran(2, lines, None))
    assert command.main(["dry-run", "--world-size", "4"]) == 2
    assert capsys.readouterr().err.splitlines() == ["a warning", "helixpipe: --lr is not a rate"]


@pytest.mark.thorough
def test_long_sequences_take_little_of_the_hosts_memory() -> None:
    """A mask of scores would take 34 GB: 8 bytes for each of 32k x 128k."""
    changed = "--seq-length 131072 --max-position-embeddings 131072 --global-batch-size 2 --attention-dropout 0"
    chunks = "--pipeline-schedule seq1f1b --pipe-sp-splits 4"
    words = shlex.join([*JOB, *changed.split(), *chunks.split()])
    job = f"{sys.executable} -m schedules.command dry-run --world-size 4 --ranks 0 -- {words}"
    done = subprocess.run(["bash", "-c", f"ulimit -v 12000000; {job}"], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("fits, with ")


@pytest.mark.thorough
def test_a_mistake_in_the_flags_is_told_as_in_training(capfd: pytest.CaptureFixture[str]) -> None:
    assert command.main(["dry-run", "--world-size", "6", "--ranks", "0,5", "--", *JOB]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("helixpipe: ")] == lines[-1:]
    assert "6" in lines[-1]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--ranks 0", "--world-size: '' is not a number of GPUs"),
        ("--world-size none", "--world-size: 'none'"),
        ("--world-size 0", "--world-size: '0'"),
        ("--world-size 8 --ranks 0,8", "--ranks: '0,8' is not a list of ranks from 0 to 7"),
        ("--world-size 8 --ranks 0-3", "--ranks: '0-3'"),
        ("--world-size 8 --moe-load zipf", "--moe-load zipf: after zipf: comes an exponent"),
    ],
)
def test_mistakes_in_the_commands_own_flags(words: str, told: str) -> None:
    with pytest.raises(UserError, match="^" + told.replace("(", r"\(")):
        _split(words.split())


def test_its_flags_stand_on_either_side() -> None:
    expected = 16, [0, 7, 15], "zipf:0", False, ["--lr", "1"]
    assert _split(["--world-size", "16", "--", "--lr", "1"]) == expected
    assert _split(["--", "--lr", "1", "--world-size=16", "--ranks", "15,0,7"]) == expected


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["dry-run", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: helixpipe dry-run")


def test_ranks_that_disagree_are_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def ran(rank: int, *others: object) -> command_dry_run._Ran:
        calls = Calls(rank, {"all": (0, 1)}, [GroupCall("all", "all_reduce", (4 + rank,), "Float", -1, 0, 0)])
        step = StepCount(3 << 30, 2 << 30, 7, 0, 0, calls)
        step.waits["a number, by megatron.somewhere"] = 3
        return command_dry_run._Ran(0, [], RankReport(rank, steps=[step]))

    monkeypatch.setattr(command_dry_run, "_run", ran)
    assert command.main(["dry-run", "--world-size", "2"]) == 1
    text = capsys.readouterr().out
    assert "is all_reduce of 4 Float on rank 0 and all_reduce of 5 Float on rank 1" in text
    assert "rank 1 waits for its GPU 3 times a step: a number, by megatron.somewhere" in text
    table = [line.split() for line in text.splitlines()]
    assert ["0", "0", "2.00", "-", "3.00", "-", "-", "7"] in table
    assert ["1", "1", "all_reduce", "5", "Float"] in table


@pytest.mark.parametrize(
    ("gib", "verdict"),
    [
        (4, "fits, with 1.0 GiB to spare (3.0 GiB allocated, about 3.2 reserved of 80), as counted on rank 0"),
        (
            2,
            "does NOT fit: 1.0 GiB too much (3.0 GiB allocated, about 3.2 reserved of 80; 2.0 may be allocated), "
            "as counted on rank 0",
        ),
    ],
)
def test_one_line_says_whether_the_ranks_fit(
    gib: int, verdict: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usable = MemoryVerdict(1 << 30, 0, 80 << 30, gib << 30)

    def ran(rank: int, *others: object) -> command_dry_run._Ran:
        step = StepCount((3 - rank) << 30, 1 << 30, 7, 0, 0, Calls(rank, {}, []))
        return command_dry_run._Ran(0, [], RankReport(rank, steps=[step], gpu=usable.gpu, verdict=usable))

    monkeypatch.setattr(command_dry_run, "_run", ran)
    assert command.main(["dry-run", "--world-size", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == verdict and "No rank sends anything." in lines


def test_a_rank_that_the_host_kills_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    monkeypatch.setattr(command_dry_run, "python_command", lambda *words: [sys.executable, "-c", killed])
    assert command.main(["dry-run", "--world-size", "4", "--ranks", "3"]) == 137
    why = "as a host does that is out of memory: run fewer ranks at a time (--ranks)."
    assert capsys.readouterr().err.splitlines() == [f"helixpipe: rank 3 was killed, {why}"]
