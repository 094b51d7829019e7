"""How command lines end."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import NoReturn

import numpy
import pytest
import torch

from helixpipe.common.command import run_command
from helixpipe.common.errors import LostSaveError, UserError
from helixpipe.common.memory import asked_for, out_of_memory

FOUR_PETABYTES = 10**15


def python() -> None:
    raise MemoryError


def cuda() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of …")


def system() -> None:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


@pytest.mark.parametrize(
    ("allocate", "said"),
    [
        (lambda: torch.empty(FOUR_PETABYTES), "this host is out of memory (3725290.3 GiB more were asked for)."),
        (lambda: numpy.empty(FOUR_PETABYTES), "this host is out of memory (7.11 PiB more were asked for)."),
        (python, "this host is out of memory."),
        (system, "this host is out of memory."),
        (cuda, "the GPU is out of memory (2.50 GiB more were asked for)."),
    ],
    ids=["torch", "numpy", "python", "system", "CUDA"],
)
def test_memory_that_was_refused(allocate: Callable[[], object], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        allocate()
        return 0

    assert run_command("program", command) == 1
    assert capsys.readouterr().err == f"program: {said}\n"


def raises(error: BaseException) -> NoReturn:
    raise error


def test_what_is_no_ones_fault_but_ours_keeps_its_trace() -> None:
    for error in (RuntimeError("shapes differ"), AssertionError(), KeyError("x")):
        with pytest.raises(type(error)):
            run_command("program", partial(raises, error))
        assert out_of_memory(error) is None and asked_for(str(error)) == ""


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (UserError("--lr is wrong."), 2, "program: --lr is wrong.\n"),
        (LostSaveError("--save is full."), 1, "program: --save is full.\n"),
        (FileNotFoundError(2, "No such file", "here/x"), 2, "program: here/x: No such file.\n"),
        (OSError(11, "Try again"), 2, "program: the system refuses: Try again.\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_and_statuses(error: BaseException, status: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        raise error

    assert run_command("program", command) == status
    assert capsys.readouterr().err == said


def test_who_tells_a_mistake_may_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []

    def command() -> int:
        raise UserError("--lr is wrong.")

    assert run_command("program", command, lambda program, error: told.append(f"{program}, {error}")) == 2
    assert told == ["program, --lr is wrong."] and capsys.readouterr().err == ""


def test_a_rank_whose_peer_has_ended_says_one_sentence() -> None:
    """torch's C++ code would print its stack for the lost connection first."""
    lost = """
from helixpipe.common.command import run_command
from helixpipe.common.errors import UserError

def waits():
    from torch.distributed import DistNetworkError, TCPStore
    held = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    rank = TCPStore("127.0.0.1", held[0].port, is_master=False)
    held.clear()
    try:
        rank.check(["key"])
    except DistNetworkError:
        raise UserError("rank 0 has ended.")

raise SystemExit(run_command("helixpipe", waits))
"""
    quiet = {name: value for name, value in os.environ.items() if name != "TORCH_CPP_LOG_LEVEL"}
    done = subprocess.run([sys.executable, "-c", lost], env=quiet, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (2, "helixpipe: rank 0 has ended.\n")
