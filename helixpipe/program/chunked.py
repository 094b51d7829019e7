"""Programs of whole microbatches whose sequences are cut: every op is run chunk by chunk."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from helixpipe.program.program import Op, Program
from helixpipe.program.workload import Workload


def in_chunks(program: Program, workload: Workload) -> Program:
    """Return a program of whole microbatches with these cut as the workload says: in the place of each op are those of
    its chunks, forwards in the order of the sequence and backwards in reverse, in which gradients of keys and values
    come. Where a backward follows its F at once and the stage has no attention, each chunk's follows its own.

    What an op waits for is in the places before its own, as it was, so the program can be run if the given one can.
    """
    counts = [len(chunks) for chunks in workload.microbatches]
    ranks, last = [], dict[Op, Op]()
    for ops in program.ranks:
        order: list[Op] = []
        for unit, own in groupby(ops, key=lambda op: op.unit):
            run, chunks = list(own), range(counts[unit.microbatch])
            forwards = [op for op in run if op.kind == "F"]
            backwards = [op for op in run if op.kind != "F"]
            if program.stages[unit.stage].has_attention or not backwards:
                order += [op._replace(chunk=chunk) for op in forwards for chunk in chunks]
                forwards = []
            order += [op._replace(chunk=chunk) for chunk in reversed(chunks) for op in (*forwards, *backwards)]
            last |= dict.fromkeys(run, order[-1])
        ranks.append(tuple(order))
    activations = {
        unit._replace(chunk=chunk): own
        for unit, own in program.activations.items()
        for chunk in range(counts[unit.microbatch])
    }
    turns = tuple(tuple(last[op] for op in ends) for ends in program.turns)
    return replace(program, ranks=tuple(ranks), workload=workload, activations=activations, turns=turns)
