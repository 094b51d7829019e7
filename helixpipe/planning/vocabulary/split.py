"""A head whose vocabulary is divided over all ranks: every microbatch on each of them."""

from __future__ import annotations

from dataclasses import replace

from helixpipe.planning.vocabulary.spread import HEAD, head_ops, with_heads, without_head
from helixpipe.program.costs import Costs
from helixpipe.program.program import Op, Program
from helixpipe.program.stages import Stage, split_head


def splittable(program: Program) -> bool:
    """Return whether the head can be divided over all ranks: there are several, it is whole and in one place, and no
    weights travel.
    """
    return (
        program.num_ranks > 1
        and not program.forward_only
        and all(stage.owner is None for stage in program.stages)
        and program.stages[-1].pieces[-1] == HEAD
        and program.stages[-1].placement == "resident"
    )


def split_heads(program: Program, costs: Costs, split: bool = False) -> Program:
    """Divide the head's vocabulary over all ranks (`stages.split_head`): the final norm stays with the last stage, and
    each part is a stage of its own.

    Each part goes forward and at once backward, on every rank, when the rest of the last stage would have begun its
    backward. split: where the last stage's backward is split, so are the parts'. The program must be `splittable`.
    """
    last, rest = program.stages[-1], len(program.stages) - 1
    norm, *parts = split_head(program.num_ranks)
    own = without_head(last.activations)
    rest_of_last = replace(last, pieces=(*last.pieces[:-1], norm), recompute=own.recompute)
    stages = (*program.stages[:rest], rest_of_last, *(Stage((part,)) for part in parts))

    def heads(op: Op) -> list[tuple[int, tuple[Op, ...]]]:
        return [(rank, head_ops(op, rest + 1 + rank, split)) for rank in range(program.num_ranks)]

    ranks = with_heads(program, costs, rest, heads)
    activations = {
        unit: without_head(each) if unit.stage == rest else each for unit, each in program.activations.items()
    }
    return replace(program, stages=stages, ranks=ranks, activations=activations)
