"""Charges the compute time that transfers take on their ranks, beside that of ops.

On a GPU nothing. On a CPU weights are packed, sent, received and added up by the cores that compute, and so is what
leaves for the host copied. That is charged to the op that comes next on the rank, or to its last one.
"""

from __future__ import annotations

from collections.abc import Iterator

from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.project import Action, LoweredProgram
from helixpipe.program.program import Op
from helixpipe.program.transfer import TRANSFER_KINDS

_HANDLED, _STARTED = frozenset({Action.SEND, Action.WAIT}), frozenset({Action.START})
"""What a rank does itself for a message, and for a copy."""


def handling_times(lowered: LoweredProgram, bound: BoundCosts) -> dict[Op, float]:
    """Return the compute time of transfers by the op that it is charged to; empty where no transfer takes any."""
    graph = lowered.graph
    handled = [transfer for transfer in graph.transfers if TRANSFER_KINDS[transfer.kind].beside_ops]
    if not any(bound.handling_time(transfer, sends) for transfer in handled for sends in (True, False)):
        return {}
    times: dict[Op, float] = {}
    for rank in range(lowered.program.num_ranks):
        waiting, last = 0.0, None
        for op, time in _stream(lowered, bound, rank):
            waiting += time
            if op is not None:
                times[op] = times.get(op, 0.0) + waiting
                waiting, last = 0.0, op
        if last is not None:
            times[last] += waiting
    return times


def _stream(lowered: LoweredProgram, bound: BoundCosts, rank: int) -> Iterator[tuple[Op | None, float]]:
    """The rank's instructions: an op, or None and what its transfer takes."""
    for action, op, transfer, _ in lowered.streams[rank]:
        if action is Action.RUN:
            yield op, 0.0
        elif transfer is not None and action in (_HANDLED if transfer.resource == "link" else _STARTED):
            yield None, bound.handling_time(transfer, action is not Action.WAIT)
