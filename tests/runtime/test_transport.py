"""Messages over gloo: passed on when they arrive, kept no longer than need be, and lost."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helixpipe.runtime.gloo import HELD_BYTES, GlooReceipt, GlooTransport
from helixpipe.runtime.transport import Transport, make_transport
from tests.distributed import run_ranks

SIZE = 1 << 16


def pass_on(rank: int, world_size: int, steps: int, messages: int) -> list[list[float]]:
    """Rank 0 sends, the others pass on before they have waited; what each has then received, step by step."""
    own = make_transport(dist.group.WORLD, torch.device("cpu"))
    shapes, found = [torch.Size([SIZE]), torch.Size([3])], []
    for step in range(steps):
        values = [float(10 * step + number) for number in range(messages)]
        numbers = [number * world_size + rank for number in range(messages)]  # those that this rank sends
        if rank == 0:
            for number, value in zip(numbers, values, strict=True):
                own.send((torch.full((SIZE,), value), torch.full((3,), -value)), 1, number)
            found.append(values)
        else:
            receipts = [own.receive(shapes, torch.float32, rank - 1, number - 1) for number in numbers]
            for receipt, number in zip(reversed(receipts), reversed(numbers), strict=True):
                if rank + 1 < world_size:
                    own.pass_on(receipt, rank + 1, number)
            received = [receipt.wait() for receipt in receipts]
            assert all((first == -second[0]).all() for first, second in received)
            found.append([second[0].item() * -1 for _, second in received])
        own.finish()
    assert finish_waits(rank, own), "the step ended before what was sent had left"
    own.close()
    return found


def finish_waits(rank: int, own: Transport) -> bool:
    """Whether rank 0 does not come to the end of a step while rank 1 has not asked for what it has sent."""
    waits = True
    if rank == 0:
        own.send((torch.ones(SIZE),), 1, 1000)
        ending = threading.Thread(target=own.finish, daemon=True)
        ending.start()
        ending.join(0.2)
        waits = ending.is_alive()
    dist.barrier()
    if rank == 1:
        assert own.receive([torch.Size([SIZE])], torch.float32, 0, 1000).wait()[0].sum() == SIZE
    if rank == 0:
        ending.join()
    return waits


def test_what_arrives_goes_on_without_being_waited_for() -> None:
    sent, *received = run_ranks(pass_on, 4, 3, 5)
    assert received == [sent] * 3


def bytes_kept(rank: int, world_size: int, steps: list[list[int]]) -> list[tuple[int, int]]:
    """Rank 0 sends halves of tensors of these sizes, step by step; the bytes of them that it keeps once all have been
    received, which may take its thread a moment, and after `finish`."""
    transport = make_transport(dist.group.WORLD, torch.device("cpu"))
    moments = []
    for sizes in steps:
        storages: list[tuple[weakref.ref[Any], int]] = []
        for number, size in enumerate(sizes):
            if rank == 0:
                tensor = torch.full((size,), number, dtype=torch.uint8)
                storages.append((weakref.ref(tensor.untyped_storage()), size))
                transport.send((tensor[: size // 2],), 1, number)
                del tensor
            else:
                (received,) = transport.receive([torch.Size([size // 2])], torch.uint8, 0, number).wait()
                assert (received == number).all()
        dist.barrier()
        deadline = time.monotonic() + 20.0
        while (before := kept(storages)) > HELD_BYTES and time.monotonic() < deadline:
            time.sleep(0.01)
        transport.finish()
        moments.append((before, kept(storages)))
    return moments


def kept(storages: list[tuple[weakref.ref[Any], int]]) -> int:
    return sum(size for storage, size in storages if storage() is not None)


def test_what_has_left_is_kept_up_to_a_bound_and_until_the_end_of_the_step() -> None:
    large, too_large, short = [HELD_BYTES // 2] * 5, [HELD_BYTES + 1] * 2, [1 << 10] * 50
    found = run_ranks(bytes_kept, 2, [large, too_large, short])[0]
    assert found == [(HELD_BYTES, 0), (0, 0), (sum(short), 0)]


class Lost:
    def wait(self) -> None:
        raise ConnectionError("closed by peer")


class LosingGroup:
    """A group whose message number 1 is lost."""

    def __init__(self) -> None:
        self.waited: list[int] = []

    def send(self, tensors: list[torch.Tensor], target: int, tag: int) -> Any:
        group, number = self, int(tensors[0].view(-1)[0])

        class Work(Lost):
            def wait(self) -> None:
                group.waited.append(number)
                if number == 1:
                    super().wait()

        return Work()


@pytest.mark.parametrize("size", [1, HELD_BYTES + 1], ids=["held", "waited for by the thread"])
def test_a_send_that_failed_is_told_once_all_have_been_waited_for(size: int) -> None:
    group: Any = LosingGroup()
    transport = GlooTransport(group, torch.device("cpu"))
    for number in range(3):
        transport._start([torch.full((size,), number, dtype=torch.uint8)], 1, number)
    with pytest.raises(RuntimeError, match="sending to another pipeline rank failed: closed by peer"):
        transport.finish()
    assert group.waited == [0, 1, 2]
    with pytest.raises(RuntimeError, match="closed by peer"):
        transport.send((torch.zeros(1),), 1, 3)
    transport.close()


def leave(rank: int, world_size: int) -> str:
    """Rank 1 goes without receiving; what rank 0 is told."""
    transport = make_transport(dist.group.WORLD, torch.device("cpu"))
    if rank == 0:
        with pytest.raises(RuntimeError) as told:  # the send, where it is known by then, or the end of the step
            transport.send((torch.ones(SIZE),), 1, 0)
            transport.finish()
        return str(told.value)
    dist.destroy_process_group()
    return ""


def test_a_rank_whose_peer_has_gone_ends() -> None:
    assert "sending to another pipeline rank failed" in run_ranks(leave, 2, timeout=60.0)[0]


def test_what_was_lost_is_lost_for_who_waits_second() -> None:
    """The thread that passes a message on may be the first; the op that needs it must not run on nothing."""
    receipt = GlooReceipt([torch.empty(1)], [Lost()], torch.device("cpu"))
    for _ in range(2):
        with pytest.raises(ConnectionError, match="closed by peer"):
            receipt.wait()
