"""Programs with some ops on another rank than before: what no order can change.

What goes to another rank goes as a group: all units of a resident stage, whose weights they share; of any other stage
one microbatch's, since its keys, values and saved activations stay together.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from random import Random

from helixpipe.program.program import Op, Program
from helixpipe.simulate.simulator import Simulation

SWAPS = 0.5
"""The part of the moves that bring a group of the other rank back in its place, where there is one of its kind."""


def moved(simulation: Simulation, rng: Random) -> Program | None:
    """Move a group from one rank to another, or swap two; ops run in the order in which they have started. The busier a
    rank the more often something leaves it. None on a single rank.
    """
    program, busy = simulation.lowered.program, simulation.busy
    if program.num_ranks == 1 or not any(busy):
        return None
    source = rng.choices(range(program.num_ranks), busy)[0]
    target = rng.choice([rank for rank in range(program.num_ranks) if rank != source])
    there, own = _groups(program, target), _groups(program, source)
    if not own:
        return None
    leaving = rng.choice(sorted(own))
    homes = dict.fromkeys(own[leaving], target)
    alike = sorted(group for group, ops in there.items() if _kinds(program, ops) == _kinds(program, own[leaving]))
    if alike and rng.random() < SWAPS:
        homes |= dict.fromkeys(there[rng.choice(alike)], source)
    return replace(program, ranks=_in_order_of_start(simulation, homes))


def _groups(program: Program, rank: int) -> dict[tuple[int, int], list[Op]]:
    """Return the ops of a rank by (stage, microbatch), microbatch -1 for all of a resident stage."""
    groups: dict[tuple[int, int], list[Op]] = {}
    for op in program.ranks[rank]:
        stage = program.stages[op.stage]
        together = stage.placement == "resident" and stage.has_weights
        groups.setdefault((op.stage, -1 if together else op.microbatch), []).append(op)
    return groups


def _kinds(program: Program, ops: list[Op]) -> Hashable:
    """Return a key that is equal for groups that can swap places: the stage's placement and whether it has weights."""
    stage = program.stages[ops[0].stage]
    return stage.placement, stage.has_weights


def _in_order_of_start(simulation: Simulation, homes: Mapping[Op, int]) -> tuple[tuple[Op, ...], ...]:
    """Return the ops of each rank in order of start, with `homes` as their ranks."""
    program = simulation.lowered.program
    starts = {event.op: (event.start, event.end) for event in simulation.timeline.ops}
    orders: list[list[Op]] = [[] for _ in program.ranks]
    for rank, ops in enumerate(program.ranks):
        for op in ops:
            orders[homes.get(op, rank)].append(op)
    return tuple(tuple(sorted(order, key=starts.__getitem__)) for order in orders)
