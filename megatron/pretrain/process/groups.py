"""A rank that goes on when others of its group have died: it leaves the group, whatever it is waiting for in it, and
joins the next one (`helixpipe.common.groups_channel` has what it and its launcher say).

Leaving closes all TCP connections of this process: gloo's, and those to the group's store. Who waits for one, in any
thread, then mostly fails, as if the process at the other end had died; that one fails likewise. So a group falls apart,
and what runs in it ends by exceptions, by the same ways as a failed run. Not every wait ends by it: gloo's for another
rank to connect, or for the rest of a message that has come in part. A rank that is held up so ends itself. Where nobody
has died, and others join, it is patient instead, and asked between two steps.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import stat
import threading
import time
from collections.abc import Mapping
from contextlib import suppress

from helixpipe.common.groups_channel import JOIN, LEAVE, STAYS, VARIABLE, WAITS

_AGAIN = 0.05  # seconds until connections are closed that were opened meanwhile
_STUCK = 10.0  # seconds until a rank that has not left its group ends itself or, for a join, closes connections


class RankGroups:
    """The groups that this rank is in, one after the other, as its launcher tells."""

    def __init__(self, channel: socket.socket):
        self._channel = channel
        self._next: queue.Queue[Mapping[str, str]] = queue.Queue()
        self._told, self._left = threading.Event(), threading.Event()
        self._leaving = False
        threading.Thread(target=self._listen, name="groups", daemon=True).start()

    @classmethod
    def of_launcher(cls) -> RankGroups | None:
        """Return those of this process's launcher; None under another one."""
        if VARIABLE not in os.environ:
            return None
        channel = socket.socket(fileno=int(os.environ.pop(VARIABLE)))
        channel.set_inheritable(False)
        return cls(channel)

    def stay(self) -> None:
        """Say that the group that is joined now can be left."""
        self._say(STAYS)

    def leaving(self, seconds: float = 0.0) -> bool:
        """Whether this rank is to leave its group, or is told so within some seconds: who loses a connection may
        notice it before the launcher does. No, once the launcher has no more to say."""
        self._told.wait(seconds)
        return self._leaving

    def next(self) -> Mapping[str, str]:
        """Wait for the next group, after all of the one before is gone; return the variables that describe it."""
        self._left.set()
        self._say(WAITS)
        return self._next.get()

    def _say(self, word: str) -> None:
        with suppress(OSError):  # the launcher has gone, and this process is about to
            self._channel.sendall(f"{word}\n".encode())

    def _listen(self) -> None:
        with suppress(OSError):  # the launcher has gone
            for line in self._channel.makefile():
                if (word := line.strip()) in (LEAVE, JOIN):
                    self._leave(join=word == JOIN)
                else:
                    self._next.put(json.loads(line))
        self._told.set()

    def _leave(self, join: bool) -> None:
        """Close connections, those too that are opened meanwhile, until this rank has left its group. Where ranks have
        died, one that is stuck ends its process; where others join, it first has time to end its step."""
        self._left.clear()
        self._leaving = True
        if not join:
            close_connections()
        self._told.set()
        if join:
            self._left.wait(_STUCK)
        deadline = time.monotonic() + _STUCK
        while not self._left.wait(_AGAIN):
            if not join and time.monotonic() >= deadline:
                os.kill(os.getpid(), signal.SIGKILL)  # to the launcher, as lost as those that have died
            close_connections()
        self._leaving = False
        self._told.clear()


def close_connections() -> None:
    """Shut down this process's TCP connections, whoever has opened them, but for its standard streams; no more than
    can be where descriptors have run out."""
    names: list[str] = []
    with suppress(OSError):
        names = os.listdir("/proc/self/fd")
    for descriptor in map(int, names):
        with suppress(OSError):  # it is closed by now, or was not connected
            if descriptor > 2 and stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                _shut_down(os.dup(descriptor))


def _shut_down(copy: int) -> None:
    """Shut down what a descriptor is a copy of, if that is a TCP connection, and close the copy."""
    if not stat.S_ISSOCK(os.fstat(copy).st_mode):  # it has become something else meanwhile
        os.close(copy)
        return
    with socket.socket(fileno=copy) as each:
        if each.family not in (socket.AF_INET, socket.AF_INET6) or each.type != socket.SOCK_STREAM:
            return
        if not each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            each.shutdown(socket.SHUT_RDWR)
