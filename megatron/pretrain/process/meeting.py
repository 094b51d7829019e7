"""Whether the ranks can meet: the address and port that the launcher gave, tried before torch waits for them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping

from helixpipe.common.errors import UserError
from megatron.pretrain.process.output import complain

_TRY, _WAIT = 10.0, 300.0  # seconds of a try, and in all


class MeetingError(UserError):
    """Rank 0 is not there, so it cannot say so."""


def check_master(environ: Mapping[str, str] | None = None, *, wait: float = _WAIT, each: float = _TRY) -> None:
    """Make sure that rank 0 answers where MASTER_ADDR and MASTER_PORT say, or, on rank 0, that it can listen there.

    Waits for another host `wait` seconds at most, in tries of `each`, and says for whom. Raises UserError.
    """
    environ = os.environ if environ is None else environ
    host, port = environ.get("MASTER_ADDR", ""), _port(environ)
    served = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by torchrun, on rank 0's host
    if environ.get("RANK", "0") == "0" and not served:
        _can_listen(port)
    else:  # torchrun's own process, where it is on this host, answers or is gone
        _answers(host, port, min(wait, each) if served and environ.get("GROUP_RANK") == "0" else wait, each)


def _port(environ: Mapping[str, str]) -> int:
    given = environ.get("MASTER_PORT")
    if given is None:
        raise UserError("MASTER_ADDR is set and MASTER_PORT is not: set both, or start with torchrun.")
    if not given.isdecimal() or not 0 < int(given) < 65536:
        raise UserError(f"MASTER_PORT={given} is not a port, which is a number from 1 to 65535.")
    return int(given)


def _can_listen(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise UserError(
                f"MASTER_PORT={port} cannot be used on this host ({error.strerror}): another job may have it; give "
                "another, such as torchrun --master-port 0 or --standalone on one host."
            ) from None


def _answers(host: str, port: int, wait: float, each: float) -> None:
    deadline, told = time.monotonic() + wait, False
    while True:
        try:
            socket.create_connection((host, port), timeout=each).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() >= deadline:
            raise MeetingError(
                f"nothing answers at MASTER_ADDR={host}, MASTER_PORT={port} after {wait:.0f} s ({reason}): does rank 0 "
                f"run there, and may {socket.gethostname()} reach it?"
            )
        if not told:
            complain(f"waiting for rank 0 at {host}:{port} ({reason})")
            told = True
        time.sleep(max(0.0, min(1.0, deadline - time.monotonic())))
