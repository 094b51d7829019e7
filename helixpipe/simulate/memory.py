"""Memory of every rank in bytes, by kind, from the lowered program: what is alive when. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from helixpipe.costs.model_costs import MASTER_AND_MOMENTS, ModelCosts
from helixpipe.costs.piece_work import GRADIENT_BYTES
from helixpipe.lowering.lower import Action, LoweredProgram
from helixpipe.program.program import Op
from helixpipe.simulate.stash import StashWalk

KINDS = ("weights", "gradients", "optimizer", "activations", "messages", "workspace")


@dataclass(frozen=True)
class RankMemory:
    """Bytes on each GPU of one pipeline rank at the moment of its peak.

    weights, gradients: with copies of others' weights, and gradients summed for them. activations: what units keep for
    their backward. messages: received and not yet used (weights: not yet there), or made and not yet sent.
    workspace: an estimate of what the op running then needs beside.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    messages: float
    workspace: float

    @property
    def total(self) -> float:
        return sum(getattr(self, kind) for kind in KINDS)


def rank_memory(lowered: LoweredProgram, costs: ModelCosts, rank: int) -> RankMemory:
    """Walk a rank's stream. A program that only goes forward has neither gradients, optimizer nor activations."""
    program = lowered.program
    parameters = costs.bytes.parameters(program.pieces_of_rank(rank))
    training = not program.forward_only
    share = costs.data_parallel if costs.distributed_optimizer else 1
    activations, messages, workspace, weights, gradients = _Walk(lowered, costs, rank).peak()
    return RankMemory(
        weights=parameters * costs.layout.element_bytes + weights,
        gradients=parameters * GRADIENT_BYTES * training + gradients,
        optimizer=parameters * MASTER_AND_MOMENTS / share * training,
        activations=activations,
        messages=messages,
        workspace=workspace,
    )


class _Walk:
    """What is alive on one rank, instruction by instruction."""

    def __init__(self, lowered: LoweredProgram, costs: ModelCosts, rank: int):
        self.program, self.costs, self.rank = lowered.program, costs, rank
        self.lowered, self.stream = lowered, lowered.streams[rank]
        self.walk = StashWalk(self.program, costs, rank)
        self.outgoing: dict[Op, float] = {}  # bytes an op makes for other ranks
        self.incoming: dict[Op, float] = {}
        for message in lowered.messages:
            if message.ships:
                continue
            table, op, end = self.outgoing, message.producer, message.source
            if message.target == rank:
                table, op, end = self.incoming, message.consumer, message.target
            if end == rank:
                table[op] = table.get(op, 0.0) + costs.message_bytes(self.program, message)
        self.workspaces: dict[tuple[int, int], float] = {}

    def peak(self) -> tuple[float, ...]:
        """Activations, messages, workspace, copies of weights and sums of gradients when they are most together."""
        walk, messages = self.walk, 0.0
        copies, sums = dict[int, float](), dict[int, float]()  # by message
        sum_of = self.lowered.graph.sum_of
        peak: tuple[float, ...] = (0.0,) * 5
        for action, op, message in self.stream:
            if message is not None:
                size = self.costs.message_bytes(self.program, message)
                if action is Action.RECV:
                    messages += size
                elif action is Action.FREE:
                    del copies[message.number]
                elif action is Action.WAIT and message.ships:  # a copy that is there counts apart
                    messages -= size
                    if message.kind == "weights":
                        copies[message.number] = size
                elif action is Action.SEND and not message.ships:
                    messages -= size
                elif action is Action.SEND:
                    sums.pop(message.number, None)
            elif op is not None and action is Action.RUN:
                during = walk.run(op)
                if op.kind == "F":  # what it received is now its own input
                    messages -= self.incoming.get(op, 0.0)
                if op in sum_of:
                    sums[sum_of[op].number] = self.costs.message_bytes(self.program, sum_of[op])
                kept = sum(copies.values()), sum(sums.values())
                peak = max(peak, (during, messages, self._workspace(op), *kept), key=sum)
                if op.kind != "F":
                    messages -= self.incoming.get(op, 0.0)
                messages += self.outgoing.get(op, 0.0)
                peak = max(peak, (walk.now, messages, 0.0, *kept), key=sum)
            elif op is not None:
                walk.free(op)
        return peak

    def _workspace(self, op: Op) -> float:
        key = (op.stage, op.chunk)
        if key not in self.workspaces:
            pieces = self.program.stages[op.stage].pieces
            self.workspaces[key] = self.costs.bytes.workspace(pieces, self.costs.chunk(self.program, op.chunk))
        return self.workspaces[key]
