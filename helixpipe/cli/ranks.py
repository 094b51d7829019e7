"""The ranks of a job on this host, a process each, and what they say; `helixpipe train` starts them.

Ranks are numbered as when all are there. A rank that can leave its group (`helixpipe.common.groups_channel`) is told
of another one without being started anew; a spare one is started before it is known of which.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType, TracebackType

from helixpipe.common.errors import UserError
from helixpipe.common.groups_channel import JOIN, LEAVE, STAYS, VARIABLE, WAITS
from helixpipe.common.output import complain
from helixpipe.common.ports import free_port

PREFIX = "helixpipe: "
_LEFT = 15.0  # seconds that the other ranks have to end after the first has failed
_LEAVING = 20.0  # seconds that ranks have to leave a group of which some have died
_JOINING = 300.0  # and one that others join: a rank may be writing a checkpoint
_POLL = 0.05

_FROM_OUTSIDE = frozenset(-number for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGBUS))
"""Statuses of ranks that something else has ended. One that aborts, or touches memory that is not its own, has failed
by itself, and would again."""

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class JobEnd:
    """How a job ended. failed: the first rank that did; status: its, 0 where none failed. killed: the ranks that a
    signal ended."""

    failed: int = 0
    status: int = 0
    killed: tuple[int, ...] = ()


@dataclass
class _RankProcess:
    """A process. channel: this end of what it and the launcher tell each other. stays: it has said that it can leave
    its group. ahead: how often it has said that it waits, less the groups that it was told of."""

    process: subprocess.Popen[bytes]
    channel: socket.socket
    reader: threading.Thread
    stays: bool = False
    ahead: int = 0
    _said: bytes = b""

    @property
    def waits(self) -> bool:
        return self.ahead > 0 and self.status is None

    @property
    def status(self) -> int | None:
        return self.process.poll()

    def listen(self) -> None:
        with suppress(OSError):  # nothing new, or the process has ended
            self._said += self.channel.recv(1 << 12, socket.MSG_DONTWAIT)
        *words, self._said = self._said.split(b"\n")
        for word in words:
            self.ahead += word == WAITS.encode()
            self.stays = self.stays or word == STAYS.encode()

    def tell(self, line: str) -> None:
        with suppress(OSError):
            self.channel.sendall(f"{line}\n".encode())

    def end(self) -> None:
        """Kill the process and what it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.channel.close()
        self.reader.join(2.0)


@dataclass
class Ranks:
    """A context in which signals are passed on to the ranks; none is left after it. command, environment: of each.
    outlives: whether the job goes on when signals end some."""

    command: Sequence[str]
    environment: Mapping[str, str]
    outlives: bool = False
    _signalled: int | None = None  # by which number
    _ranks: dict[int, _RankProcess] = field(default_factory=dict)
    _group: tuple[int, ...] = ()
    _told: list[str] = field(default_factory=list)

    def __enter__(self) -> Ranks:
        self._previous = {number: signal.signal(number, self._forward) for number in _FORWARDED}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def signalled(self) -> bool:
        """Whether this process has been told to end, and the ranks with it."""
        return self._signalled is not None

    # ------------------------------------------------------------------------------------------------------ processes

    def begin(self, ranks: Sequence[int]) -> None:
        """Make a group of these ranks, in this order; those that live are in none. They join it, as soon as they wait
        for one, and others are started. Raises UserError where they cannot be."""
        size = {"WORLD_SIZE": str(len(ranks)), "LOCAL_WORLD_SIZE": str(len(ranks))}
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        self._group = tuple(ranks)
        for number, rank in enumerate(ranks):
            variables = {**size, **where, "RANK": str(number)}
            if self.missing([rank]):
                try:
                    self.start(rank, variables)
                except OSError as error:
                    raise UserError(
                        f"rank {rank} cannot be started: {error.strerror}. A host must have processes, memory and "
                        "descriptors for all of its ranks (ulimit -u, -n)."
                    ) from None
            else:
                self._ranks[rank].ahead -= 1
                self._ranks[rank].tell(json.dumps(variables))

    def start(self, rank: int, group: Mapping[str, str] | None = None) -> None:
        """Start the process of a rank, as one that waits or in a group that these variables describe. Raises OSError
        where this host has no room for it."""
        if self.signalled:
            return
        if rank in self._ranks:
            self._ranks[rank].end()
        ours, theirs = socket.socketpair()
        environment = {name: value for name, value in self.environment.items() if name != "RANK"}
        channel = {VARIABLE: str(theirs.fileno())} if self.outlives else {}
        try:
            process = subprocess.Popen(
                self.command,
                env={**environment, **(group or {}), **channel, "LOCAL_RANK": str(rank)},
                stderr=subprocess.PIPE,
                start_new_session=True,
                bufsize=0,
                pass_fds=(theirs.fileno(),),
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        reader.start()
        self._ranks[rank] = _RankProcess(process, ours, reader)
        if (number := self._signalled) is not None:  # while it was started
            self._forward(number, None)

    def waiting(self) -> set[int]:
        """Return the ranks that wait for a group."""
        for each in self._ranks.values():
            each.listen()
        return {rank for rank, each in self._ranks.items() if each.waits}

    def missing(self, ranks: Iterable[int]) -> set[int]:
        """Return those of some ranks that have no process, or none any more."""
        return {rank for rank in ranks if rank not in self._ranks or self._ranks[rank].status is not None}

    def _living(self) -> list[_RankProcess]:
        return [self._ranks[rank] for rank in self._group if not self.missing([rank])]

    def can_leave(self) -> bool:
        """Whether the group's ranks that live have said that they can leave it."""
        self.waiting()
        return all(each.stays or each.waits for each in self._living())

    def leave(self, join: bool = False) -> bool:
        """Have the group's ranks that live leave it; join: for one with more. Returns whether all of them wait for the
        next one, or have been ended by a signal, as one ends itself that cannot leave; not when one does neither for
        some time, or ends otherwise, and not when no process is left."""
        if not self.can_leave():
            return False
        living = self._living()
        for each in living:
            each.tell(JOIN if join else LEAVE)
        deadline = time.monotonic() + (_JOINING if join else _LEAVING)
        while time.monotonic() < deadline and not self.signalled:
            self.waiting()
            ended = [each.status for each in living if each.status is not None]
            if sum(each.waits for each in living) + len(ended) == len(living):
                there = self._ranks.keys() - self.missing(self._ranks)
                return bool(there) and all(status in _FROM_OUTSIDE for status in ended)
            time.sleep(_POLL)
        return False

    def end(self) -> None:
        """Kill all ranks."""
        for each in self._ranks.values():
            each.end()
        self._ranks.clear()

    def wait(self, interrupt: Callable[[], bool] = lambda: False) -> JobEnd | None:
        """Wait until all ranks of the group have ended; no longer than some time after the first has failed, or not at
        all if it was by a signal and the job outlives that. None: `interrupt` has said that it is enough."""
        failed: int | None = None
        killed: tuple[int, ...] = ()
        deadline = math.inf
        while True:
            statuses = {rank: self._ranks[rank].status for rank in self._group if rank in self._ranks}
            if not statuses:  # told to end before they began
                return JobEnd(status=-(self._signalled or 0))
            if failed is None and any(statuses.values()):
                # Who was killed has ended before those who miss it: look once more.
                statuses = {rank: self._ranks[rank].status for rank in statuses}
                killed = tuple(rank for rank, status in statuses.items() if status in _FROM_OUTSIDE)
                survives = self.outlives and bool(killed)
                failed = killed[0] if survives else next(rank for rank, status in statuses.items() if status)
                deadline = time.monotonic() + (0.0 if survives else _LEFT)
                if not survives:
                    for each in self._ranks.values():
                        each.channel.close()  # no more is said to them
            if failed is not None and (None not in statuses.values() or time.monotonic() >= deadline):
                return JobEnd(failed, self._ranks[failed].status or 0, killed)
            if None not in statuses.values():
                return JobEnd()
            if failed is None and interrupt():
                return None
            time.sleep(_POLL)

    # ------------------------------------------------------------------------------------------------- what they say

    def repeat(self) -> None:
        """Say what ranks said last, each sentence once."""
        for line in dict.fromkeys(self._told):
            complain(line)
        self._told.clear()

    def tell(self, end: JobEnd) -> int:
        """End all ranks, and say last what went wrong; return the job's status."""
        self.end()
        if end.status < 0 and not self.signalled:
            self._told.append(killed_sentence(end.failed, -end.status))
        self.repeat()
        return end.status if end.status >= 0 else 128 - end.status

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        """Pass on a rank's standard error; its sentence about a mistake is kept for the end."""
        assert process.stderr is not None
        with process.stderr as stream:
            for raw in stream:
                line = raw.decode(errors="replace").rstrip("\n")
                if line.startswith(PREFIX):
                    self._told.append(line)
                else:
                    complain(line)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._signalled = number
        for each in list(self._ranks.values()):
            if each.status is None:
                with suppress(ProcessLookupError):
                    os.kill(each.process.pid, number)


def killed_sentence(rank: int, number: int, why: bool = True) -> str:
    """Return a sentence on a rank that a signal from elsewhere has ended, which cannot say anything itself."""
    memory = "; if nobody sent it, the host may have run out of memory, which its system log tells"
    told = memory if why and number == signal.SIGKILL else ""
    return f"{PREFIX}rank {rank} was ended by signal {number}, {signal.strsignal(number)}{told}."
