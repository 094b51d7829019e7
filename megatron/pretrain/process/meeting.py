"""Checks that the ranks can meet: tries the launcher's address and port before torch waits for them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from helixpipe.common.errors import UserError
from helixpipe.common.output import complain

_TRY, _WAIT, _PAUSE = 10.0, 300.0, 0.1  # seconds of a try, in all, and between two
_QUIET = 15.0  # seconds before it says what it waits for: ranks that start together are ready seconds apart


class MeetingError(UserError):
    """Ranks that cannot meet cannot agree on who says so: one of each host does."""


def is_served(environ: Mapping[str, str]) -> bool:
    """Whether torchrun holds the store, on rank 0's host; otherwise rank 0 does."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _never() -> bool:
    return False


def check_master(
    environ: Mapping[str, str] | None = None,
    *,
    wait: float = _WAIT,
    each: float = _TRY,
    given_up: Callable[[], bool] = _never,
) -> None:
    """Make sure that rank 0 answers where MASTER_ADDR and MASTER_PORT say, or, on rank 0, that it can listen there.

    Waits for another host `wait` seconds at most, in tries of `each`, and says for whom; no longer once it is given
    up. Raises MeetingError.
    """
    environ = os.environ if environ is None else environ
    host, port = address(environ, wait=min(wait, each))
    if environ.get("RANK", "0") == "0" and not is_served(environ):
        _listener(port).close()
        _is_here(host, port, min(wait, each))
    else:  # torchrun's own process, where it is on this host, answers or is gone
        near = is_served(environ) and environ.get("GROUP_RANK") == "0"
        _answers(host, port, min(wait, each) if near else wait, each, given_up)


def address(environ: Mapping[str, str], *, wait: float) -> tuple[str, int]:
    """Return MASTER_ADDR, which a name server must resolve within `wait` seconds, and MASTER_PORT.
    Raises MeetingError.
    """
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if host is None or port is None:
        missing, there = ("MASTER_ADDR", "WORLD_SIZE") if host is None else ("MASTER_PORT", "MASTER_ADDR")
        raise MeetingError(f"{there} is set and {missing} is not: set both, or start with torchrun.")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise MeetingError(f"MASTER_PORT={port} is not a port, which is a number from 1 to 65535.")
    reason = _until_none(lambda: _unknown(host, int(port)), wait, f"waiting for the address of {host}")
    if reason is not None:
        raise MeetingError(
            f"MASTER_ADDR={host} is not the name or address of a host, as {socket.gethostname()} knows them ({reason}):"
            " give that of rank 0's."
        )
    return host, int(port)


def _unknown(host: str, port: int) -> str | None:
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return None
    except OSError as error:
        return error.strerror or str(error)
    except UnicodeError as error:  # a part of more than 63 letters, or of none
        return str(error)


def _listener(port: int) -> socket.socket:
    """Listen at every address of this host, as torch does. Raises MeetingError."""
    try:
        with suppress(OSError):  # none of the newer kind, or a port in use, which the next try finds out as well
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        raise MeetingError(
            f"MASTER_PORT={port} cannot be used on this host ({error.strerror}): another job may have it; give "
            "another, such as torchrun --master-port 0 or --standalone on one host."
        ) from None


def _is_here(host: str, port: int, each: float) -> None:
    """Check on rank 0 that MASTER_ADDR leads to this host, at any port or (through a gateway) at this one."""
    for tried in (0, port):
        with _listener(tried) as listener:
            reason = reason_of_silence(host, listener.getsockname()[1], each)
        if reason is None:
            return
    raise MeetingError(
        f"MASTER_ADDR={host} does not lead to {socket.gethostname()}, where rank 0 runs ({reason}): give this host's "
        "name or address."
    )


def reason_of_silence(host: str, port: int, seconds: float) -> str | None:
    """Return why no connection to the address is accepted; None if one is."""
    try:
        socket.create_connection((host, port), timeout=seconds).close()
        return None
    except OSError as error:
        return error.strerror or str(error)


def _answers(host: str, port: int, wait: float, each: float, given_up: Callable[[], bool]) -> None:
    waiting = f"waiting for rank 0 at {host}:{port}"
    reason = _until_none(lambda: reason_of_silence(host, port, each), wait, waiting, given_up)
    if reason is not None:
        raise MeetingError(
            f"nothing answers at MASTER_ADDR={host}, MASTER_PORT={port} after {wait:.0f} s ({reason}): does rank 0 "
            f"run there, and may {socket.gethostname()} reach it?"
        )


def _until_none(
    problem: Callable[[], str | None], wait: float, waiting: str, given_up: Callable[[], bool] = _never
) -> str | None:
    """Look again for `wait` seconds, or until given up; say once what for if that takes long. Returns what is wrong at
    the end."""
    began = time.monotonic()
    deadline, told = began + wait, False
    while (reason := problem()) is not None and time.monotonic() < deadline and not given_up():
        if not told and time.monotonic() >= began + _QUIET:
            complain(f"{waiting} ({reason})")
            told = True
        time.sleep(max(0.0, min(_PAUSE, deadline - time.monotonic())))
    return reason
