"""A rank that goes on when others of its group have died: it leaves the group, whatever it is waiting for in it, and
joins the next one (`helixpipe.common.groups_channel` has what it and its launcher say).

Leaving closes all TCP connections of this process: gloo's, and those to the group's store. Whoever waits for one, in
any thread, then fails at once, as if the process at the other end had died; that one fails likewise. So a group falls
apart however its ranks wait for each other, and what runs in it ends by exceptions, by the same ways as a failed run.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import stat
import threading
from collections.abc import Mapping
from contextlib import suppress

from helixpipe.common.groups_channel import LEAVE, STAYS, VARIABLE, WAITS

_AGAIN = 0.05  # seconds until connections are closed that were opened meanwhile


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
                if line.strip() == LEAVE:
                    self._leave()
                else:
                    self._next.put(json.loads(line))
        self._told.set()

    def _leave(self) -> None:
        """Close connections, those too that are opened meanwhile, until this rank has left its group."""
        self._left.clear()
        self._leaving = True
        self._told.set()
        while not self._left.is_set():
            close_connections()
            self._left.wait(_AGAIN)
        self._leaving = False
        self._told.clear()


def close_connections() -> None:
    """Shut down this process's TCP connections, whoever has opened them."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it is closed by now
            if not stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as each:
                listens = each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if each.family in (socket.AF_INET, socket.AF_INET6) and not listens:
                    each.shutdown(socket.SHUT_RDWR)
