"""What the machinery asks of costs: times and memory. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from helixpipe.program.message import Message
from helixpipe.program.program import Op, Piece, Program


class Costs(Protocol):
    """What the simulator asks for: times in one unit, whatever it is, and memory in one unit.

    op_time: of an op alone; R is the forward of what its stage recomputes, and is not part of B and I.
    stash: what the op's unit keeps once its F has run (of a recomputed run its inputs alone), once its R has (all), or,
    for B and I, the most it keeps during a backward that recomputes run by run. deferred_stash: what it keeps from I
    to W. keys_values: of one microbatch whose sequence runs in chunks, in a stage, beside the units' stash: keys and
    values from the first chunk's F to its backward, their gradients from the last chunk's backward on. static_memory:
    all else of a rank that holds these pieces (weights, gradients, optimizer; 0 where unknown). copy_memory: of a copy
    of a shipped stage, its weights and the gradients summed beside them.
    """

    @property
    def memory_unit(self) -> str: ...

    def op_time(self, program: Program, op: Op) -> float: ...

    def message_time(self, program: Program, message: Message) -> float: ...

    def stash(self, program: Program, op: Op) -> float: ...

    def deferred_stash(self, program: Program, op: Op) -> float: ...

    def keys_values(self, program: Program, stage: int) -> tuple[float, float]: ...

    def static_memory(self, pieces: Sequence[Piece]) -> float: ...

    def copy_memory(self, program: Program, stage: int) -> tuple[float, float]: ...
