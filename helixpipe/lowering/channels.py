"""Which ranks of a program send to each other, found from its ops alone, before there is a graph."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import permutations, product

from helixpipe.program.program import Program


def busiest_ends(program: Program) -> int:
    """Return of how many channels, (source, target), the rank that has most is an end; 0 of a program without ops."""
    return program.derive("ends", None, lambda: _busiest_ends(program))


def _busiest_ends(program: Program) -> int:
    ends = Counter(rank for channel in _channels(program) for rank in channel)
    return max(ends.values(), default=0)


def _channels(program: Program) -> set[tuple[int, int]]:
    """Activations and gradients cross each cut both ways; keys and values go between the chunks of a row. Shipped
    weights go to the ranks that run with them, and gradients back; those of a ring go from rank to rank, weights first
    to who runs the first microbatch and gradients at last from who runs the last."""
    stages = program.stages
    both_ways: set[tuple[int, int]] = set()
    one_way: set[tuple[int, int]] = set()
    runs_on: list[set[int]] = [set() for _ in stages]
    for rank, ops in enumerate(program.ranks):
        for stage in {op[1] for op in ops}:
            runs_on[stage].add(rank)
    spread = {at for at, stage in enumerate(stages) if len(runs_on[at]) > 1 or stage.placement in ("shipped", "ring")}
    of_unit = {op[1:]: rank for rank, ops in enumerate(program.ranks) for op in ops if op[1] in spread and op[0] == "F"}
    cuts = [cut for cut in range(1, len(stages)) if stages[cut].part is None]
    for cut in cuts:
        if not {cut - 1, cut} <= spread:
            both_ways.update(product(runs_on[cut - 1], runs_on[cut]))
    units_of: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    of_row: dict[tuple[int, int], set[int]] = defaultdict(set)
    for (stage, microbatch, chunk), rank in of_unit.items():
        both_ways.add((rank, of_unit.get((stage + 1, microbatch, chunk), rank)))
        units_of[stage].append((microbatch, chunk, rank))
        if program.num_chunks > 1:
            of_row[stage, microbatch].add(rank)
    for ranks in of_row.values():
        both_ways.update(permutations(ranks, 2))
    for stage, units in units_of.items():
        owner, placement = stages[stage].owner, stages[stage].placement
        if owner is None:
            continue
        if placement == "shipped":
            both_ways.update((owner, rank) for rank in runs_on[stage])
        elif placement == "ring":
            one_way.update((rank, (rank + 1) % program.num_ranks) for rank in runs_on[stage])
            one_way.update([(owner, min(units)[2]), (max(units)[2], owner)])
    one_way |= both_ways | {(target, source) for source, target in both_ways}
    return {(source, target) for source, target in one_way if source != target}
