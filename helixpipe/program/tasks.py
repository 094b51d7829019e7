"""Defines what a program is lowered to: tasks on resources over buffers. Plain data; `lowering` makes it.

A **resource** runs one task at a time: the compute stream of a rank, a link from one rank to another, a copy engine
between a device and its host, a collective of a group of ranks. A **buffer** is memory that one task writes and others
read. A **task** is an op or a transfer on one resource, with the buffers it reads, writes and frees. One task waits for
another where it reads what that one writes, or writes where that one has to be done reading: nothing else makes an
edge between resources.
"""

from __future__ import annotations

from typing import NamedTuple

RESOURCE_KINDS = ("compute", "link", "collective", "copy_out", "copy_in")


class Resource(NamedTuple):
    """A device engine, link or group that runs one task at a time.

    kind: one of `RESOURCE_KINDS`: `compute` (ranks: one), `link` (ranks: source, target), `collective` (ranks: all of
    the group), `copy_out` (device to host) and `copy_in` (ranks: one).
    """

    kind: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind}({(' -> ' if self.kind == 'link' else ', ').join(map(str, self.ranks))})"


BUFFER_KINDS = (
    "activation",
    "gradient",
    "sums",
    "turn",
    "saved",
    "recomputed",
    "deferred",
    "offloaded",
    "fetched",
    "keys_values",
    "kv_gradients",
    "weights",
    "weight_gradients",
    "gathered",
    "made_gradients",
    "workspace",
)
"""activation: what crosses the cut before its unit's stage, on its way to the unit. gradient: the gradient of what
crosses the cut after it. sums: of each part of a divided head, over its logits, and their gradients. turn: that an
op has ended, or that all ranks may begin a turn; it has no bytes. saved: what a
unit's forward saves for its backward. recomputed: what recomputation adds to that. deferred: what waits between I and
W. offloaded: the part of what is saved that leaves the device, there and, with `host`, in the host's memory. fetched:
the same when it is back. keys_values, kv_gradients: of a row (`Workload.rows`) in the layers of a stage, or with a
chunk of that alone (`Program.kv_blocks`). weights, weight_gradients: borrowed from another rank, and summed for it.
gathered, made_gradients: whole, of a stage whose weights are in parts over data-parallel ranks. workspace: what an op
needs while it runs."""

OF_WEIGHTS = frozenset({"weights", "weight_gradients", "gathered", "made_gradients"})
"""Those as large as a stage's weights or their gradients."""


class Buffer(NamedTuple):
    """Memory of one rank.

    kind: one of `BUFFER_KINDS`. rank: where it is, on its device or, with `host`, in its host's memory. stage,
    microbatch, chunk: of the unit it belongs to; microbatch and chunk are -1 for what belongs to the stage; of keys and
    values `microbatch` is the number of the row.
    """

    kind: str
    rank: int
    stage: int
    microbatch: int = -1
    chunk: int = -1
    host: bool = False
