"""A mistake that several ranks may see, told by the first of them alone, as a store of the job knows."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from helixpipe.common.errors import UserError
from helixpipe.common.output import complain
from megatron.pretrain.process.meeting import MeetingError, address, is_served, reason_of_silence

LAUNCHER = "HELIXPIPE_LAUNCHER"
"""Set by `helixpipe train`, which reads what its ranks complain of and prints each sentence once."""

_WAIT = 10.0  # seconds for a store to be there
_STAY = 5.0  # seconds that the rank which holds the store waits for others that may have the same to say


def tell(program: str, error: UserError) -> None:
    """Print a user's mistake, after the program's name. Where ranks cannot meet, one of each host prints it."""
    if isinstance(error, MeetingError):
        if _speaks_for_its_host():
            complain(f"{program}: {error}")
    else:
        say_once(f"{program}: {error}", str(error))


def say_once(line: str, what: str) -> None:
    """Print a line on standard error unless another rank has printed one for the same `what`."""
    rank, world = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    of_a_job = rank.isdecimal() and world.isdecimal() and int(rank) < int(world) and int(world) > 1
    if not of_a_job or LAUNCHER in os.environ:
        complain(line)
        return
    try:
        store = _store(os.environ, int(rank))
    except MeetingError:
        if _speaks_for_its_host():
            complain(line)
        return
    key = f"said in attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}: {what}"
    try:
        if store is None or store.add(key, 1) == 1:
            complain(line)
    except RuntimeError:  # the store is gone with the rank that held it
        complain(line)
        return
    if store is not None and int(rank) == 0 and not is_served(os.environ):
        with suppress(RuntimeError):
            until = time.monotonic() + _STAY
            while store.add(key, 0) < int(world) and time.monotonic() < until:
                time.sleep(0.05)


def _speaks_for_its_host() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _store(environ: Mapping[str, str], rank: int) -> Any:
    """Return the store of the process group or, before there is one, the launcher's or one that rank 0 opens; None if
    there is none. Raises MeetingError if its address cannot be known.
    """
    import torch.distributed

    dist: Any = torch.distributed
    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    host, port = address(environ, wait=0.0)
    holds = rank == 0 and not is_served(environ)
    until = time.monotonic() + _WAIT
    while not holds and reason_of_silence(host, port, _WAIT) is not None:  # torch would warn of each try
        if time.monotonic() > until:
            return None
        time.sleep(0.1)
    try:
        return dist.TCPStore(host, port, is_master=holds, timeout=timedelta(seconds=_WAIT), wait_for_workers=False)
    except RuntimeError:  # such as a port that another program has
        return None
