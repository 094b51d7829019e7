"""Ranks tell each other over few connections: a tree of all, and one to each rank that they send to or receive from."""

from __future__ import annotations

from typing import Any

import torch

from megatron.pretrain.resilience.host_network import TREE, HostNetwork
from tests.distributed import run_ranks

RANKS = 7


def talk(rank: int, world_size: int) -> dict[str, Any]:
    """Of a ring of all ranks, whose copies are on their way while all are told something, and two that meet later."""
    before, after = (rank - 1) % world_size, (rank + 1) % world_size
    networks = HostNetwork(), HostNetwork({before, after} - {rank})  # at other addresses; others still join
    network = networks[1]
    connected = sorted(network._pairs)
    copy = torch.empty(1 << 20, dtype=torch.int64)
    pending = (
        [network.send(torch.full_like(copy, rank), after), network.receive(copy, before)] if world_size > 1 else []
    )
    gathered = network.gather("x" * 1000 * rank if rank % 2 else {"rank": rank})
    for each in pending:
        each.wait()
    late = torch.full((3,), float(rank))
    if world_size > 4 and rank in (1, 5):
        (network.send(late, 5) if rank == 1 else network.receive(late, 1)).wait()
    return {
        "gathered": gathered,
        "least": [network.least((rank - each) % world_size + each) for each in (0, 1, world_size - 1)],
        "copy": pending == [] or bool((copy == before).all()),
        "late": float(late[0]),
        "connected": connected,
    }


def check(results: list[dict[str, Any]]) -> None:
    count = len(results)
    for rank, result in enumerate(results):
        assert result["gathered"] == ["x" * 1000 * each if each % 2 else {"rank": each} for each in range(count)]
        assert result["least"] == [0, 1, count - 1]
        assert result["copy"] and result["late"] == (1.0 if rank == 5 else float(rank))
        near = {(rank - 1) % count, (rank + 1) % count, (rank - 1) // 2, 2 * rank + 1, 2 * rank + 2}
        assert result["connected"] == sorted({each for each in near if 0 <= each < count} - {rank})
        assert len(result["connected"]) <= TREE + 2


def test_all_are_told_and_two_connected() -> None:
    check(run_ranks(talk, RANKS))


def test_one_rank_has_nobody_to_tell() -> None:
    check(run_ranks(talk, 1))
