"""Whatever becomes of a command's output, it ends with at most one sentence and a status that says so."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.launching import ROOT
from tests.selection import graded

BIN = Path(sys.executable).parent

COMMANDS = (
    *("list", "list --json", "simulate 1f1b -p 2 -m 2 --order", "simulate 1f1b -p 2 -m 2 --json"),
    *("compare 1f1b gpipe -p 2 -m 2", "improve 1f1b -p 2 -m 2 --evaluations 1", "draw 1f1b -p 2 -m 2 -o picture.json"),
    *(f"check {ROOT}/tests/pins/handmade.csv", "memory 1f1b --model llama2-7b --hardware h100 -p 2 -m 2"),
    "plan --model llama2-7b --hardware h100 --gpus 2 --seq-length 512 --global-batch-size 2 --jobs 1 --schedule 1f1b",
    *("--help", "--version", "simulate --help", "train --help", "profile --help"),
)
PROGRAMS = (
    *("pretrain_gpt.py --help", "tools/preflight.py --help", "tools/generate.py --help", "tools/evaluate.py --help"),
    *("tools/checkpoint.py --help", "tools/preprocess_data.py --help", "tools/stdlib_corpus.py --help"),
    *("tools/step_times.py --help", "tools/netlab.py --help"),
    "tools/stdlib_corpus.py --output corpus.jsonl --max-megabytes 0.1",
)
TABLE = [*(f"helixpipe {words}" for words in COMMANDS), *PROGRAMS]


@contextmanager
def unread() -> Iterator[int]:
    """The end of a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@contextmanager
def full() -> Iterator[int]:
    with open("/dev/full", "wb") as stream:
        yield stream.fileno()


def run(command: str, folder: Path, stdout: int | None, buffered: bool = True, redirected: str = "") -> tuple[int, str]:
    """The exit status, and what is said on standard error. redirected: further words for the shell."""
    program, *words = command.split()
    start = [str(BIN / program)] if (BIN / program).exists() else [sys.executable, str(ROOT / program)]
    if redirected:
        start = ["sh", "-c", f'exec "$@" {redirected}', "sh", *start]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    if not buffered:
        environment["PYTHONUNBUFFERED"] = "1"
    done = subprocess.run(
        [*start, *words], cwd=folder, stdout=stdout, stderr=subprocess.PIPE, env=environment, text=True, timeout=280
    )
    return done.returncode, done.stderr


SLOW = ("tools/generate.py --help", "tools/evaluate.py --help")
"""Programs that import torch, as that which trains does."""
QUICK = [command for command in TABLE if command not in SLOW]


@pytest.mark.parametrize("command", graded(TABLE, QUICK[::4]))
def test_a_reader_that_has_seen_enough_hears_nothing(command: str, tmp_path: Path) -> None:
    with unread() as output:
        assert run(command, tmp_path, output) == (141, "")


@pytest.mark.parametrize("command", graded(TABLE, [QUICK[0], *QUICK[1::4]]))
def test_a_full_disk_is_one_sentence(command: str, tmp_path: Path) -> None:
    name = command.split()[0].removeprefix("tools/")
    with full() as output:
        status, said = run(command, tmp_path, output)
    name = "helixpipe" if name in ("pretrain_gpt.py", "generate.py", "evaluate.py") else name
    assert (status, said) == (2, f"{name}: cannot write the output: No space left on device.\n")


@pytest.mark.parametrize("command", ["helixpipe list", "helixpipe simulate --help", "pretrain_gpt.py --help"])
def test_the_same_without_a_buffer(command: str, tmp_path: Path) -> None:
    with unread() as output:
        assert run(command, tmp_path, output, buffered=False) == (141, "")
    with full() as output:
        status, said = run(command, tmp_path, output, buffered=False)
    assert (status, said) == (2, "helixpipe: cannot write the output: No space left on device.\n")


@pytest.mark.parametrize("command", ["helixpipe list", "helixpipe compare 1f1b gpipe", "pretrain_gpt.py --help"])
def test_no_output_at_all(command: str, tmp_path: Path) -> None:
    """`>&-` asks for silence."""
    assert run(command, tmp_path, None, redirected=">&-") == (0, "")


@pytest.mark.parametrize(
    "redirected", graded(["2>/dev/full", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"], ["2>/dev/full", "2>&-"])
)
@pytest.mark.parametrize("command", ["helixpipe bogus", "helixpipe train --ranks 0", "pretrain_gpt.py --bogus"])
def test_a_mistake_that_cannot_be_told_is_one_by_its_status(command: str, redirected: str, tmp_path: Path) -> None:
    assert run(command, tmp_path, None, redirected=redirected) == (2, "")
