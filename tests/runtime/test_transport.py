"""Messages over gloo that are passed on when they arrive."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from helixpipe.runtime.transport import _GlooReceipt, make_transport
from tests.distributed import run_ranks

SIZE = 1 << 16


def pass_on(rank: int, world_size: int, steps: int, messages: int) -> list[list[float]]:
    """Rank 0 sends, the others pass on before they have waited; what each has then received, step by step."""
    transport = make_transport(dist.group.WORLD, torch.device("cpu"))
    shapes, found = [torch.Size([SIZE]), torch.Size([3])], []
    for step in range(steps):
        values = [float(10 * step + number) for number in range(messages)]
        numbers = [number * world_size + rank for number in range(messages)]  # those that this rank sends
        if rank == 0:
            for number, value in zip(numbers, values, strict=True):
                transport.send((torch.full((SIZE,), value), torch.full((3,), -value)), 1, number)
            found.append(values)
        else:
            receipts = [transport.receive(shapes, torch.float32, rank - 1, number - 1) for number in numbers]
            for receipt, number in zip(reversed(receipts), reversed(numbers), strict=True):
                if rank + 1 < world_size:
                    transport.pass_on(receipt, rank + 1, number)
            received = [receipt.wait() for receipt in receipts]
            assert all((first == -second[0]).all() for first, second in received)
            found.append([second[0].item() * -1 for _, second in received])
        transport.finish()
    transport.close()
    return found


def test_what_arrives_goes_on_without_being_waited_for() -> None:
    sent, *received = run_ranks(pass_on, 4, 3, 5)
    assert received == [sent] * 3


class Lost:
    def wait(self) -> None:
        raise ConnectionError("closed by peer")


def test_what_was_lost_is_lost_for_who_waits_second() -> None:
    """The thread that passes a message on may be the first; the op that needs it must not run on nothing."""
    receipt = _GlooReceipt([torch.empty(1)], [Lost()], torch.device("cpu"))
    for _ in range(2):
        with pytest.raises(ConnectionError, match="closed by peer"):
            receipt.wait()
