"""Publishes the position of a rank for the thread that watches it.

The executor and the training loop store what they are about to do: an attribute, without a lock or a synchronisation.
On CUDA the host only enqueues. So marks (events) are left in the stream, those by which the executor keeps the host
close to the GPU (`helixpipe.runtime.run_ahead`), and the first that has not been passed tells where the GPU is.

Nobody asks a mark whether it has been passed. torch.cuda.Event.query keeps Python's lock while it is in the driver
(torch/csrc/cuda/Event.cpp, `THCPEvent_query`; `synchronize`, `record` and `wait` release it), and the driver may keep
it there while another thread of the process frees memory or loads a kernel, which waits for the device: if that hangs,
no thread of this rank could say so any more. A thread of its own waits for the marks instead, with `synchronize`
(`Position.follow`); where the device hangs, it does, too, and what it has passed before says where.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from helixpipe.lowering.project import Action, Instruction, LoweredProgram
from helixpipe.program.program import Op
from helixpipe.program.transfer import TRANSFER_KINDS, Transfer
from helixpipe.watch.stall import AwaitedRank, Hop, Place, State


class Patience(enum.Enum):
    """How long a part of a run may take without progress before it may count as a stall."""

    STEP = "what is done in every step"
    LONG = "what may take minutes: reading data, and whatever is done for the first time"
    ENDLESS = "what may keep all ranks busy for hours: set-up, checkpoints"


@dataclass(frozen=True)
class Peers:
    """A rank of the job and those it talks to. pipeline: ranks of the job by pipeline rank. tensor: those of its
    tensor-parallel group, and of that of each of its context-parallel ranks. name: what to call it."""

    rank: int = 0
    pipeline: Sequence[int] = (0,)
    tensor: Sequence[int] = (0,)
    name: str = "rank 0"


class RunPart(NamedTuple):
    """A part of the run. number: of parts before it, alike on all ranks. together: whether ranks wait for each other in
    it. lowered, pp_rank: of the program that is executed in it, if one is."""

    name: str
    number: int
    patience: Patience
    together: bool
    lowered: LoweredProgram | None = None
    pp_rank: int = 0

    @property
    def stream(self) -> Sequence[Instruction]:
        return self.lowered.streams[self.pp_rank] if self.lowered is not None else ()


class View(NamedTuple):
    """A position as it was seen. gpu: whether only the GPU is there, and the host has gone on."""

    part: RunPart
    instruction: int
    gpu: bool = False

    @property
    def place(self) -> Place:
        return self.part.number, self.instruction


class Mark(Protocol):
    """The part of torch.cuda.Event's interface that is used."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Left(NamedTuple):
    """A mark that was left in the device's stream. number: of marks left before it and itself. instruction: of `part`,
    which the device has done when it has passed the mark. is_op: whether it counts as an op."""

    number: int
    part: RunPart
    instruction: int
    is_op: bool
    mark: Mark


class Trail(Protocol):
    """The marks left in the device's stream."""

    def unpassed(self) -> Sequence[Left]:
        """Return the marks that may not have been passed, oldest first. Callable from any thread; never blocks."""
        ...


class Position:
    """The position of this rank in the run. The rank's main thread writes, one other thread calls `look`, and a third
    `follow`.

    peers: of this rank. `iteration` is named with each part. `trail`: leaves marks in the device's stream, if the host
    runs ahead of a GPU. All ranks must go through the same parts in the same order: their numbers are compared.
    """

    def __init__(self, peers: Peers | None = None):
        self.peers = peers or Peers()
        self.iteration = 0
        self.trail: Trail | None = None
        self._part = self._run = RunPart("set-up", 0, Patience.ENDLESS, together=True)
        self._known: set[object] = set()
        self._index = 0
        self._passed = 0  # number of the last mark that was seen to be passed

    # ------------------------------------------------------------------------------------------------ the main thread

    def enter(self, name: str, patience: Patience = Patience.STEP, together: bool = True) -> None:
        """Begin a part (see `RunPart`). The first time a part may take LONG."""
        full = f"{name}, iteration {self.iteration}" if self.iteration else name
        self._part = RunPart(full, self._part.number + 1, self._at_first(name, patience), together)

    def begin(self, lowered: LoweredProgram, pp_rank: int) -> None:
        """Begin to execute a program, as a part with the name of the one before."""
        self._index = 0
        patience = self._at_first(id(lowered), Patience.STEP)
        self._part = self._run = RunPart(
            self._part.name, self._part.number + 1, patience, together=False, lowered=lowered, pp_rank=pp_rank
        )

    def at(self, index: int) -> None:
        """Set the next instruction; the stream's length means waiting until everything sent is received."""
        self._index = index

    @property
    def run(self) -> RunPart:
        """The part in which the program is executed that was begun last."""
        return self._run

    def end(self) -> None:
        """Mark the program as executed or, on CUDA, enqueued."""
        part = self._part
        self._part = RunPart(f"after {part.name}", part.number + 1, self._at_first("end", Patience.STEP), together=True)

    def _at_first(self, what: object, patience: Patience) -> Patience:
        new = what not in self._known
        self._known.add(what)
        return Patience.LONG if new and patience is Patience.STEP else patience

    # -------------------------------------------------------------------------------------------- the other threads

    def look(self) -> View:
        """Return the rank's position, or its GPU's, as far as `follow` knows, if that is behind. Never blocks."""
        part, run, index = self._part, self._run, self._index
        left = self._first_unpassed()
        if left is None:
            return View(part, index if part is run else 0)
        return View(left.part, left.instruction, gpu=left.part is not part or left.instruction < index)

    def follow(self) -> None:
        """Wait until the device has passed all marks left so far. Blocks for as long as that takes; raises the device's
        error if it fails.
        """
        newest = max((left.number for left in self._left()), default=0)
        while (left := self._first_unpassed()) is not None and left.number <= newest:
            left.mark.synchronize()  # if it has been left anew since, this takes longer, and no less is passed
            self._passed = left.number

    def _first_unpassed(self) -> Left | None:
        """Return the first mark not known to be passed; marks that the main thread has waited for are no
        longer listed.
        """
        return next((left for left in self._left() if left.number > self._passed), None)

    def _left(self) -> Sequence[Left]:
        return () if self.trail is None else self.trail.unpassed()


def describe(view: View, peers: Peers, waited: float, limit: float) -> State:
    """Return the rank's report on its position. waited: seconds it has been there. limit: how many are too many."""
    part, index, gpu = view
    doing, awaited = "in or before a collective" if part.together else "busy alone", ""
    way: tuple[Hop, ...] = ()
    needs: tuple[AwaitedRank, ...] = ()
    if part.lowered is not None:
        doing, awaited, way, needs = _in_program(part.lowered, part.pp_rank, index, peers, part.number)
        if gpu:
            doing = f"its GPU {doing}"
    return State(
        peers.rank, peers.name, part.name, view.place, waited, limit, doing, awaited, way, needs, together=part.together
    )


_Doing = tuple[str, str, tuple[Hop, ...], tuple[AwaitedRank, ...]]


def _in_program(lowered: LoweredProgram, pp_rank: int, index: int, peers: Peers, number: int) -> _Doing:
    """Return (doing, awaited, way, needs) of `State`."""
    stream = lowered.streams[pp_rank]
    if index >= len(stream):
        return "waits until all it has sent is received", "", (), _receivers(lowered, pp_rank, peers, number)
    action, op, transfer, _ = stream[index]
    count = f"(instruction {index} of {len(stream)})"
    others = tuple(AwaitedRank(rank, (number, index)) for rank in peers.tensor if rank != peers.rank)
    if action is Action.RUN or action is Action.FREE or transfer is None:
        return f"{'runs' if action is Action.RUN else 'frees'} {op or transfer} {count}", "", (), others
    cargo, awaited = _cargo(transfer), ""
    if transfer.resource != "link":
        moved = f"the {TRANSFER_KINDS[transfer.kind].label}: {cargo}"
        if action is Action.WAIT and transfer.resource == "collective":
            awaited = moved
            others += tuple(
                AwaitedRank(peers.pipeline[rank], (number, _find(lowered, Action.START, transfer, rank) + 1))
                for rank in transfer.ranks
                if rank != pp_rank
            )
        doing = "starts" if action is Action.START else "waits until the end of"
        return f"{doing} {moved} {count}", awaited, (), others
    if action is Action.SEND:
        return f"sends {cargo} to rank {peers.pipeline[transfer.target]} {count}", "", (), (
            AwaitedRank(peers.pipeline[transfer.target], (number, _find(lowered, Action.RECV, transfer) + 1)),
        )  # fmt: skip
    source = peers.pipeline[transfer.source]
    if action is Action.RECV:
        return f"posts the receive of {cargo} from rank {source} {count}", "", (), ()
    use = "" if transfer.kind == "weight_gradients" else f", to run {transfer.consumer}"
    way = tuple(
        Hop(
            peers.pipeline[each.source],
            peers.pipeline[each.target],
            (number, _find(lowered, Action.SEND, each)),
            (number, _find(lowered, Action.WAIT, each)),
        )
        for each in _way(lowered, transfer)
    )
    return f"waits for {cargo} from rank {source}{use} {count}", cargo, way, ()


def _cargo(transfer: Transfer) -> str:
    unit, op = Op("F", *transfer.unit), transfer.producer or transfer.consumer
    return TRANSFER_KINDS[transfer.kind].cargo.format(stage=unit.stage, unit=unit, op=op)


def _way(lowered: LoweredProgram, message: Transfer) -> list[Transfer]:
    """Return the message, preceded by those whose weights it passes on. A sum of gradients is waited for before it is
    passed on, so it comes from its source alone.
    """
    way = [message]
    while TRANSFER_KINDS[way[0].kind].passed_on and way[0].follows >= 0:
        way.insert(0, lowered.graph.transfers[way[0].follows])
    return way


def _receivers(lowered: LoweredProgram, pp_rank: int, peers: Peers, number: int) -> tuple[AwaitedRank, ...]:
    """Return the ranks that have to post the receive of what this rank sent them last."""
    sent = [each.transfer for each in lowered.streams[pp_rank] if each.action is Action.SEND and each.transfer]
    last = {message.target: message for message in sent}
    return tuple(
        AwaitedRank(peers.pipeline[target], (number, _find(lowered, Action.RECV, message) + 1))
        for target, message in sorted(last.items())
    )


def _find(lowered: LoweredProgram, action: Action, message: Transfer, rank: int | None = None) -> int:
    """Return the number of an instruction in the stream of a rank, or of the message's source (SEND) or target."""
    if rank is None:
        rank = message.source if action is Action.SEND else message.target
    stream = lowered.streams[rank]
    return next(i for i, each in enumerate(stream) if each.action is action and each.transfer == message)
