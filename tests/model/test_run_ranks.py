"""tests/distributed.py itself: what happens when a rank fails (that it works is shown by all tests that use it)."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import run_ranks


def fail_on_last_rank(rank: int, world_size: int) -> None:
    if rank == world_size - 1:
        raise ValueError("the reason")
    torch.distributed.barrier()


def test_a_failing_ranks_traceback_is_raised_and_the_others_are_killed() -> None:
    with pytest.raises(RuntimeError, match=r"rank 1 failed(.|\n)*fail_on_last_rank(.|\n)*the reason"):
        run_ranks(fail_on_last_rank, 2, timeout=300.0)  # the other rank would wait in the barrier until then
