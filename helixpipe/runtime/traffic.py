"""Moves the tensors of each kind of transfer in one step on one rank.

A message is posted, sent and received by the step that runs (`step_run`), which asks here for its tensors and passes
on those received; a collective or a copy is started and waited for here. A new kind of transfer has its handler here
and its row in `program.transfer.TRANSFER_KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from helixpipe.lowering.graph import Graph
from helixpipe.model.device import device
from helixpipe.program.program import Unit
from helixpipe.program.stages import Piece
from helixpipe.program.transfer import Transfer
from helixpipe.runtime.borrowed_weights import BorrowedWeights
from helixpipe.runtime.offload import Offloader
from helixpipe.runtime.recording import Recorder
from helixpipe.runtime.step import Incoming
from helixpipe.runtime.weights import StageWeights


class MessageHandler(Protocol):
    """Gives and takes the tensors of messages of one kind."""

    def expected(self, message: Transfer, incoming: Incoming | None) -> tuple[Sequence[torch.Size], torch.dtype]:
        """Return the shapes and type of a message's tensors. incoming: what the plan knows of one that belongs to a
        unit.
        """
        ...

    def carried(self, message: Transfer) -> tuple[Sequence[Tensor], Any]:
        """Return the tensors that a message sends, and the transport's mark since when they are ready, or None."""
        ...

    def take_in(self, message: Transfer, tensors: Sequence[Tensor]) -> None:
        """Take in a message that has arrived."""
        ...


@dataclass(frozen=True)
class StartedHandler:
    """Starts collectives or copies of one kind, and waits for their end where the streams do."""

    start: Callable[[Transfer], None]
    wait: Callable[[Transfer], None] = lambda transfer: None


class CrossingMessages:
    """Activations and gradients, which lie in the step's table of buffers."""

    def __init__(self, buffers: dict[int, Any], graph: Graph):
        self._buffers, self._graph = buffers, graph

    def expected(self, message: Transfer, incoming: Incoming | None) -> tuple[Sequence[torch.Size], torch.dtype]:
        assert incoming is not None
        return incoming.shapes, incoming.dtype

    def carried(self, message: Transfer) -> tuple[Sequence[Tensor], Any]:
        (number,) = self._graph.reads[self._graph.task(message)]
        tensors, mark = self._buffers.pop(number)
        return tensors, mark

    def take_in(self, message: Transfer, tensors: Sequence[Tensor]) -> None:
        (number,) = self._graph.writes[self._graph.task(message)]
        self._buffers[number] = tensors


class WeightMessages:
    """Weights, and sums of their gradients, between the rank that owns them and those that borrow them."""

    def __init__(self, borrowed: BorrowedWeights):
        self._borrowed = borrowed

    def expected(self, message: Transfer, incoming: Incoming | None) -> tuple[Sequence[torch.Size], torch.dtype]:
        size, dtype = self._borrowed.payload(message)
        return (size,), dtype

    def carried(self, message: Transfer) -> tuple[Sequence[Tensor], Any]:
        of_weights = message.kind == "weights"
        own = self._borrowed.pack(message.unit.stage) if of_weights else self._borrowed.take_sum(message)
        return (own,), None

    def take_in(self, message: Transfer, tensors: Sequence[Tensor]) -> None:
        (self._borrowed.put if message.kind == "weights" else self._borrowed.add)(message, tensors[0])


def weight_collectives(weights: StageWeights, pieces: Callable[[int], Sequence[Piece]]) -> Mapping[str, StartedHandler]:
    """Return the handlers of collectives over weights. pieces: of a stage."""

    def of_stage(what: Callable[[Sequence[Piece]], None]) -> Callable[[Transfer], None]:
        return lambda transfer: what(pieces(transfer.unit.stage))

    return {
        "gather": StartedHandler(of_stage(weights.start_gathering)),
        "scatter": StartedHandler(of_stage(weights.start_scattering), of_stage(weights.finish_scattering)),
        "replica_sum": StartedHandler(of_stage(weights.sum_replicas)),
    }


def ends_of_turns(group: dist.ProcessGroup) -> Mapping[str, StartedHandler]:
    """Return the handler of the ends of turns, a sum of one number over the ranks of the pipeline."""
    begun: dict[int, tuple[Any, Tensor]] = {}

    def begin(transfer: Transfer) -> None:
        number = torch.zeros(1, device=device())  # kept until the wait: its memory is the collective's until then
        begun[transfer.number] = dist.all_reduce(number, group=group, async_op=True), number

    def end(transfer: Transfer) -> None:
        work, _ = begun[transfer.number]
        work.wait()
        del begun[transfer.number]

    return {"turn": StartedHandler(begin, end)}


def copies(offloader: Offloader, graph: Graph, recorder: Recorder | None) -> Mapping[str, StartedHandler]:
    """Return the handlers of copies between device and host. recorder: records how long ops wait for them."""
    mark = recorder.mark if recorder is not None else None

    def held_up(wait: Callable[[Unit], None]) -> Callable[[Transfer], None]:
        def handle(copy: Transfer) -> None:
            start = recorder.mark() if recorder is not None else None
            wait(copy.unit)
            if recorder is not None:
                recorder.held_up(start)

        return handle

    return {
        "offload": StartedHandler(
            lambda copy: offloader.offload(copy.unit, graph.task(copy), mark), held_up(offloader.gone)
        ),
        "fetch": StartedHandler(
            lambda copy: offloader.fetch(copy.unit, graph.task(copy), mark), held_up(offloader.back)
        ),
    }
