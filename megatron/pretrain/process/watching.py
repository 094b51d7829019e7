"""The watchdog of a training run: which ranks there are, and how long a part of the run may take."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist

from helixpipe.model.device import device
from helixpipe.watch.position import Patience, Peers, Position
from helixpipe.watch.watchdog import Watchdog
from megatron.pretrain.config import Config
from megatron.pretrain.process.parallel import Parallel

_SHARE_OF_TIMEOUT = 0.9
"""The share of torch's own timeout allowed to parts that may take minutes; torch's would end the waiting ranks."""


@contextmanager
def watched(config: Config, parallel: Parallel) -> Iterator[Position]:
    """Watch this rank; yields where it has to publish what it does. Entered on all ranks alike."""
    seconds = config.parallel.stall_timeout_seconds
    if not seconds or parallel.world_size == 1:
        yield Position()
        return
    position = Position(_peers(parallel))
    torchs = config.parallel.timeout_seconds
    limits = {
        Patience.STEP: seconds,
        Patience.LONG: max(seconds, _SHARE_OF_TIMEOUT * torchs),
        Patience.ENDLESS: math.inf,
    }
    store = dist.distributed_c10d._get_default_store()
    with Watchdog(position, store, parallel.world_size, limits, use_device=_device_of_this_thread()):
        yield position


def _device_of_this_thread() -> Callable[[], object]:
    """Return what makes the calling thread's GPU another thread's, too: each thread has its own, at first 0."""
    return partial(torch.cuda.set_device, torch.cuda.current_device()) if device().type == "cuda" else lambda: None


def _peers(parallel: Parallel) -> Peers:
    """Return the watchdog's peers."""
    return Peers(
        parallel.rank,
        tuple(dist.get_process_group_ranks(parallel.pp_group)),
        tuple(dist.get_process_group_ranks(parallel.tp_cp_group)),
        parallel.name,
    )
