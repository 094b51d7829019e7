"""Transfers: messages from one rank to another, collectives of a group, copies to the host."""

from __future__ import annotations

from typing import NamedTuple

from helixpipe.program.program import Op, Unit


class Message(NamedTuple):
    """Data sent between ranks for one dependency, from `producer` on rank `source` to `consumer` on rank `target`.

    kind: `activation` (what crosses the cut between two stages) or `gradient` (its gradient, same shapes);
    `keys_values`, a chunk's block from the op that made it to the first op of the target that reads it, or
    `kv_gradients`, from the last backward of the source that read it to the op that needs the sum; of a shipped
    or ring stage `weights`, whose producer and consumer are both the first op that runs with the copy, on rank
    `target`, or `weight_gradients`, where both are the last op that adds to the sum, on rank `source`.
    number: its place among the program's messages, equal on every rank.
    follows: the number of the message whose weights this one passes on, or whose gradients it adds its own to; -1 when
    what it carries starts at its source.
    """

    number: int
    kind: str
    producer: Op
    consumer: Op
    source: int
    target: int
    follows: int = -1

    @property
    def ships(self) -> bool:
        """Whether it carries weights or their gradients, not what an op has made for another."""
        return self.kind in ("weights", "weight_gradients")

    @property
    def of_keys_values(self) -> bool:
        return self.kind in ("keys_values", "kv_gradients")

    @property
    def carries(self) -> Unit:
        """The unit whose data the message carries: the stage that defines its content, microbatch and chunk."""
        kind, producer, consumer = self.kind, self.producer, self.consumer
        stage = (consumer if kind in ("activation", "keys_values") else producer).stage
        return (consumer if kind == "kv_gradients" else producer).unit._replace(stage=stage)

    def __str__(self) -> str:
        return f"{self.kind} {self.producer} -> {self.consumer} (rank {self.source} -> rank {self.target})"


class Collective(NamedTuple):
    """A collective operation of a group of ranks, all of which take part from its start to its end.

    kind: `replica_sum`, the sum of a replicated stage's weight gradients over the ranks that hold the stage; of one
    rank's data-parallel group, in which each has parts of the weights, `gather` of a stage's weights and `scatter` of
    their gradients. number: its place among the program's collectives, equal on every rank. op: of these two the first
    op that needs the weights, or the one that made the gradients.
    """

    number: int
    kind: str
    stage: int
    ranks: tuple[int, ...]
    op: Op | None = None

    def __str__(self) -> str:
        if self.op is not None:
            return f"{self.kind} {'for' if self.kind == 'gather' else 'after'} {self.op} (rank {self.ranks[0]})"
        return f"{self.kind} of stage {self.stage} (ranks {', '.join(map(str, self.ranks))})"


class Copy(NamedTuple):
    """A copy of a unit's offloaded activations from the device to the host, or back.

    number: its place among the program's copies. inward: whether it comes back. unit: whose activations. op: after
    which it leaves, or before which it is back.
    """

    number: int
    inward: bool
    rank: int
    unit: Unit
    op: Op

    def __str__(self) -> str:
        return f"{'fetch' if self.inward else 'offload'} of {self.op} (rank {self.rank})"
