"""What the machine of rendezvous.py checks of weights in parts: whole for the ops that need them, and few at a time."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection
from dataclasses import replace
from random import Random
from typing import Any

from helixpipe.lowering.project import Action, LoweredProgram
from helixpipe.program.program import Op, Program

MOST = 2
"""Stages whose weights are whole beside those in use, and gradients that ops have made and are not scattered."""


def sharing_program(program: Program, seed: int) -> Program:
    """One in two with weights in parts."""
    return replace(program, sharded=Random(seed).choice((1, 2)))


class Sharing:
    """pending: of each rank, gathers that no op has used yet, by stage. now: the stage whose weights are in use."""

    def __init__(self, lowered: LoweredProgram) -> None:
        self.program = lowered.program
        self.copied = [frozenset(self.program.copied_stages(rank)) for rank in range(self.program.num_ranks)]
        self.pending: list[dict[int, deque[Any]]] = [defaultdict(deque) for _ in self.copied]
        self.now = [-1 for _ in self.copied]
        self.made: list[list[Op]] = [[] for _ in self.copied]
        self.scattered: set[Op] = set()

    def uses(self, rank: int, op: Op, kinds: str) -> bool:
        stage = self.program.stages[op.stage]
        here = self.program.sharded > 1 and stage.has_weights and op.stage not in self.copied[rank]
        return here and op.kind in kinds

    def ready(self, rank: int, op: Op, complete: Collection[Any]) -> bool:
        """Whether the op need not wait for weights."""
        if not self.uses(rank, op, "FRBI") or self.now[rank] == op.stage:
            return True
        assert self.pending[rank][op.stage], f"no gather for {op}"
        return self.pending[rank][op.stage][0] in complete

    def run(self, rank: int, op: Op) -> None:
        if self.uses(rank, op, "FRBI") and self.now[rank] != op.stage:
            assert self.pending[rank][op.stage].popleft().op == op
            self.now[rank] = op.stage
        if self.uses(rank, op, "BW"):
            self.made[rank].append(op)
            assert len(self.made[rank]) <= MOST

    def take(self, rank: int, action: Action, collective: Any) -> None:
        """A gather or scatter is started, or a scatter waited for."""
        assert collective.ranks == (rank,)
        if collective.kind == "gather":
            assert action is Action.START
            self.pending[rank][collective.unit.stage].append(collective)
            assert sum(map(len, self.pending[rank].values())) <= MOST
        elif action is Action.START:
            assert collective.op in self.made[rank] and collective.op not in self.scattered
            self.scattered.add(collective.op)
        else:
            self.made[rank].remove(collective.op)

    def finish(self) -> None:
        assert not any(self.made) and not any(queue for rank in self.pending for queue in rank.values())
        makers = [op for rank, ops in enumerate(self.program.ranks) for op in ops if self.uses(rank, op, "BW")]
        assert self.scattered == set(makers)
