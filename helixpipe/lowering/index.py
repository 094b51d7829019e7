"""Indexes the ops of a program by unit, for validation and the passes."""

from __future__ import annotations

from helixpipe.program.program import Op, Program


class OpIndex:
    """Holds the ops of a program as tasks, numbered rank by rank, and finds them by unit.

    ops, ranks: of each task. rank_tasks: of each rank. units: of each task, its unit's number (`unit`); a unit of the
    stage before has the number `per_stage` lower. offsets: of each microbatch the number of its first unit in stage 0.
    tasks: for each kind of op the task of each unit that has one. twice: the tasks of the first op that is there twice;
    None where there is none.
    """

    def __init__(self, program: Program):
        self.ops: list[Op] = []
        self.ranks: list[int] = []
        self.rank_tasks: list[range] = []
        for rank, order in enumerate(program.ranks):
            self.rank_tasks.append(range(len(self.ops), len(self.ops) + len(order)))
            self.ops.extend(order)
            self.ranks.extend([rank] * len(order))
        self.per_stage = 0
        self.offsets: list[int] = []
        for chunks in program.workload.microbatches:
            self.offsets.append(self.per_stage)
            self.per_stage += len(chunks)
        self.tasks: dict[str, dict[int, int]] = {kind: {} for kind in "FBIWR"}
        self.units: list[int] = []
        self.twice: tuple[int, int] | None = None
        for task, (kind, stage, microbatch, chunk) in enumerate(self.ops):
            unit = stage * self.per_stage + self.offsets[microbatch] + chunk
            self.units.append(unit)
            first = self.tasks[kind].setdefault(unit, task)
            if first != task and self.twice is None:
                self.twice = first, task

    def unit(self, stage: int, microbatch: int, chunk: int) -> int:
        return stage * self.per_stage + self.offsets[microbatch] + chunk
