"""What costs say of one op, message or buffer of a program, for tests that name these by number."""

from __future__ import annotations

from helixpipe.costs.piece_bytes import CountsBytes
from helixpipe.lowering.bound import BoundCosts
from helixpipe.program.costs import Costs
from helixpipe.program.message import Message
from helixpipe.program.program import Op, Program
from helixpipe.program.tasks import Buffer


def op_time(costs: Costs, program: Program, op: Op) -> float:
    """Of the op alone, without what a backward recomputes."""
    return costs.op_time(BoundCosts(program, costs).work(op))


def message_bytes(costs: CountsBytes, program: Program, message: Message) -> float:
    return costs.payload_bytes(BoundCosts(program, costs).payload(message))  # type: ignore[arg-type]


def sizes(costs: Costs, program: Program, op: Op, *kinds: str) -> float:
    """Of the buffers of those kinds of the op's unit, together."""
    bound = BoundCosts(program, costs)
    return sum(bound.size(Buffer(kind, 0, *op.unit)) for kind in kinds)


def borrowed(costs: Costs, program: Program, stage: int) -> tuple[float, float]:
    """A copy of a stage's weights, and the sum of its gradients."""
    bound = BoundCosts(program, costs)
    return bound.size(Buffer("weights", 0, stage)), bound.size(Buffer("weight_gradients", 0, stage))
