"""Tiny programs for test_checker.py: streams, memory of the device, NCCL. See `host_programs` for the rest.

Each is right in one way and wrong in another; its docstring is what is said of the latter.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

GROUP: Any = SimpleNamespace(rank=lambda: 0)


def read_beside(made: torch.Tensor) -> Any:
    """A stream that reads a tensor once it has been made."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        made * 2
    return side


# ------------------------------------------------------------------------------------------------- streams and events


def reads_in_another_stream(right: bool) -> None:
    """the read by mul in stream 2 is not after the write by ones in compute"""
    made, side = torch.ones(4), torch.cuda.Stream()
    if right:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        made * 2
    side.synchronize()


def marks_too_early(right: bool) -> None:
    """the read by mul in stream 2 is not after the write by add_ in compute"""
    made, side = torch.ones(4), torch.cuda.Stream()
    early = torch.cuda.current_stream().record_event()
    made.add_(1)
    side.wait_event(torch.cuda.current_stream().record_event() if right else early)
    with torch.cuda.stream(side):
        made * 2
    side.synchronize()


def waits_for_an_event_never_recorded(right: bool) -> None:
    """the read by mul in stream 2 is not after the write by ones in compute"""
    made, side, event = torch.ones(4), torch.cuda.Stream(), torch.cuda.Event()
    if right:
        event.record()
    event.wait(side)
    with torch.cuda.stream(side):
        made * 2
    side.synchronize()


def writes_what_another_stream_reads(right: bool) -> None:
    """the write by add_ in compute is not after the read by mul in stream 2"""
    made, side = torch.ones(2, 4), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        made.t() * 2
    if right:
        torch.cuda.current_stream().wait_stream(side)
    made[0].add_(1)
    side.synchronize()


def writes_into_an_output(right: bool) -> None:
    """the write by mul in stream 2 is not after the read by mul in compute"""
    made, side = torch.ones(4), torch.cuda.Stream()
    made * 2
    if right:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.mul(torch.ones(4), 3, out=made)
    side.synchronize()


# ----------------------------------------------------------------------------------------------------------- memory


def frees_what_another_stream_reads(right: bool) -> None:
    """the write by zeros of memory given out again in compute is not after the read by mul of memory of compute"""
    made = torch.ones(4)
    side = read_beside(made)
    if right:
        made.record_stream(side)
    del made
    torch.zeros(4)
    side.synchronize()


def frees_before_the_host_knows(right: bool) -> None:
    """whatever is allocated next in compute is not after the read by mul of memory of compute that has gone"""
    made = torch.ones(4)
    side = read_beside(made)
    if right:
        side.synchronize()
    del made


def records_before_the_last_use(right: bool) -> None:
    """whatever is allocated next in compute is not after the read by add of memory of compute that has gone"""
    made, sides = torch.ones(4), [torch.cuda.Stream(), torch.cuda.Stream()]
    for side in sides:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(sides[0]):
        made * 2
    made.record_stream(sides[0])
    with torch.cuda.stream(sides[0] if right else sides[1]):
        made + 2
    del made


def empties_what_another_stream_reads(right: bool) -> None:
    """is not after the read by mul of memory of compute that was resized in stream 2"""
    made = torch.ones(4)
    side = read_beside(made)
    if right:
        torch.cuda.current_stream().wait_stream(side)
    made.untyped_storage().resize_(0)
    made.untyped_storage().resize_(16)
    made.zero_()


def uses_memory_of_another_stream(right: bool) -> None:
    """the write by fill_ in stream 2 is not after what was there before in compute"""
    torch.ones(4)
    made, side = torch.empty(4), torch.cuda.Stream()
    if right:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        made.fill_(1)
    side.synchronize()


# --------------------------------------------------------------------------------------------------------------- NCCL


def frees_what_is_being_sent(right: bool) -> None:
    """of memory given out again in compute is not after the read by the send to 1 of memory of compute that has gone"""
    made = torch.ones(4)
    work = dist.isend(made, group=GROUP, group_dst=1)
    while right and not work.is_completed():
        pass
    del made
    torch.zeros(4)
    work.wait()


def changes_what_is_being_sent(right: bool) -> None:
    """the write by add_ in compute is not after the read by the send to 1 in communicator of ranks [0, 1] of group 0"""
    made = torch.ones(4)
    work = dist.isend(made, group=GROUP, group_dst=1)
    if right:
        work.wait()
    made.add_(1)
    work.wait()


def sends_from_another_stream(right: bool) -> None:
    """the read by the send to 1 in communicator of ranks [0, 1] of group 0 is not after the write by ones in compute"""
    made, side = torch.ones(4), torch.cuda.Stream()
    if right:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work = dist.isend(made, group=GROUP, group_dst=1)
    work.wait()


def uses_what_has_not_come(right: bool) -> None:
    """the read by mul in compute is not after the write by the receive from 1"""
    buffer = torch.empty(4)
    work = dist.irecv(buffer, group=GROUP, group_src=1)
    if right:
        work.wait()
    buffer * 2
    work.wait()


def waits_in_another_stream(right: bool) -> None:
    """the read by mul in compute is not after the write by the receive from 1"""
    buffer, side = torch.empty(4), torch.cuda.Stream()
    work = dist.irecv(buffer, group=GROUP, group_src=1)
    with torch.cuda.stream(torch.cuda.current_stream() if right else side):
        work.wait()
    buffer * 2
    work.wait()


def passes_on_by_another_communicator(right: bool) -> None:
    """the read by the send to 2 in communicator of ranks [0, 2] of group 0 is not after the write by the receive"""
    buffer = torch.empty(4)
    works = [dist.irecv(buffer, group=GROUP, group_src=1)]
    works.append(dist.isend(buffer, group=GROUP, group_dst=1 if right else 2))
    for work in works:
        work.wait()


def receives_before_its_place(right: bool) -> None:
    """the receive from 1 in communicator of ranks [0, 1] of group 0 does not wait for its place"""
    side = torch.cuda.Stream()
    torch.ones(4)
    if right:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        buffer = torch.empty(4)
        work = dist.irecv(buffer, group=GROUP, group_src=1)
    work.wait()


def reads_a_sum_too_early(right: bool) -> None:
    """the read by _local_scalar_dense in compute is not after the write by the all-reduce in communicator of group 0"""
    total = torch.ones(1)
    work = dist.all_reduce(total, group=GROUP, async_op=True)
    assert work is not None
    if right:
        work.wait()
    total.item()
    work.wait()


def frees_what_is_being_gathered_into(right: bool) -> None:
    """the write by zeros of memory given out again in compute is not after the write by the gather of memory of"""
    whole = torch.empty(8)
    work = dist.all_gather_into_tensor(whole, torch.ones(4), group=GROUP, async_op=True)
    assert work is not None
    if right:
        work.wait()
    del whole
    torch.zeros(8)
    work.wait()


def changes_what_is_being_scattered(right: bool) -> None:
    """the write by zero_ in compute is not after the read by the scatter in communicator of group 0"""
    whole, part = torch.ones(8), torch.empty(4)
    work = dist.reduce_scatter_tensor(part, whole, group=GROUP, async_op=True)
    assert work is not None
    if right:
        work.wait()
    whole.zero_()
    work.wait()


PROGRAMS = [
    frees_what_is_being_gathered_into,
    changes_what_is_being_scattered,
    reads_in_another_stream,
    marks_too_early,
    waits_for_an_event_never_recorded,
    writes_what_another_stream_reads,
    writes_into_an_output,
    frees_what_another_stream_reads,
    frees_before_the_host_knows,
    records_before_the_last_use,
    empties_what_another_stream_reads,
    uses_memory_of_another_stream,
    frees_what_is_being_sent,
    changes_what_is_being_sent,
    sends_from_another_stream,
    uses_what_has_not_come,
    waits_in_another_stream,
    passes_on_by_another_communicator,
    receives_before_its_place,
    reads_a_sum_too_early,
]
