"""One device for all gloo groups of a process.

torch makes a device for each group: a listening socket, and a thread that looks for news a hundred times a second. A
rank of a training run has about 18 groups, most of them megatron-core's, and so spent 1.8 % of a processor on looking.
One device carries the connections of any number of groups, each by its own number.

torch's new_group hands no options to gloo (`_new_process_group_helper` in torch/distributed/distributed_c10d.py), and
its own constructor reads GLOO_SOCKET_IFNAME and the like. So it makes the default group's device, and later groups,
whoever makes them, take that one.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_Gloo: Any = torch._C._distributed_c10d.ProcessGroupGloo


class GlooOnOneDevice(_Gloo):
    """A gloo group on the device of the default group; on its own where that is not over gloo, or is this one."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta):
        default = _default_options()
        if default is None:
            super().__init__(store, rank, size, timeout)
            return
        options = _Gloo._Options()
        options._timeout, options._devices, options._threads = timeout, default._devices, default._threads
        super().__init__(store, rank, size, options)


def share_gloo_device() -> None:
    """Have torch.distributed make its gloo groups so from now on, in this process. Does nothing where they are not
    torch's own, as on the fake device."""
    module: Any = dist.distributed_c10d
    if module.ProcessGroupGloo is _Gloo:
        module.ProcessGroupGloo = GlooOnOneDevice


def _default_options() -> Any:
    """Return gloo's options of the default group; None if there is none over gloo."""
    if not dist.is_initialized():
        return None
    try:
        backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    except RuntimeError:  # it carries tensors of GPUs alone
        return None
    return backend.options if isinstance(backend, _Gloo) else None
