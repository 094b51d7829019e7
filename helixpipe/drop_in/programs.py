"""A schedule's program as chunks of a user's own model can run it."""

from __future__ import annotations

from dataclasses import replace

from helixpipe.program.program import Program, Unit
from helixpipe.program.stages import Activations


def for_own_chunks(program: Program, min_elements: int) -> Program:
    """Return the program with the head in the stage before it, where both are on one rank, since a model has both in
    one chunk; and with all that is offloaded copied back during the op before, since how long that takes is unknown.

    min_elements: of a tensor that is offloaded, of half precision. A head that a schedule (sppo) has in a stage of its
    own runs right before the other's backward; here its logits are made with the other's forward.
    """
    program = _with_joined_head(program)
    activations = {
        unit: replace(each, ahead=max(each.ahead, 1)) if each.offload else each
        for unit, each in program.activations.items()
    }
    return replace(program, activations=activations, min_offloaded_bytes=2 * min_elements if activations else 0)


def _with_joined_head(program: Program) -> Program:
    last = len(program.stages) - 1
    if last < 1 or [piece.kind for piece in program.stages[last].pieces] != ["head"]:
        return program
    ranks_of = [{rank for rank, ops in enumerate(program.ranks) if any(op.stage == each for op in ops)}
                for each in (last - 1, last)]  # fmt: skip
    if ranks_of[0] != ranks_of[1] or len(ranks_of[1]) > 1:
        return program
    before = program.stages[last - 1]
    whole = replace(before, pieces=(*before.pieces, *program.stages[last].pieces))

    def joined(unit: Unit, each: Activations) -> Activations:
        if unit.stage != last - 1:
            return each
        runs = ((whole.pieces if run == before.pieces else run, share) for run, share in each.offload)
        return replace(each, offload=tuple(runs))

    return replace(
        program,
        stages=(*program.stages[: last - 1], whole),
        ranks=tuple(tuple(op for op in ops if op.stage != last) for ops in program.ranks),
        activations={unit: joined(unit, each) for unit, each in program.activations.items() if unit.stage != last},
    )
