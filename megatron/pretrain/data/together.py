"""Work that all ranks do, or one for all: whatever fails, on whichever rank, is raised on all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from helixpipe.common.errors import DataError, UserError

T = TypeVar("T")

_INDEX_TIMEOUT = timedelta(hours=2)  # building an index may outlast the job's distributed timeout many times


# ------------------------------------------------------------------------------------------------------ between ranks


def together(group: dist.ProcessGroup | None, work: Callable[[], T]) -> T:
    """Do `work` on every rank at once; when it fails on any, raise on all."""
    if group is None:
        return work()
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:
        failure = error
    failures: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(failures, _sentence(failure), group=group)
    if failure is not None:
        raise failure
    first = next(((rank, text) for rank, text in enumerate(failures) if text is not None), None)
    if first is not None:
        raise DataError(first[1] if first[0] == 0 else f"rank {first[0]}: {first[1]}")
    return result


def on_rank_0(group: dist.ProcessGroup | None, work: Callable[[], T]) -> T:
    """Do `work` on rank 0 and give its result, or its failure, to all."""
    result = together(group, lambda: work() if group is None or dist.get_rank(group) == 0 else None)
    box = [result]
    if group is not None:
        dist.broadcast_object_list(box, src=0, group=group)
    assert box[0] is not None
    return box[0]


def _sentence(error: Exception | None) -> str | None:
    if error is None or isinstance(error, UserError):
        return None if error is None else str(error)
    return f"{type(error).__name__}: {error}"


@contextmanager
def waiting_group() -> Iterator[dist.ProcessGroup | None]:
    """Yield a group of all ranks for waiting on rank 0's index, with a timeout of its own."""
    if not dist.is_initialized():
        yield None
        return
    group = dist.new_group(backend="gloo", timeout=_INDEX_TIMEOUT)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)
