"""All gloo groups of a process on one device, whoever makes them; messages of groups that share one do not mix."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helixpipe.runtime.gloo_device import share_gloo_device
from tests.distributed import run_ranks

CPU = torch.device("cpu")


def options(group: Any) -> Any:
    return group._get_backend(CPU).options


def made(rank: int, world_size: int, backend: str) -> tuple[int, list[float]]:
    """Return how many devices the default group and two others have, and the others' limits in seconds."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 (registers the backend "fake")

    package: Any = dist
    dist.destroy_process_group()
    for _ in range(2):  # a process that joins one job after another
        if dist.is_initialized():
            dist.destroy_process_group()
        share_gloo_device()
        dist.init_process_group(backend, store=package.HashStore(), rank=0, world_size=1)
    seconds = (40, 50)
    groups: list[Any] = [dist.new_group([0], timedelta(seconds=each), backend="gloo") for each in seconds]
    default = [dist.group.WORLD] if "gloo" in backend else []
    every = [options(group) for group in (*default, *groups)]
    devices = [device for each in every for device in each._devices]  # held, so that no two have one id
    assert len(devices) == len(every)
    return len(set(map(id, devices))), [each._timeout.total_seconds() for each in every[-2:]]


@pytest.mark.parametrize(("backend", "devices"), [("gloo", 1), ("cpu:gloo,cuda:fake", 1), ("fake", 2)])
def test_groups_share_the_default_groups_device(backend: str, devices: int) -> None:
    assert run_ranks(made, 1, backend) == [(devices, [40.0, 50.0])]


def talk(rank: int, world_size: int) -> list[float]:
    """Exchange long and short messages with the same tags in several groups at once, beside sums in another."""
    share_gloo_device()
    groups: list[Any] = [dist.new_group(range(world_size)) for _ in range(4)]
    sums = dist.new_group(range(world_size))
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    received = [torch.empty(1 << (6 * number)) for number in range(len(groups))]
    works, total = [], torch.full((1 << 18,), float(rank))
    for number, (group, into) in enumerate(zip(groups, received, strict=True)):
        works.append(group.send([torch.full_like(into, 10.0 * rank + number)], after, 7))
    works.append(dist.all_reduce(total, group=sums, async_op=True))
    works += [group.recv([into], before, 7) for group, into in reversed(list(zip(groups, received, strict=True)))]
    for work in works:
        work.wait()
    for number, into in enumerate(received):
        assert torch.equal(into, torch.full_like(into, 10.0 * before + number))
    return total.unique().tolist()


def test_groups_on_one_device_are_apart() -> None:
    assert run_ranks(talk, 3) == [[3.0]] * 3
