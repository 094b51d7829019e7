"""A step that tells what its units hold, counted in storages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.accounting import SavedBytes
from helixpipe.lowering.lower import lower
from helixpipe.model import PipelineModel
from helixpipe.program.program import Program
from helixpipe.runtime.executor import Executor, Step, StepRun
from helixpipe.runtime.step import PlannedOp
from helixpipe.runtime.transport import SingleRankTransport


class _Watched(StepRun):
    """Looks at what is held after F and whenever a segment of the backward is complete. totals: of all units, after the
    F of each stage. No unit shares memory with the next, as if they were on other ranks."""

    account: SavedBytes
    after_forward = most = 0

    def _forward(self, op: PlannedOp) -> None:
        super()._forward(op)
        self.after_forward = self._held(self.buffers[op.saved])
        saved = [self.buffers[number] for number in set(self.graph.saved) & set(self.buffers)]
        self.totals = [*getattr(self, "totals", []), self._held([graph for graphs in saved for graph in graphs])]

    def _deliver(self, op: PlannedOp, tensors: tuple[torch.Tensor, ...]) -> None:
        super()._deliver(op, tuple(tensor.clone() for tensor in tensors))

    def _through(self, op: PlannedOp, graph: Any, gradients: Any) -> Any:
        self.most = max(self.most, self._held([*self.buffers[op.saved], graph]))
        return super()._through(op, graph, gradients)

    def _held(self, graphs: Sequence[Any]) -> int:
        return self.account.with_others(tensor for graph in graphs for tensor in graph.inputs)


def watched(program: Program, model: PipelineModel, account: SavedBytes, step: Step) -> _Watched:
    """A step of a program on one rank."""

    class Run(_Watched):
        pass

    Run.account = account
    executor = Executor(0, model, SingleRankTransport())
    executor.step_run = Run
    executor.run(lower(program), step)
    assert isinstance(executor.last, _Watched)
    return executor.last
