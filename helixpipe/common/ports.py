"""A port for processes of this host to meet at."""

from __future__ import annotations

import random
import socket

_FIRST, _LAST, _TRIES = 20000, 32000, 100


def free_port() -> int:
    """Return a port of 127.0.0.1 at which no process listens.

    The caller binds it later. So it is not one of those that the system gives to connections, mostly from 32768 on:
    another process may get such a one in between. Raises OSError if all that are tried are taken.
    """
    for _ in range(_TRIES):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", random.SystemRandom().randint(_FIRST, _LAST)))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise OSError(f"no port from {_FIRST} to {_LAST} of this host is free")
