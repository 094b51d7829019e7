"""What costs say of one op, message or buffer of a program, for tests that name these by number."""

from __future__ import annotations

from copy import copy

from helixpipe.costs.counted_bytes import CountsBytes
from helixpipe.lowering.bound import BoundCosts
from helixpipe.program.costs import Contents, Costs, Load
from helixpipe.program.program import Op, Program
from helixpipe.program.tasks import Buffer
from helixpipe.program.transfer import Transfer


def op_time(costs: Costs, program: Program, op: Op) -> float:
    """Of the op alone, without what a backward recomputes."""
    return costs.op_time(BoundCosts(program, costs).work(op))


def message_bytes(costs: CountsBytes, program: Program, message: Transfer) -> float:
    return costs.size(BoundCosts(program, costs).load(message.kind, message.ranks, message.unit).contents)


def copy_time(costs: Costs, size: float, inward: bool) -> float:
    """Of a copy of so much between a device and its host."""
    return _of_size(costs, size).transfer_time(_copy(inward))


def copying_time(costs: Costs, size: float, inward: bool) -> float:
    """Return what it takes of its rank's own time."""
    return _of_size(costs, size).handling_time(_copy(inward), not inward)


def _copy(inward: bool) -> Load:
    return Load("fetch" if inward else "offload", (), Contents("offloaded", (), (), None))


def _of_size(costs: Costs, size: float) -> Costs:
    """The same costs, to which every buffer has that size."""
    sized = copy(costs)
    object.__setattr__(sized, "__class__", type("Sized", (type(costs),), {"size": lambda self, contents: size}))
    return sized


def sizes(costs: Costs, program: Program, op: Op, *kinds: str) -> float:
    """Of the buffers of those kinds of the op's unit, together."""
    bound = BoundCosts(program, costs)
    return sum(bound.size(Buffer(kind, 0, *op.unit)) for kind in kinds)


def borrowed(costs: Costs, program: Program, stage: int) -> tuple[float, float]:
    """A copy of a stage's weights, and the sum of its gradients."""
    bound = BoundCosts(program, costs)
    return bound.size(Buffer("weights", 0, stage)), bound.size(Buffer("weight_gradients", 0, stage))
