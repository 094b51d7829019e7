"""Exchanges what the parts of a divided head need of each other in a step: collectives over the ranks of the pipeline
(`model.split_head`).

Each is started and waited for where the rank's stream says, in the one order that all ranks share. The sums of all
parts give the loss, which the rank of the last part reports, and to each rank the gradient of its own sums, which its
part's backward takes in as any other takes that of its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from helixpipe.model import Microbatch, UnitContext
from helixpipe.model.device import device
from helixpipe.program.transfer import Transfer
from helixpipe.runtime.step import LossSum, Model, PlanOnRank, Step
from helixpipe.runtime.traffic import StartedHandler

_Start = Callable[[dist.ProcessGroup, Sequence[int]], Any]
"""Starts a collective of a group, of these global ranks."""


class DividedHead(Model, Protocol):
    """The interface of a model with a part of the head; `helixpipe.model.PipelineModel` is one."""

    def part_loss(self, sums: Tensor, own: int, batch: Microbatch, context: UnitContext) -> tuple[Tensor, Tensor]: ...


class HeadTraffic:
    """The collectives of one step on one rank.

    group: the ranks of the pipeline. buffers: the step's, by number in the graph. report: takes the loss sum of each
    chunk.
    """

    def __init__(
        self, rank: int, group: dist.ProcessGroup, model: DividedHead, plan: PlanOnRank, step: Step,
        buffers: dict[int, Any], report: Callable[[LossSum], None],
    ):  # fmt: skip
        self._rank, self._model, self._plan, self._step = rank, model, plan, step
        self._group, self._buffers, self._report = group, buffers, report
        self._started: dict[int, tuple[Any, Tensor, tuple[Tensor, ...]]] = {}

    def handlers(self) -> Mapping[str, StartedHandler]:
        """Return the handler of each kind of collective."""
        return {
            "head_input": StartedHandler(self._start_input, self._finish_input),
            "head_sums": StartedHandler(self._start_sums, self._finish_sums),
            "head_gradient": StartedHandler(self._start_gradient, self._finish_gradient),
        }

    def give_up(self) -> None:
        """Wait for what was started in a step that is forgotten."""
        for transfer in list(self._started):
            self._ended(transfer)

    def _start_input(self, transfer: Transfer) -> None:
        graph = self._plan.graph
        (given,) = graph.reads[graph.task(transfer)]
        root = graph.buffers[given].rank
        if root == self._rank:
            (hidden,) = self._buffers.pop(given)
        else:
            before = self._plan.program.stages[transfer.unit.stage - 1].pieces[-1]
            _, length = self._plan.place(transfer.unit, self._step.seq_length)
            (shape,) = self._model.payload_shapes(before, self._step.micro_batch_size, length)
            hidden = torch.empty(shape, dtype=self._model.payload_dtype, device=device())
        self._begin(
            transfer, hidden, lambda group, ranks: dist.broadcast(hidden, ranks[root], group=group, async_op=True)
        )

    def _finish_input(self, transfer: Transfer) -> None:
        self._bring(transfer, self._ended(transfer.number))

    def _start_sums(self, transfer: Transfer) -> None:
        own = self._take(transfer).contiguous()
        every = own.new_empty((self._plan.program.num_ranks, *own.shape))
        parts = list(every.unbind())  # gloo gathers those of a GPU into a list of tensors only
        self._begin(transfer, every, lambda group, _: dist.all_gather(parts, own, group=group, async_op=True), own)

    def _finish_sums(self, transfer: Transfer) -> None:
        """Report the chunk's loss, and make the gradient of this rank's own sums."""
        step, program, unit = self._step, self._plan.program, transfer.unit
        offset, length = self._plan.place(unit, step.seq_length)
        number = step.microbatch_number(unit.microbatch)
        context = UnitContext(step.iteration, number, unit.chunk, offset, length, step.training)
        with torch.no_grad():
            sums, batch = self._ended(transfer.number), step.batch(unit.microbatch)
            loss, gradient = self._model.part_loss(sums, self._rank, batch, context)
            if program.holders(len(program.stages) - 1) == (self._rank,):
                self._report(LossSum(unit.microbatch, unit.chunk, loss))
            if not program.forward_only:
                self._bring(transfer, gradient.mul_(step.root_gradient(unit.microbatch)))

    def _start_gradient(self, transfer: Transfer) -> None:
        own, root = self._take(transfer), self._taker(transfer)
        self._begin(transfer, own, lambda group, ranks: dist.reduce(own, ranks[root], group=group, async_op=True))

    def _finish_gradient(self, transfer: Transfer) -> None:
        summed = self._ended(transfer.number)
        if self._taker(transfer) == self._rank:
            self._bring(transfer, summed)

    # ------------------------------------------------------------------------------------------------------- details

    def _begin(self, transfer: Transfer, tensor: Tensor, start: _Start, *taken: Tensor) -> None:
        """Start a collective that fills or takes a tensor. taken: others that it reads, kept until its end."""
        work = start(self._group, dist.get_process_group_ranks(self._group))
        self._started[transfer.number] = work, tensor, taken

    def _ended(self, number: int) -> Tensor:
        """Wait for a collective, and return its tensor."""
        work, tensor, _ = self._started.pop(number)
        work.wait()
        return tensor

    def _take(self, transfer: Transfer) -> Tensor:
        """Return what this rank gives to a collective."""
        graph = self._plan.graph
        taken = graph.reads[graph.task(transfer)]
        (own,) = self._buffers.pop(next(number for number in taken if graph.buffers[number].rank == self._rank))
        tensor: Tensor = own
        return tensor

    def _bring(self, transfer: Transfer, tensor: Tensor) -> None:
        """Put what a collective has brought to where the op that reads it looks for it."""
        graph = self._plan.graph
        made = graph.writes[graph.task(transfer)]
        self._buffers[next(number for number in made if graph.buffers[number].rank == self._rank)] = (tensor,)

    def _taker(self, transfer: Transfer) -> int:
        """Return the rank that a collective brings something to."""
        graph = self._plan.graph
        (made,) = graph.writes[graph.task(transfer)]
        return graph.buffers[made].rank
