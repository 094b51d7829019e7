"""Activations that leave the device after a unit's forward and are back before its backward.

Of what a unit saves, the part that `Activations.offload` names is copied to the host's memory once F has run, and its
memory on the device is free when the copy has ended. It is copied in again before the first op that reads what F
saved: the unit's R if there is one, else its B or I. Copies of a rank in one direction run one after the other.

A copy out starts as soon as it can. A copy in could start when the copy out has ended, which would give back at once
what was won; it waits for the op that lies `Activations.ahead` ops before the one that needs it.

Every other op keeps its place and its dependencies, so no order that was possible becomes impossible: a copy waits for
ops of its own rank alone, all of them before the op that waits for it.
"""

from __future__ import annotations

from helixpipe.lowering.graph import Draft
from helixpipe.program.tasks import Buffer


def offloaded(draft: Draft) -> None:
    """Add the two copies of every unit that offloads, with what they copy, in the host's memory too."""
    program = draft.program
    if program.forward_only or not any(own.offload for own in program.activations.values()):
        return
    leaving = [
        (_reader(draft, forward), forward)
        for forward, op in enumerate(draft.ops)
        if op.kind == "F" and program.activations_of(op.unit).offload
    ]
    for reader, forward in sorted(leaving):  # of copies in that may start at one time the first is what is needed first
        _copies(draft, forward, reader)


def _reader(draft: Draft, forward: int) -> int:
    """Return the first op that reads what a forward saved."""
    number = draft.units[forward]
    return draft.recompute[number] if draft.recompute[number] >= 0 else draft.backward[number]


def _copies(draft: Draft, forward: int, reader: int) -> None:
    number, rank, unit = draft.units[forward], draft.ranks[forward], draft.ops[forward].unit
    backward = draft.backward[number]
    leaves = Buffer("offloaded", rank, *unit)
    out = draft.transfer("offload", (rank,), unit, producer=forward, takes=(draft.buffer(leaves, forward),))
    there = draft.buffer(leaves._replace(host=True), out)
    back = draft.transfer("fetch", (rank,), unit, consumer=reader, takes=(there,))
    draft.buffer(leaves._replace(kind="fetched"), back, (reader,), backward)
    first = reader - (draft.ops[reader - 1] in draft.program.pairs)  # of the pair that it may be in
    before = first - draft.program.activations_of(unit).ahead - 1
    if before > forward:  # a rank's ops are numbered in their order
        draft.wait(back, before)
