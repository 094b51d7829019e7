"""Transfers between ranks, of groups of ranks, and between a device and its host; and the table of their kinds."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

from helixpipe.program.program import Op, Unit


class Waited(Enum):
    """Where the streams of a transfer's ranks wait for its end."""

    READER = "right before the first task that reads what it brings; where no task does, once it has ended"
    ENDED = "right before the first op that starts, on paper, after it has ended; its memory is free then"
    USERS = "inside the ops that use what it brings, with no instruction of its own"
    STEP = "at the end of the step; nothing in it waits for the transfer, which so counts as taking no time"


class TransferKind(NamedTuple):
    """All that is known of a kind of transfer.

    resource: what it runs on (see `tasks.Resource`): a `link`, a `collective`, `copy_out` or `copy_in`. moves: the kind
    of buffer whose bytes travel (one of `tasks.BUFFER_KINDS`). waited: where its end is waited for. label, colour: in
    pictures. cargo: what it moves, as the watchdog says it, of the op or unit (`{op}`, `{unit}`) or the stage
    (`{stage}`). group: of a collective of ranks beside the pipeline the field of `Program` that counts them; empty
    where `Transfer.ranks` are its members. beside_ops: whether it may keep a rank's own processor from computing;
    for others that is part of their op's time. passed_on: whether a transfer that follows it sends what it brings as
    that comes, without waiting for its end. entire: of a collective, whether every member gets or gives all of what
    moves, as in a broadcast, and not a part of it.
    """

    resource: str
    moves: str
    waited: Waited
    label: str
    colour: str
    cargo: str
    group: str = ""
    beside_ops: bool = False
    passed_on: bool = False
    entire: bool = False


_ROWS: dict[str, TransferKind] = {
    "activation": TransferKind(
        "link", "activation", Waited.READER, "activation", "#7fa6c9", "the activation of {op}"
    ),
    "gradient": TransferKind("link", "gradient", Waited.READER, "gradient", "#c9907b", "the gradient of {op}"),
    "keys_values": TransferKind(
        "link", "keys_values", Waited.READER, "keys and values", "#8f93c7", "the keys and values of {unit}",
        beside_ops=True,
    ),
    "kv_gradients": TransferKind(
        "link", "kv_gradients", Waited.READER, "gradients of keys and values", "#c78fae",
        "the gradients of the keys and values of {unit}", beside_ops=True,
    ),
    "weights": TransferKind(
        "link", "weights", Waited.READER, "weights", "#a3a86b", "the weights of stage {stage}",
        beside_ops=True, passed_on=True,
    ),
    "weight_gradients": TransferKind(
        "link", "weight_gradients", Waited.READER, "weight gradients", "#6fa596",
        "the weight gradients of stage {stage}", beside_ops=True,
    ),
    "head_input": TransferKind(
        "collective", "activation", Waited.READER, "hidden states to all parts of the head", "#6f9fb0",
        "the hidden states of {op}", entire=True,
    ),
    "head_sums": TransferKind(
        "collective", "sums", Waited.READER, "sums of all parts of the head", "#b0a06f",
        "the sums over the logits of {op}",
    ),
    "head_gradient": TransferKind(
        "collective", "gradient", Waited.READER, "sum of the gradients of all parts of the head", "#b07f6f",
        "the gradient of {op}", entire=True,
    ),
    "turn": TransferKind(
        "collective", "turn", Waited.READER, "barrier after a turn", "#a0a0a0", "the turn that {op} ends"
    ),
    "gather": TransferKind(
        "collective", "gathered", Waited.USERS, "gather of weights", "#b7c98b", "the weights of stage {stage}",
        group="sharded", beside_ops=True,
    ),
    "scatter": TransferKind(
        "collective", "made_gradients", Waited.ENDED, "scatter of gradients", "#8fb9b4",
        "the weight gradients of stage {stage}", group="sharded", beside_ops=True,
    ),
    "replica_sum": TransferKind(
        "collective", "weight_gradients", Waited.STEP, "sum over replicas", "#9aa5ad",
        "the weight gradients of stage {stage}",
    ),
    "offload": TransferKind(
        "copy_out", "offloaded", Waited.ENDED, "copy to the host", "#c3b1e1", "what leaves after {op}",
        beside_ops=True,
    ),
    "fetch": TransferKind(
        "copy_in", "offloaded", Waited.READER, "copy back", "#e4a9c4", "what is needed by {op}", beside_ops=True
    ),
}  # fmt: skip

TRANSFER_KINDS: Mapping[str, TransferKind] = MappingProxyType(_ROWS)
"""The kinds of transfers. A new one is a row here, the pass that adds it (`lowering.passes`) and what moves its tensors
(`runtime.traffic`): times, sizes, streams, memory, drawings and the watchdog follow from the row.

activation: what crosses the cut between two stages. gradient: its gradient, in the same shapes. keys_values: a chunk's
block, from the op that made it to the first op of the target that reads it. kv_gradients: from the last backward of the
source that read it to the op that needs the sum. head_input: what the last layers give, to the ranks of all parts of
the head. head_sums: over each part's logits, to all of them. head_gradient: of all parts, summed where the last layers
are. weights, weight_gradients: of a shipped or ring stage, to the rank that runs ops with them, and the sum of these
ops' gradients back. replica_sum: over the ranks that hold a replicated stage, of its weight gradients. turn: moves
nothing; it ends when all ranks have begun it (`Program.turns`). gather, scatter: in one rank's data-parallel group, in
which each has parts of the weights. offload, fetch: of a unit's saved tensors, to the host's memory and back."""


class Transfer(NamedTuple):
    """Data on its way from one rank to another, over a group of ranks, or between a device and its host.

    number: its place among the program's transfers, equal on every rank. kind: a key of `TRANSFER_KINDS`. ranks: of
    a link the source and the target; of a collective its members; of a copy its rank. unit: whose data it moves;
    microbatch and chunk are -1 where that belongs to a stage. producer: the op after which it can begin, None where
    it brings what nobody makes. consumer: the first op that needs what it brings, None where none does. Of
    `weights` both are the first op that runs with them on the target, of `weight_gradients` the last one that adds
    to the sum on the source. follows: the number of the transfer whose weights this one passes on, or whose
    gradients it adds its own to; -1 where what it moves starts at its source. Which buffers it reads, writes and
    frees the graph says, by its task.
    """

    number: int
    kind: str
    ranks: tuple[int, ...]
    unit: Unit
    producer: Op | None = None
    consumer: Op | None = None
    follows: int = -1

    @property
    def source(self) -> int:
        return self.ranks[0]

    @property
    def target(self) -> int:
        return self.ranks[-1]

    @property
    def op(self) -> Op:
        """The op it belongs to: that needs what it brings, or that made what it takes."""
        op = self.consumer or self.producer
        assert op is not None, f"{self.kind} belongs to a stage"
        return op

    @property
    def of_stage(self) -> bool:
        """Whether it moves what belongs to a stage, and not to a unit."""
        return self.unit.microbatch < 0

    @property
    def resource(self) -> str:
        return TRANSFER_KINDS[self.kind].resource

    def __str__(self) -> str:
        if self.resource == "link":
            return f"{self.kind} {self.producer} -> {self.consumer} (rank {self.source} -> rank {self.target})"
        if self.producer is None and self.consumer is None:
            return f"{self.kind} of stage {self.unit.stage} (ranks {', '.join(map(str, self.ranks))})"
        return f"{self.kind} {'after' if self.consumer is None else 'for'} {self.op} (rank {self.ranks[0]})"
