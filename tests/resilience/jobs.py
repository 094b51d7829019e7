"""Training runs in processes of their own, which tests kill, stop and launch again."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.ranks import own_environment
from helixpipe.common.child import python_command
from tests.integration.launching import MARK, ROOT, marked_processes, process_stat

GONE = 60.0
"""Seconds for all processes of a job to end."""

PATIENCE = 240.0
"""Seconds for what should come soon, on a machine that has other things to do."""

MODEL = (
    "--hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --lr-decay-style constant "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 100 --log-interval 1 --eval-iters 0 --num-workers 0 "
    "--num-layers 4 --pipeline-model-parallel-size 2"
)


class Job:
    """One launch of the training program, whose processes are found by a mark in their environment.

    Args:
        flags: Of the training program.
        log: The file of what it prints.
        script: What torchrun runs.
        ranks: The number of processes.
        launcher: In place of torchrun, a module and words before the flags.
        environment: More variables.
    """

    def __init__(
        self,
        flags: str,
        log: Path,
        script: str = "pretrain_gpt.py",
        ranks: int = 2,
        launcher: Sequence[str] = (),
        **environment: str,
    ):
        self.mark, self.log = uuid.uuid4().hex, log
        torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), script)
        with log.open("w") as file:
            self.launcher = subprocess.Popen(
                [*python_command(*(launcher or torchrun)), *flags.split()],
                cwd=ROOT,
                env=own_environment({MARK: self.mark, **environment}),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def iterations(self) -> int:
        """The last iteration whose line is printed; 0: none."""
        done = losses(self.text)
        return done[-1][0] if done else 0

    def until(self, holds: Callable[[], bool], seconds: float = PATIENCE) -> None:
        """Wait until something holds. Raises AssertionError where the job ends before, or time runs out."""
        deadline = time.monotonic() + seconds
        while not holds():
            ended = self.launcher.poll() is not None and not holds()
            assert not ended and time.monotonic() < deadline, self.text[-4000:]
            time.sleep(0.005)

    def processes(self) -> dict[int, str]:
        """Return every living process of the job: its number, and its LOCAL_RANK, which is empty for a launcher."""
        return marked_processes(self.mark, "LOCAL_RANK")

    def ranks(self) -> dict[str, int]:
        """Return the process of each rank, whose parent is the launcher."""
        found = {}
        for number, rank in self.processes().items():
            with contextlib.suppress(OSError):
                if rank and int(process_stat(number)[1]) == self.launcher.pid:
                    found[rank] = number
        return found

    def kill(self, *victims: str) -> float:
        """Kill ranks, or `launcher`. Returns the seconds until nothing of the job was left."""
        ranks, begun = {**self.ranks(), "launcher": self.launcher.pid}, time.monotonic()
        for victim in victims:
            with contextlib.suppress(ProcessLookupError, KeyError):
                os.kill(ranks[victim], signal.SIGKILL)
        while time.monotonic() - begun < GONE:
            self.launcher.poll()  # lets go of the process once it has ended
            if not self.processes():
                break
            time.sleep(0.02)
        gone = time.monotonic() - begun
        self.end()
        return gone

    def finish(self, seconds: float = PATIENCE) -> str:
        """Let the job run to its end; return what it printed. Raises AssertionError where it fails."""
        try:
            status = self.launcher.wait(seconds)
        finally:
            self.end()
        assert status == 0, self.text[-4000:]
        return self.text

    def end(self) -> None:
        """Leave nothing behind."""
        for number in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        self.launcher.wait()


def losses(text: str) -> list[tuple[int, str]]:
    """Return the iteration of each log line, and what it says of loss and norm."""
    lines = re.findall(r"iteration +(\d+)/ *\d+ \|.*?lm loss: (\S+).*?grad norm: (\S+)", text)
    return [(int(iteration), f"{loss} {norm}") for iteration, loss, norm in lines]


def newest(folder: Path) -> int:
    """Return the iteration that the tracker file names; 0 where there is none."""
    try:
        return int((folder / "latest_checkpointed_iteration.txt").read_text())
    except FileNotFoundError:
        return 0


def resumed(text: str) -> int | None:
    """Return the iteration that a launch went on from; None where it did not get so far."""
    if loaded := re.search(r"successfully loaded checkpoint from .* at iteration (\d+)", text):
        return int(loaded[1])
    first = losses(text)
    return first[0][0] - 1 if first else None
