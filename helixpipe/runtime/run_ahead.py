"""Limits how far the host runs ahead of a device that works in the order enqueued: a few ops, and no further.

A mark is left in the device's stream after each op, and before an op is issued the host waits for that of the op
`OPS_AHEAD` before it. Without a bound the host would be through with a step before the device has done its first ops.
Then a receive would be posted, and its memory taken, long before the simulator has it, and NCCL, whose timeout counts
from the enqueuing, would take a message that is early for one that is late.

No order that ends without a bound gets stuck with it: what the host waits for stands before the op in the one list of
all tasks, and whatever that needs does so, too (see `lowering.lower`).

The marks also say where the device is, for the thread that watches this rank (`Position.follow`); so they are left
after waits for messages, too.
"""

from __future__ import annotations

from collections.abc import Callable

from helixpipe.watch.position import Left, Mark, RunPart

OPS_AHEAD = 4
"""Ops issued and not yet done, one that the device works on and a few after it. An op takes a millisecond or more, the
host needs less to issue one; the others bridge what holds it up for some milliseconds: an allocation, a collection of
garbage, another thread in the interpreter. Each one more is the memory of what is received for one op more."""


class RunAhead:
    """Keeps the host close to the device, step after step. new_mark: makes marks, of the kind of torch.cuda.Event; one
    with blocking=True lets the host sleep while it waits. ops: how many may be issued and not done."""

    def __init__(self, new_mark: Callable[[], Mark], ops: int = OPS_AHEAD):
        self._new_mark = new_mark
        self._ops = ops
        self._left: list[Left] = []
        self._issued = 0  # ops in `_left`
        self._count = 0
        self._free: list[Mark] = []

    def wait(self) -> None:
        """Wait, before an op is issued, until few enough ops are in progress."""
        if self._issued < self._ops:
            return
        first = next(place for place, left in enumerate(self._left) if left.is_op)
        self._left[first].mark.synchronize()  # whoever watches sees it until it is passed
        self._free += [left.mark for left in self._left[: first + 1]]  # a stream passes its marks in their order
        del self._left[: first + 1]
        self._issued -= 1

    def leave(self, part: RunPart, instruction: int, is_op: bool) -> None:
        """Leave a mark after an instruction of the device's stream, which the stream passes when the instruction is
        done. is_op: whether it counts as an op; if so, `wait` has been called for it.
        """
        mark = self._free.pop() if self._free else self._new_mark()
        mark.record()
        self._count += 1
        self._left.append(Left(self._count, part, instruction, is_op, mark))
        self._issued += is_op

    def unpassed(self) -> list[Left]:
        """Return the marks not known to be passed, oldest first; for any thread. (A list is copied in one go.)"""
        return self._left.copy()
