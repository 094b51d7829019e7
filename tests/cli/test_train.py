"""`helixpipe train`: ranks, ports and signals, and the sentence about a mistake last."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from helixpipe.cli import command_train
from helixpipe.common import installed
from schedules import command

RANK = """
import os, signal, sys, time
if "wrong" in sys.argv:
    sys.stderr.write("helixpipe: --lr 0 is wrong.\\n"); sys.stderr.flush()
    time.sleep(0.2 * int(os.environ["RANK"]))
    sys.stderr.write("something else\\n"); sys.exit(2)
if "killed" in sys.argv and os.environ["RANK"] == "1":
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
if "waits" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    open(f"ready-{os.environ['RANK']}", "w").close()
    time.sleep(60)
open(f"rank-{os.environ['RANK']}", "w").write(" ".join([
    *[os.environ[name] for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")], *sys.argv[1:]
]))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ranks are a small program instead of the training program; no GPUs."""
    package = tmp_path / "megatron" / "pretrain"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()  # found before the real one, which is a package as well
    (package / "__main__.py").write_text(RANK)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(installed, "TRAINING", {})  # which is not found on that path
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


def test_help_shows_the_groups_of_training_flags(capfd: pytest.CaptureFixture[str]) -> None:
    """Wherever it stands, from the training program itself, and nothing else if there is no such group."""
    assert command.main(["train", "-p", "2", "--help"]) == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert shown.startswith("usage: helixpipe train [-p P]") and shown.endswith("flags.")
    assert "--num-layers N Number of transformer layers." in shown and "parallelism, layers of pipeline stages" in shown
    assert command.main(["train", "--help", "nosuch"]) == command.USER_ERROR
    output = capfd.readouterr()
    assert output.out == "" and output.err.startswith("helixpipe: --help nosuch: there is no such group of flags;")


@pytest.mark.parametrize(
    ("arguments", "count", "flags"),
    [
        ("-p 2 --lr 1", 2, "--lr 1 --pipeline-model-parallel-size 2"),
        ("--tensor-model-parallel-size 2 -p=1", 2, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1"),
        ("--context-parallel-size 2", 2, "--context-parallel-size 2"),
        ("--ranks 3 -p 1", 3, "--pipeline-model-parallel-size 1"),
        ("", 1, ""),
    ],
)
def test_every_rank_is_started(folder: Path, arguments: str, count: int, flags: str) -> None:
    assert command.main(["train", *arguments.split()]) == 0
    started = [path.read_text().split(" ") for path in sorted(folder.glob("rank-*"))]
    assert [words[:3] for words in started] == [[str(count), str(rank), "127.0.0.1"] for rank in range(count)]
    assert all(" ".join(words[4:]) == flags for words in started)
    assert len({words[3] for words in started}) == 1 and int(started[0][3]) > 0


def test_one_rank_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,5")
    assert command_train.gpus() == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert command_train.gpus() == 0


def test_the_sentence_of_a_mistake_comes_last_and_once(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert command.main(["train", "-p", "2", "wrong"]) == command.USER_ERROR
    lines = capfd.readouterr().err.splitlines()
    assert lines[-1] == "helixpipe: --lr 0 is wrong." and lines.count(lines[-1]) == 1
    assert lines.count("something else") == 2


@pytest.mark.parametrize(
    ("name", "why"), [("SIGKILL", "Killed; if nobody sent it,"), ("SIGSEGV", "Segmentation fault.")]
)
def test_a_rank_that_a_signal_ends_is_named(
    folder: Path, name: str, why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    number = getattr(signal, name)
    assert command.main(["train", "-p", "2", name, "killed"]) == 128 + number
    *_, last = capfd.readouterr().err.splitlines()
    assert last.startswith(f"helixpipe: rank 1 was ended by signal {number:d}, ") and why in last


def test_signals_reach_every_rank(folder: Path) -> None:
    def when_ready() -> None:
        while len(list(folder.glob("ready-*"))) < 2:
            threading.Event().wait(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    threading.Thread(target=when_ready, daemon=True).start()
    assert command.main(["train", "-p", "2", "waits"]) == 7
    assert signal.getsignal(signal.SIGTERM) is before and not list(folder.glob("rank-*"))


def test_two_numbers_of_pipeline_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """The flag and its value are two words, or one with an equals sign."""
    for words in ("-p 2 --pipeline-model-parallel-size 4", "--pipeline-model-parallel-size=4 -p=2"):
        assert command.main(["train", *words.split()]) == command.USER_ERROR
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith("-p 2 and --pipeline-model-parallel-size 4 both give the pipeline ranks; give one.")


@pytest.mark.parametrize("words", ["-p 0", "-p two", "--ranks", "--ranks=-1"])
def test_no_number_of_ranks(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["train", *words.split()]) == command.USER_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"helixpipe: {words.split()[0].split('=')[0]}: ") and line.endswith("1 or more.")
