"""`helixpipe train`: start pretrain_gpt.py on each rank of this host, and say last what went wrong.

torchrun does the same and more (several hosts, restarts); here the ranks' sentence is the last thing on the screen.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

from helixpipe.common.child import python_command
from helixpipe.common.errors import UserError
from helixpipe.common.installed import require_training
from helixpipe.common.output import complain
from helixpipe.common.ports import free_port

_PREFIX = "helixpipe: "
_LEFT = 15.0  # seconds that the other ranks have to end after the first has failed

_USAGE = """usage: helixpipe train [-p P] [--ranks N] [flags of pretrain_gpt.py]

Train on this host: N ranks, by default one a GPU, or without GPUs as many as -p, --tensor-model-parallel-size and
--context-parallel-size need.
-p is --pipeline-model-parallel-size; all others are flags of pretrain_gpt.py, and `pretrain_gpt.py --help-all` lists
them."""


def run(arguments: Sequence[str]) -> int:
    """Start the ranks, forward signals to them, and return the status of the first that failed, or 0. Raises
    UserError."""
    if arguments[:1] in (["-h"], ["--help"]):
        print(_USAGE)
        return 0
    require_training("train")
    ranks, flags = _split(arguments)
    command = python_command("megatron.pretrain", *flags)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks))),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "HELIXPIPE_LAUNCHER": str(os.getpid()),
    }
    return _Ranks(command, environment, ranks).wait()


class _Ranks:
    """Processes that run side by side, and their messages about mistakes."""

    def __init__(self, command: list[str], environment: dict[str, str], count: int) -> None:
        self._told: list[str] = []
        self._signalled = False  # by this process
        self._processes: list[subprocess.Popen[bytes]] = []
        self._previous = {number: signal.signal(number, self._forward) for number in _FORWARDED}
        for rank in range(count):
            own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            self._processes.append(
                subprocess.Popen(command, env=own, stderr=subprocess.PIPE, start_new_session=True, bufsize=0)
            )
        self._readers = [threading.Thread(target=self._read, args=(each,), daemon=True) for each in self._processes]
        for reader in self._readers:
            reader.start()

    def wait(self) -> int:
        """Wait until all have ended; the others are killed some time after the first has failed."""
        failed: int | None = None
        try:
            deadline = float("inf")
            running = True
            while running and time.monotonic() <= deadline:
                running = any(each.poll() is None for each in self._processes)
                if failed is None:
                    failed = next((rank for rank, each in enumerate(self._processes) if each.returncode), None)
                    deadline = deadline if failed is None else time.monotonic() + _LEFT
                time.sleep(0.05 * running)
            status = 0 if failed is None else self._processes[failed].returncode
        finally:
            for each in self._processes:
                with suppress(ProcessLookupError):
                    os.killpg(each.pid, signal.SIGKILL)  # what they have started, too
                each.wait()
            for number, handler in self._previous.items():
                signal.signal(number, handler)
        for reader in self._readers:
            reader.join(2.0)
        if status < 0 and not self._signalled:
            self._told.append(_killed(failed or 0, -status))
        for line in dict.fromkeys(self._told):
            complain(line)
        return status if status >= 0 else 128 - status

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        """Pass on a rank's standard error; its sentence about a mistake is kept for the end."""
        assert process.stderr is not None
        with process.stderr as stream:
            for raw in stream:
                line = raw.decode(errors="replace").rstrip("\n")
                if line.startswith(_PREFIX):
                    self._told.append(line)
                else:
                    complain(line)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True
        for each in self._processes:
            if each.poll() is None:
                with suppress(ProcessLookupError):
                    os.kill(each.pid, number)


def _killed(rank: int, number: int) -> str:
    """Return a sentence on a rank that a signal from elsewhere has ended, which cannot say anything itself."""
    why = "; if nobody sent it, the host may have run out of memory, which its system log tells"
    return f"{_PREFIX}rank {rank} was ended by signal {number}, {signal.strsignal(number)}{why * (number == 9)}."


_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def _split(arguments: Sequence[str]) -> tuple[int, list[str]]:
    """Return the number of ranks, and the flags of the training program. Raises UserError."""
    flags: list[str] = []
    given: dict[str, str] = {}
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name not in ("-p", "--ranks"):
            flags.append(word)
            continue
        given[name] = value if equals else next(words, "")
        if not given[name].isdecimal() or int(given[name]) < 1:
            raise UserError(f"{name}: {given[name]!r} is not a number of ranks, which is 1 or more.")
    if "-p" in given:
        flags += ["--pipeline-model-parallel-size", given["-p"]]
    if "--ranks" in given:
        return int(given["--ranks"]), flags
    return gpus() or _needed(flags), flags


def _needed(flags: Sequence[str]) -> int:
    """Return the ranks that one copy of the model takes; the training program reports what is wrong with the flags."""
    needed = 1
    for name in ("--pipeline-model-parallel-size", "--tensor-model-parallel-size", "--context-parallel-size"):
        numbers = re.findall(rf"(?:^|\s){name}[= ](\d+)", " ".join(flags))
        needed *= max(1, int(numbers[-1])) if numbers else 1
    return needed


def gpus() -> int:
    """Return the number of this host's GPUs that its processes may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([each for each in visible.split(",") if each.strip() and each.strip() != "-1"])
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
