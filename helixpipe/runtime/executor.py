"""The executor: what runs plans on one rank for as long as the run lasts, the same one each step or another.

It knows no schedule. A step goes through the rank's instructions one by one (`step_run`).
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import cast

import torch
import torch.distributed as dist

from helixpipe.lowering.project import LoweredProgram
from helixpipe.model.attention.kv_blocks import KeyValueBlocks
from helixpipe.model.attention.kv_store import KeyValueStore
from helixpipe.model.device import device
from helixpipe.runtime.borrowed_weights import BorrowedWeights, ModelWithWeights
from helixpipe.runtime.copies import make_engine
from helixpipe.runtime.offload import Offloader
from helixpipe.runtime.recording import Record
from helixpipe.runtime.run_ahead import RunAhead
from helixpipe.runtime.step import LossSum, Model, PlanOnRank, Step
from helixpipe.runtime.step_run import ExecutionError, StepRun
from helixpipe.runtime.transport import Transport
from helixpipe.runtime.weights import StageWeights, WholeWeights
from helixpipe.watch.position import Position

__all__ = ["ExecutionError", "Executor", "LossSum", "Model", "Step", "StepRun"]

PLANS_KEPT = 8
"""Plans whose prepared form is kept: one for training, one for evaluation, one for each batch size of a ramp-up."""


class Executor:
    """Runs plans on one rank.

    rank: pipeline rank. model: holds the weights of this rank's pieces. fp32_kv_gradients: sum the gradients of keys
    and values over chunks in float32. position: where to publish which instruction comes next. weights: keeps those of
    this rank's pieces; None: they are whole in the model, and the caller sums gradients. run_ahead: keeps the host
    close to the device; None: made where that is a GPU. offloader: copies activations to the host and back; None: made
    for the device when a plan needs it. group: the ranks of the pipeline, for collectives of all of them; None: one
    rank, or programs that have none. `keys_values` is the store of the step that ran last, `last`
    the step itself.
    """

    step_run: type[StepRun] = StepRun
    """The class that runs a step; a subclass may observe it."""

    def __init__(
        self, rank: int, model: Model, transport: Transport, fp32_kv_gradients: bool = False,
        position: Position | None = None, weights: StageWeights | None = None, run_ahead: RunAhead | None = None,
        offloader: Offloader | None = None, group: dist.ProcessGroup | None = None,
    ):  # fmt: skip
        self.rank, self.model, self.transport = rank, model, transport
        self.weights = weights or WholeWeights()
        self.borrowed = BorrowedWeights(rank, cast(ModelWithWeights, model), self.weights)
        self.position = position or Position()
        if run_ahead is None and device().type == "cuda":
            run_ahead = RunAhead(lambda: torch.cuda.Event(blocking=True))
        self.run_ahead = self.position.trail = run_ahead
        self.offloader = offloader
        self.group = group
        self._fp32_kv_gradients = fp32_kv_gradients
        self._plans: dict[int, PlanOnRank] = {}

    def run(self, lowered: LoweredProgram, step: Step, record: bool = False) -> tuple[list[LossSum], Record]:
        """Run a plan's lowered program once. Gradients are added to the parameters'. Returns the loss sums of the
        microbatches whose head is here, and this rank's times when `record` (else an empty record)."""
        plan = self._plan(lowered)
        opening = lowered.openings[self.rank]
        with torch.no_grad() if plan.program.forward_only else nullcontext():
            run = self._begin(plan, step, record)
            run.execute(range(opening))
            if step.confirm is not None:
                right = step.confirm()
                self.position.begin(lowered, self.rank)
                if not right:
                    run.give_up()  # messages will have the same numbers again
                    run = self._begin(plan, step, record)
                    run.execute(range(opening))
            run.execute(range(opening, len(plan.stream)))
        self._finish(len(plan.stream))
        run.blocks.end()
        for each in step.observers:
            each.take_losses(run.losses)
        return run.losses, self._record(run)

    def close(self) -> None:
        """Close the engine that copies activations; nothing runs afterwards."""
        if self.offloader is not None:
            self.offloader.engine.close()

    def _record(self, run: StepRun) -> Record:
        if run.recorder is None:
            return Record()
        return run.recorder.read(self.offloader.timed() if self.offloader is not None else ())

    def _finish(self, end: int) -> None:
        """Wait, or on CUDA have the stream wait, until all that was sent has left: the stream's last, at `end`."""
        self.position.at(end)
        if self.run_ahead is not None:
            self.run_ahead.wait()
        self.transport.finish()
        if self.run_ahead is not None:
            self.run_ahead.leave(self.position.run, end, is_op=True)
        self.position.end()

    def _begin(self, plan: PlanOnRank, step: Step, record: bool) -> StepRun:
        self.keys_values = self._store(plan)
        self.borrowed.begin(plan.graph)
        self.weights.begin()
        graphs = getattr(self.model, "graphs", None)
        if graphs is not None:
            graphs.begin()
        self.position.begin(plan.lowered, self.rank)
        self.last = self.step_run(self, plan, step, record)
        return self.last

    def _store(self, plan: PlanOnRank) -> KeyValueStore | KeyValueBlocks:
        if plan.program.kv_blocks:
            return KeyValueBlocks(self._fp32_kv_gradients)
        return KeyValueStore(self._fp32_kv_gradients, getattr(self.model, "rows_apart", 1))

    def _plan(self, lowered: LoweredProgram) -> PlanOnRank:
        plan = self._plans.get(id(lowered))
        if plan is None:
            plan = PlanOnRank(lowered, self.rank)
            while len(self._plans) >= PLANS_KEPT:
                del self._plans[next(iter(self._plans))]
            self._plans[id(lowered)] = plan  # holds `lowered`, so its id stays its own
            if plan.copies and self.offloader is None:
                self.offloader = Offloader(make_engine(device()))
            self.borrowed.begin(plan.graph)
            for stage in plan.defers_weights:
                holder = self.borrowed.shell if stage in self.borrowed.stages else self.model
                cast(Model, holder).weight_gradients()  # before the first forward
        return plan
