"""`helixpipe train`: start pretrain_gpt.py on each rank of this host, and say last what went wrong.

torchrun does the same on several hosts; here the ranks' sentence is the last thing on the screen. With snapshots in
memory (`--in-memory-checkpoint-interval`) a job outlives ranks that a signal ends: all begin anew from the snapshots,
without the lost replica for a while where there are others.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

from helixpipe.cli.replicas import RankLayout, Roster, ranks_of_a_replica
from helixpipe.common.child import python_command
from helixpipe.common.errors import UserError
from helixpipe.common.host_memory import Stamp, folder_of, newest, remove
from helixpipe.common.installed import require_training
from helixpipe.common.output import complain
from helixpipe.common.ports import free_port

_PREFIX = "helixpipe: "
_LEFT = 15.0  # seconds that the other ranks have to end after the first has failed

_FROM_OUTSIDE = frozenset(-number for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGBUS))
"""Statuses of ranks that something else has ended. One that aborts, or touches memory that is not its own, has failed
by itself, and would again."""

_IDLE_LIVES = 3  # after so many in which no step was done, a job ends

_USAGE = """usage: helixpipe train [-p P] [--ranks N] [--rejoin-after SECONDS] [flags of pretrain_gpt.py]

Train on this host: N ranks, by default one a GPU, or without GPUs as many as -p, --tensor-model-parallel-size and
--context-parallel-size need.
-p is --pipeline-model-parallel-size; all others are flags of pretrain_gpt.py, and `pretrain_gpt.py --help-all` lists
them. With --in-memory-checkpoint-interval N the job goes on when ranks are killed, from snapshots in memory, and a
replica that has lost ranks takes part again after SECONDS (default: 0, at once)."""


def run(arguments: Sequence[str]) -> int:
    """Start the ranks, forward signals to them, and return the status of the first that failed, or 0. Raises
    UserError."""
    if arguments[:1] in (["-h"], ["--help"]):
        print(_USAGE)
        return 0
    require_training("train")
    ranks, rejoin, flags = _split(arguments)
    command = python_command("megatron.pretrain", *flags)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks))),
        "HELIXPIPE_LAUNCHER": str(os.getpid()),
    }
    if any(flag.startswith("--in-memory-checkpoint-interval") for flag in flags):
        return _outlive(command, environment, Roster(RankLayout.of(flags, ranks), rejoin))
    job = _Ranks(command, environment, list(enumerate(range(ranks))))
    return job.tell(job.wait())


def _outlive(command: list[str], environment: Mapping[str, str], roster: Roster) -> int:
    """Run a job again and again until it ends by itself, with the replicas that are there; return its status."""
    folder, layout, idle = folder_of(os.getpid()), roster.layout, 0
    try:
        while True:
            before, now = newest(folder), time.monotonic()
            members, until = roster.members(now), roster.next_change(now)
            job = _Ranks(command, environment, layout.ranks(members))
            end = job.wait(partial(_joins, job, folder, before, until), survives=True)
            if end is None:
                complain(f"{_PREFIX}lost replicas join after step {newest(folder).step}.")
                continue
            idle = 0 if newest(folder).step > before.step else idle + 1
            if not end.killed or job.signalled or idle == _IDLE_LIVES:
                return job.tell(end)
            job.repeat()
            now = time.monotonic()
            roster.lose({layout.replica_of(full) for full in end.killed}, newest(folder), now)
            going_on = len(roster.members(now)) * layout.pipeline * layout.beside
            complain(
                f"{_killed(end.failed, -end.status, why=False)[:-1]}: {going_on} of "
                f"{layout.replicas * layout.pipeline * layout.beside} ranks go on after step {newest(folder).step}."
            )
    finally:
        remove(folder)


def _joins(job: _Ranks, folder: Path, before: Stamp, until: float) -> bool:
    """Whether lost replicas join now: when it is time and the others, which have begun anew, have done a step, but not
    when the job has been told to end."""
    return not job.signalled and time.monotonic() >= until and newest(folder).step > before.step


@dataclass(frozen=True)
class _JobEnd:
    """How a job ended. failed: the first rank that did; status: its, 0 where none failed. killed: the ranks that a
    signal ended; numbered as when all ranks are there."""

    failed: int = 0
    status: int = 0
    killed: tuple[int, ...] = ()


class _Ranks:
    """Processes that run side by side, and their messages about mistakes. ranks: (rank, rank on this host) of each."""

    def __init__(self, command: list[str], environment: Mapping[str, str], ranks: Sequence[tuple[int, int]]) -> None:
        self._told: list[str] = []
        self.signalled = False  # by this process
        self._processes: list[subprocess.Popen[bytes]] = []
        self._local = [local for _, local in ranks]
        self._previous = {number: signal.signal(number, self._forward) for number in _FORWARDED}
        size = {"WORLD_SIZE": str(len(ranks)), "LOCAL_WORLD_SIZE": str(len(ranks))}
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for rank, local in ranks:
            own = {**environment, **size, **where, "RANK": str(rank), "LOCAL_RANK": str(local)}
            self._processes.append(
                subprocess.Popen(command, env=own, stderr=subprocess.PIPE, start_new_session=True, bufsize=0)
            )
        self._readers = [threading.Thread(target=self._read, args=(each,), daemon=True) for each in self._processes]
        for reader in self._readers:
            reader.start()

    def wait(self, interrupt: Callable[[], bool] = lambda: False, survives: bool = False) -> _JobEnd | None:
        """Wait until all have ended; the others are killed some time after the first has failed, or at once if it was
        by a signal and the job survives that. None: they were killed because `interrupt` said so."""
        failed: int | None = None
        try:
            deadline = math.inf
            running = True
            while running and time.monotonic() <= deadline and (failed is not None or not interrupt()):
                running = None in [each.poll() for each in self._processes]  # all are looked at
                if failed is None and any(each.returncode for each in self._processes):
                    for each in self._processes:  # who was killed has ended before those who miss it
                        each.poll()
                    killed = tuple(
                        rank for rank, each in enumerate(self._processes) if each.returncode in _FROM_OUTSIDE
                    )
                    failed = next(rank for rank, each in enumerate(self._processes) if each.returncode)
                    failed = killed[0] if killed and survives else failed
                    deadline = time.monotonic() + (0.0 if killed and survives else _LEFT)
                time.sleep(0.05 * running)
        finally:
            for each in self._processes:
                with suppress(ProcessLookupError):
                    os.killpg(each.pid, signal.SIGKILL)  # what they have started, too
                each.wait()
            for number, handler in self._previous.items():
                signal.signal(number, handler)
        for reader in self._readers:
            reader.join(2.0)
        if failed is not None:
            by_signal = tuple(self._local[rank] for rank in killed)
            return _JobEnd(self._local[failed], self._processes[failed].returncode, by_signal)
        return None if running else _JobEnd()

    def repeat(self) -> None:
        """Say what ranks said last, each sentence once."""
        for line in dict.fromkeys(self._told):
            complain(line)

    def tell(self, end: _JobEnd | None) -> int:
        """Say last what went wrong; return the job's status."""
        assert end is not None
        if end.status < 0 and not self.signalled:
            self._told.append(_killed(end.failed, -end.status))
        self.repeat()
        return end.status if end.status >= 0 else 128 - end.status

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
        self.signalled = True
        for each in self._processes:
            if each.poll() is None:
                with suppress(ProcessLookupError):
                    os.kill(each.pid, number)


def _killed(rank: int, number: int, why: bool = True) -> str:
    """Return a sentence on a rank that a signal from elsewhere has ended, which cannot say anything itself."""
    memory = "; if nobody sent it, the host may have run out of memory, which its system log tells"
    told = memory if why and number == signal.SIGKILL else ""
    return f"{_PREFIX}rank {rank} was ended by signal {number}, {signal.strsignal(number)}{told}."


_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def _split(arguments: Sequence[str]) -> tuple[int, float, list[str]]:
    """Return the number of ranks, the seconds after which lost ones join, and the flags of the training program. Raises
    UserError."""
    flags: list[str] = []
    given: dict[str, str] = {}
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name not in ("-p", "--ranks", "--rejoin-after"):
            flags.append(word)
            continue
        given[name] = value if equals else next(words, "")
        if name == "--rejoin-after" and not given[name].isdecimal():
            raise UserError(f"{name}: {given[name]!r} is not a number of seconds, which is whole and 0 or more.")
        if name != "--rejoin-after" and (not given[name].isdecimal() or int(given[name]) < 1):
            raise UserError(f"{name}: {given[name]!r} is not a number of ranks, which is 1 or more.")
    if "-p" in given:
        flags += ["--pipeline-model-parallel-size", given["-p"]]
    ranks = int(given["--ranks"]) if "--ranks" in given else gpus() or math.prod(ranks_of_a_replica(flags))
    return ranks, float(given.get("--rejoin-after", 0)), flags


def gpus() -> int:
    """Return the number of this host's GPUs that its processes may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([each for each in visible.split(",") if each.strip() and each.strip() != "-1"])
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
