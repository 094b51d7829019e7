"""A kind of traffic of one's own: tokens go to experts on the ranks of other pipelines, and back.

Pipelines that share experts run the same streams, so an exchange is a collective that in the graph of one pipeline has
a single rank. All that it takes is here: two rows of the table of kinds, a pass, and what moves the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from helixpipe.lowering.build import PASSES, Pass, build_graph
from helixpipe.lowering.graph import Draft
from helixpipe.lowering.lower import lower
from helixpipe.lowering.project import LoweredProgram
from helixpipe.program import transfer
from helixpipe.program.costs import Costs
from helixpipe.program.program import Program
from helixpipe.program.transfer import Transfer, TransferKind, Waited
from helixpipe.runtime.executor import Executor
from helixpipe.runtime.step_run import StepRun
from helixpipe.runtime.traffic import StartedHandler

ROWS = {
    "dispatch": TransferKind(
        "collective", "activation", Waited.READER, "dispatch", "#caa", "the tokens of {op}", "sharded"
    ),
    "combine": TransferKind(
        "collective", "activation", Waited.READER, "combine", "#aca", "what experts made of {op}", "sharded"
    ),
}


@contextmanager
def two_more_kinds() -> Iterator[None]:
    """While a test runs, the table has these two rows as well."""
    transfer._ROWS.update(ROWS)
    try:
        yield
    finally:
        for kind in ROWS:
            del transfer._ROWS[kind]


def expert_exchange(draft: Draft) -> None:
    """Around every stage that is an MLP alone: dispatch what it takes, combine what it gives."""
    graph = draft.graph
    readers = {number: task for task, numbers in enumerate(graph.reads) for number in numbers}
    for task, op in enumerate(graph.ops):
        if op.kind in "FBI" and {piece.kind for piece in draft.program.stages[op.stage].pieces} == {"mlp"}:
            graph.takes[task] = _between(draft, "dispatch", task, graph.takes[task], task)
            _between(draft, "combine", task, graph.gives[task], readers[graph.gives[task]])


def _between(draft: Draft, kind: str, task: int, number: int, reader: int) -> int:
    """A transfer that takes a buffer, and fills another for the one who would have read it."""
    graph, op = draft.graph, draft.graph.ops[task]
    before, after = (-1, task) if kind == "dispatch" else (task, -1)
    exchange = draft.transfer(kind, (graph.ranks[task],), op.unit, before, after, takes=(number,))
    own = draft.buffer(graph.buffers[number], exchange)
    for table in (graph.reads, graph.frees):
        table[reader] = tuple(each for each in table[reader] if each != number)
    draft.read(reader, own)
    graph.frees[reader] += (own,)
    if reader < graph.num_ops:
        graph.takes[reader] = own
    return own


ALL_TO_ALL = Pass(expert_exchange, frozenset(ROWS), frozenset({"activation", "gradient"}))


def with_experts(program: Program, experts: int, costs: Costs | None = None) -> LoweredProgram:
    """Lowered, with an exchange among so many pipelines around every MLP that is a stage of its own. `sharded` counts
    the pipelines; weights are whole, nothing is offloaded, and no ops are pairs."""
    program = replace(program, sharded=experts)
    passes = (*(each for each in PASSES if each.gives and not each.gives & {"gather", "offload"}), ALL_TO_ALL)
    program.derive("graph", None, lambda: build_graph(replace(program), passes=passes))
    return lower(program, costs)


class ExpertRun(StepRun):
    """A step with the handler of both kinds."""

    exchange: Callable[[Tensor], Tensor]

    def __init__(self, *arguments: object):
        super().__init__(*arguments)
        self._started |= dict.fromkeys(ROWS, StartedHandler(self._swap))

    def _swap(self, moved: Transfer) -> None:
        task = self.graph.task(moved)
        (taken,), (made,) = self.graph.reads[task], self.graph.writes[task]
        tensors = tuple(map(self.exchange, self.buffers.pop(taken)))
        self.buffers[made] = (tensors, self.transport.mark()) if made in self.plan.leaving else tensors


def expert_executor(exchange: Callable[[Tensor], Tensor]) -> type[Executor]:
    """An executor whose steps exchange tokens so."""
    run = type("Run", (ExpertRun,), {"exchange": staticmethod(exchange)})
    return type("WithExperts", (Executor,), {"step_run": run})


def exchanged(hidden: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    """[b, s, h] whose s rows are as many equal parts as the group has ranks: part i goes to rank i."""
    parts = hidden.unflatten(1, (group.size(), -1)).movedim(1, 0).contiguous()
    came = torch.empty_like(parts)
    torch.distributed.all_to_all_single(came.view(-1), parts.view(-1), group=group)
    return came.movedim(0, 1).flatten(1, 2)
