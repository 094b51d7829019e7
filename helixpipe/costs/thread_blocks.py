"""Thread blocks of the communicators that carry a pipeline's messages, and what they carry."""

from __future__ import annotations

MOST_BLOCKS = 32
"""NCCL's own limit of a communicator's channels, each of which a thread block serves."""


def fitting_blocks(ends: int, processors: int) -> int:
    """Thread blocks of a communicator at most, so that those of all channels of a rank are resident at once with an SM
    left. Where streams have hardware queues of their own each may have a message that waits there, and the op that
    they wait for, on some rank, must still be able to start. A power of two, since NCCL rounds its limit up to one
    (ncclTopoComputeP2pChannels).

    ends: channels that the busiest rank is an end of. processors: SMs of a device.
    """
    resident = max(1, (processors - 1) // max(ends, 1))
    return min(MOST_BLOCKS, 1 << (resident.bit_length() - 1))
