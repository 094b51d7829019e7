"""pretrain_gpt.py with a rank that is killed, by DIES in the environment: `RANK POINT STEP`, at this point of this step
(from 1). Points: before its second message (`F` on a first pipeline rank, `B` on a last), in the `sum` of gradients, in
the `update` of weights, within its own `snapshot`, before all `agree` on it, in the `copy` to its neighbour, when it
`joins` groups (STEP is then which). With STAYS, the path of a socket on which somebody stands for `helixpipe train`,
the others can leave their groups."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from helixpipe.common.groups_channel import VARIABLE


def die(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def dies(owner: Any, name: str, call: int, after: bool = False) -> None:
    """Have the process killed in this call of a method, before what it does or after."""
    original: Callable[..., Any] = getattr(owner, name)
    count = 0

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        if count == call and not after:
            die()
        result = original(*arguments, **named)
        if count == call:
            die()
        return result

    setattr(owner, name, counted)


def connect(path: str) -> None:
    """Have the rank's launcher at the other end of a connection; it is told the rank first."""
    channel = socket.socket(socket.AF_UNIX)
    channel.connect(path)
    channel.sendall(f"{os.environ['RANK']}\n".encode())
    os.environ[VARIABLE] = str(channel.detach())


def main() -> None:
    started = time.monotonic()
    if "STAYS" in os.environ:
        connect(os.environ["STAYS"])
    from helixpipe.model.device import prepare

    prepare()
    import torch
    from megatron.core.distributed import DistributedDataParallel

    from helixpipe.runtime.gloo import GlooTransport
    from megatron.pretrain import launch
    from megatron.pretrain.resilience.host_network import HostNetwork
    from megatron.pretrain.resilience.slots import Slot

    rank, point, step = os.environ.get("DIES", "-1 F 1").split()
    number = int(step)
    if rank == os.environ["RANK"]:
        messages = 4  # of this rank in a step
        calls: dict[str, Callable[[], None]] = {
            "F": lambda: dies(GlooTransport, "send", messages * (number - 1) + 2),
            "B": lambda: dies(GlooTransport, "send", messages * (number - 1) + 2),
            "sum": lambda: dies(DistributedDataParallel, "finish_grad_sync", number),
            "update": lambda: dies(torch.optim.AdamW, "step", number, after=True),
            "snapshot": lambda: dies(Slot, "complete", 2 * number - 1),  # the second of each is the neighbour's
            "agree": lambda: dies(HostNetwork, "least", 2 * number),
            "joins": lambda: dies(HostNetwork, "__init__", number),
            "copy": lambda: dies(HostNetwork, "receive", number, after=True),
        }
        calls[point]()
    sys.exit(launch.run(started))


if __name__ == "__main__":
    main()
