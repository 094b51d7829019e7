"""Derives the messages that bring weights to ranks that do not own them, and take their gradients back.

A rank that runs ops of a `shipped` or `ring` stage it does not own runs them with a *copy* of the weights, which one
message brings, and sums their weight gradients up in a buffer, which one message takes away. No schedule writes these
messages. They follow from the ops and from their *turns*: any one order of all ops that respects what they wait for.

`shipped`: one copy a rank and step, from the owner; the gradients return to the owner.

`ring`: a rank has `RingOptions.slots` places for copies. Going through the turns, an op whose stage is in one of them
runs with what is there. For any other op a copy comes: from the rank before (rank - 1, of the first the last) if that
has one, else from the owner. It takes the place that was used longest ago. So weights pass from rank to rank in the
order of their uses and start anew at the owner. Gradients are the same thing read backwards: going back through the
turns, an op adds to the sum that its rank still has a place for, or to a new one, which then goes to the next rank if
there is a sum it can join (and no other has), else to the owner.

A copy may come as soon as the one before it on its way has come and its place is free: nothing that was in that place
runs or travels on any more. Mirrored, a sum may leave when all ops have added to it and the sum that joins it has
come, and must have left before another takes its place.

Theorem. If a program's ops alone can run to their end, they can with these messages, whatever the number of slots.
Proof. Put every message that brings weights right before the first op that runs with them in the turns, and every one
that takes gradients away right after the last op that adds to them. All that a message or an op waits for then comes
before it in this one order. Of a message with weights: the copy that it passes on was used in an earlier turn, and had
come by then; what was in its place was last used, and passed on, in earlier turns, since a later turn would not have
found it there. Gradients are the mirror image. (Tested with random programs.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from helixpipe.program.program import Op, Program

WEIGHTS_AHEAD = 4
"""Ops that an owner still has to run when it sends shipped weights, before what the copy will work on comes by."""

USES_WEIGHTS, MAKES_GRADIENTS = "FRBI", "BW"
"""Kinds of ops that run with the weights of their stage, and that end with a gradient of them."""


class Turn(NamedTuple):
    """An op and the rank that runs it."""

    op: Op
    rank: int


class WeightTransfer(NamedTuple):
    """A message with weights or with gradients of them, before it has a number among the program's messages.

    kind: `weights` or `weight_gradients`. ops: in turn, those that run with the weights, on rank `target`; or those
    whose gradients leave, on rank `source`. follows: the transfer (its place in the list of all) that brought what this
    one passes on, or adds to; -1 when it starts here. after: ops, and transfers by their place, that must have ended
    before it starts. before: ops that wait for it.
    """

    kind: str
    ops: tuple[Op, ...]
    source: int
    target: int
    follows: int
    after: tuple[Op | int, ...]
    before: tuple[Op, ...]


@dataclass(eq=False)
class _WeightCopy:
    """Weights of a stage in a place of a rank; read backwards, a sum of gradients in a place of a rank.

    ops: that use it, in the order they were come by. near: the copy it came from, None for the owner's weights. far:
    the copies that came from it. replaced: what had its place.
    """

    rank: int
    number: int
    ops: list[Op] = field(default_factory=list)
    near: _WeightCopy | None = None
    far: list[_WeightCopy] = field(default_factory=list)
    replaced: _WeightCopy | None = None


def transfers(program: Program, turns: Sequence[Turn]) -> list[WeightTransfer]:
    """Every message with weights or their gradients. turns: see the module's text."""
    moved = _shipped(program)
    if any(stage.placement == "ring" for stage in program.stages):
        moved += _ring_weights(program, turns, len(moved))
        moved += _ring_gradients(program, turns, len(moved))
    return moved


def _shipped(program: Program) -> list[WeightTransfer]:
    """Weights could leave when the step starts. So that they come soon enough but not all at once, they wait for an op
    of their owner, `WEIGHTS_AHEAD` ops before the last one there that the copy's first F depends on anyway; where there
    is none, for none. Whatever order respects all else thus respects this, too. Nothing waits for gradients but the end
    of the step."""
    transfers: list[WeightTransfer] = []
    shipped = {index for index, stage in enumerate(program.stages) if stage.placement == "shipped"}
    places = [{op: place for place, op in enumerate(order)} for order in program.ranks] if shipped else []
    for rank, order in enumerate(program.ranks):
        own: dict[int, list[Op]] = {}
        for op in order:
            if op.stage in shipped:
                own.setdefault(op.stage, []).append(op)
        for index, ops in sorted(own.items()):
            owner = program.stages[index].owner
            if owner is None or owner == rank:
                continue
            uses = tuple(op for op in ops if op.kind in USES_WEIGHTS)
            earlier = (uses[0]._replace(stage=before) for before in reversed(range(index)))
            at = next((places[owner][op] for op in earlier if op in places[owner]), -1) - WEIGHTS_AHEAD
            paced = (program.ranks[owner][at],) if at >= 0 else ()
            transfers.append(WeightTransfer("weights", uses, owner, rank, -1, paced, uses[:1]))
            if sums := tuple(op for op in ops if op.kind in MAKES_GRADIENTS):
                transfers.append(WeightTransfer("weight_gradients", sums, rank, owner, -1, sums[-1:], ()))
    return transfers


def _ring_weights(program: Program, turns: Sequence[Turn], number: int) -> list[WeightTransfer]:
    copies = _copies(program, (turn for turn in turns if turn.op.kind in USES_WEIGHTS), -1, False, number)
    transfers = []
    for copy in copies:
        source, follows = _other_end(program, copy)
        after: list[Op | int] = [follows] if follows >= 0 else []
        if copy.replaced is not None:
            after += [copy.replaced.ops[-1], *(passed.number for passed in copy.replaced.far)]
        transfers.append(
            WeightTransfer("weights", tuple(copy.ops), source, copy.rank, follows, tuple(after), (copy.ops[0],))
        )
    return transfers


def _ring_gradients(program: Program, turns: Sequence[Turn], number: int) -> list[WeightTransfer]:
    sums = _copies(program, (turn for turn in reversed(turns) if turn.op.kind in MAKES_GRADIENTS), 1, True, number)
    # What must have left before another takes its place: read backwards, `total` came to the place of `later`.
    earlier = {later.number: total.number for total in sums if (later := total.replaced) is not None}
    transfers = []
    for total in sums:
        target, _ = _other_end(program, total)
        follows = total.far[0].number if total.far else -1
        after: list[Op | int] = [total.ops[0], *([follows] if follows >= 0 else [])]
        if total.near is not None and total.near.number in earlier:
            after.append(earlier[total.near.number])
        before = (total.replaced.ops[-1],) if total.replaced is not None else ()
        transfers.append(
            WeightTransfer(
                "weight_gradients", tuple(reversed(total.ops)), total.rank, target, follows, tuple(after), before
            )
        )
    return transfers


def _copies(program: Program, turns: Iterable[Turn], neighbour: int, once: bool, number: int) -> list[_WeightCopy]:
    """The copies that the turns need one after another, numbered from `number` on. neighbour: 1 or -1, from a rank to
    the one a copy may come from. once: whether a copy is passed on once at most."""
    copies: list[_WeightCopy] = []
    places: list[dict[int, _WeightCopy]] = [{} for _ in program.ranks]  # by stage, least recently used first
    for op, rank in turns:
        stage = program.stages[op.stage]
        if stage.placement != "ring" or stage.owner == rank:
            continue
        own = places[rank]
        copy = own.pop(op.stage, None)
        if copy is None:
            copy = _WeightCopy(rank, number + len(copies))
            copies.append(copy)
            source = (rank + neighbour) % program.num_ranks
            near = places[source].get(op.stage)
            if near is not None and not (once and near.far):
                copy.near = near
                near.far.append(copy)
            if len(own) == program.ring.slots:
                copy.replaced = own.pop(next(iter(own)))
        own[op.stage] = copy
        copy.ops.append(op)
    return copies


def _other_end(program: Program, copy: _WeightCopy) -> tuple[int, int]:
    """The rank a copy came from (a sum goes to), and the transfer that brought it there; -1 for the owner."""
    if copy.near is not None:
        return copy.near.rank, copy.near.number
    owner = program.stages[copy.ops[0].stage].owner
    assert owner is not None
    return owner, -1
