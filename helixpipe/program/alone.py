"""One microbatch of a step as a step of its own."""

from __future__ import annotations

from dataclasses import replace

from helixpipe.program.program import Op, Program, Unit
from helixpipe.program.workload import Workload


def alone(program: Program, microbatch: int) -> Program:
    """Return the program of one of a program's microbatches, which becomes number 0: the same ops on the same ranks in
    the same order, with the weights where they are.

    Forwards that ran beside another microbatch's backward run alone. The microbatch must not share a document with
    another.
    """

    def own(op: Op) -> bool:
        return op.microbatch == microbatch

    return replace(
        program,
        ranks=tuple(tuple(op._replace(microbatch=0) for op in ops if own(op)) for ops in program.ranks),
        workload=_workload(program.workload, microbatch),
        activations={
            Unit(unit.stage, 0, unit.chunk): each
            for unit, each in program.activations.items()
            if unit.microbatch == microbatch
        },
        pairs=frozenset(),
        turns=(),
    )


def _workload(workload: Workload, microbatch: int) -> Workload:
    """Return one microbatch of a workload, its documents numbered from 0."""
    chunks = workload.chunks(microbatch)
    documents = dict.fromkeys(part.document for chunk in chunks for part in chunk)
    numbers = {document: number for number, document in enumerate(documents)}
    own = tuple(tuple(part._replace(document=numbers[part.document]) for part in chunk) for chunk in chunks)
    return Workload((own,), workload.proportional)
