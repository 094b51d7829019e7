"""The memory that a unit keeps between its ops."""

from __future__ import annotations

from helixpipe.lowering.bound import BoundCosts
from helixpipe.program.program import Op
from helixpipe.program.tasks import Buffer


def held_by(bound: BoundCosts, op: Op) -> float:
    """Return the memory that the unit of an F holds until its I."""
    return bound.size(Buffer("saved", 0, *op[1:])) + stored_by(bound, op)


def stored_by(bound: BoundCosts, op: Op) -> float:
    """Return the part of `held_by` that is freed only after the I: keys and values of a microbatch and their gradients,
    which live as long as its first chunk.
    """
    if op.chunk > 0:
        return 0.0
    return sum(bound.size(Buffer(kind, 0, op.stage, op.microbatch)) for kind in ("keys_values", "kv_gradients"))
