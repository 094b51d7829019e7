"""Launch the training program on ranks forked from a process that has imported all they need: there in no time."""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

from tests.distributed import die_with_parent, kill_group, preloaded, store_of_a_launch
from tests.integration.launching import ROOT, Launch, Result


class Forked:
    """A launch that is running: torchrun's environment and store, but no launcher that ends one rank for another.

    absent: a rank that is not started. environment: more variables of every rank.
    """

    def __init__(self, launch: Launch, absent: int | None = None, **environment: str) -> None:
        self._name = launch.name
        self._started = time.monotonic()
        self._store = store_of_a_launch()
        self._folder = tempfile.TemporaryDirectory()
        self._log = Path(self._folder.name) / "output"
        self._log.touch()
        size = max(1, launch.ranks)
        variables = {
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "forked",
            "TORCHELASTIC_RESTART_COUNT": "0",
            **environment,
        }
        context = preloaded()
        self._ranks = {
            rank: context.Process(target=_run, args=(launch, variables, rank, str(self._log)))
            for rank in range(size)
            if rank != absent
        }
        for process in self._ranks.values():
            process.start()

    def wait_for(self, words: str) -> None:
        """Until they have been printed."""
        while words not in self._text():
            ended = all(process.exitcode is not None for process in self._ranks.values())
            assert not ended or words in self._text(), f"{self._name} ended without {words!r}:\n{self._text()}"
            time.sleep(0.01)

    def wait_for_rank(self, number: int, seconds: float = 280.0) -> int | None:
        """Until this rank has ended; returns its exit status, or None when it has not."""
        self._ranks[number].join(seconds)
        return self._ranks[number].exitcode

    def rank(self, number: int) -> int:
        """The pid of a rank."""
        return int(self._ranks[number].pid or 0)

    def wait(self, seconds: float = 280.0) -> Result:
        """Until all ranks have ended by themselves; fails when a process of theirs is left."""
        deadline = time.monotonic() + seconds
        try:
            statuses = [self.wait_for_rank(rank, max(0.0, deadline - time.monotonic())) for rank in self._ranks]
            assert None not in statuses, f"{self._name}: {statuses} after {seconds} s\n{self._text()}"
            deadline = time.monotonic() + 30.0  # a loader process looks for its rank every 5 s
            while (left := [rank for rank in self._ranks if _lives(self.rank(rank))]) and time.monotonic() < deadline:
                time.sleep(0.02)
            assert not left, f"{self._name} left processes of ranks {left} behind"
            status = next((status for status in statuses if status), 0)
            return Result(status, self._text(), time.monotonic() - self._started)
        finally:
            self.end()

    def end(self) -> None:
        for process in self._ranks.values():
            kill_group(process.pid)
            process.kill()  # in case it had no group yet
            process.join()
        self._folder.cleanup()

    def _text(self) -> str:
        return self._log.read_text(errors="replace")


def run_forked(launch: Launch, **paths: Path | str) -> Result:
    """Run it to its end; `{name}` in its flags stands for a path given here."""
    return Forked(launch.filled_in(**paths)).wait()


def _lives(group: int) -> bool:
    """Whether a process of the group that a rank was the first of is there."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, 0)
        return True
    return False


def _run(launch: Launch, environment: dict[str, str], rank: int, log: str) -> None:
    """One rank, as the process that torchrun starts."""
    os.setsid()  # a group of its own, so that all of it can be killed
    threading.Thread(target=die_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.chdir(ROOT)
    sys.argv = [launch.script, *launch.flags.split()]
    runpy.run_path(launch.script, run_name="__main__")
