"""A lowered program in the words of torch.distributed.pipelining's runtime: the cells of its `compute_comms` CSV.

That runtime goes through a rank's actions in turn: computation, `SEND_F`, `RECV_F`, `SEND_B`, `RECV_B` of one message
each, and for FSDP `UNSHARD`, `RESHARD` and `REDUCE_GRAD` of a stage. A send or receive is begun at its place and waited
for where its tensor is used, or at the end of the step. So the theorem of `lowering.lower` holds there as well: rows
that are projections of one linear order end, whichever sends and receives share a queue (NCCL: those of a pair of
ranks). What torch's runtime has no action for is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from helixpipe.common.errors import ProgramError
from helixpipe.costs.by_hand import PieceTimes
from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.build import build_graph
from helixpipe.lowering.graph import Graph
from helixpipe.lowering.order import list_schedule
from helixpipe.lowering.places import without_holds
from helixpipe.lowering.validate import check_ends, validate
from helixpipe.program.costs import Costs
from helixpipe.program.program import Op, Program
from helixpipe.program.transfer import Transfer

OpGroup = tuple[Op, ...]
"""One op, or those that torch runs as one action (`OVERLAP_F_B`)."""

UNSHARDED_STAGES = 3
"""Stages whose weights FSDP has in one piece at a time: the one that runs and the two after it, as in torch."""


@dataclass(frozen=True)
class ComputeRow:
    """What one rank does beside sending and receiving. groups: its ops, in order. between: cells of FSDP before the
    first group, after each, one entry more than there are groups."""

    groups: tuple[OpGroup, ...]
    between: tuple[tuple[str, ...], ...]

    @property
    def ops(self) -> tuple[Op, ...]:
        return tuple(chain.from_iterable(self.groups))


def compute_rows(program: Program) -> list[ComputeRow]:
    """Each op an action of its own, and FSDP's actions around them. Raises ProgramError for what torch's runtime cannot
    run."""
    check_expressible(program)
    return [with_fsdp([(op,) for op in ops]) for ops in program.ranks]


def with_fsdp(groups: Sequence[OpGroup], unsharded: int = UNSHARDED_STAGES) -> ComputeRow:
    """Add FSDP's actions: before each op the weights of the next `unsharded` stages are there, and no others; a stage's
    gradients are reduced after its last backward. Modules without FSDP ignore the first two."""
    last = {op.stage: place for place, group in enumerate(groups) for op in group if op.kind in "BW"}
    held: list[int] = []
    between: list[tuple[str, ...]] = []
    reduced: list[str] = []
    for place in range(len(groups) + 1):
        wanted = _next_stages(groups[place:], unsharded)
        released = [f"{stage}RESHARD" for stage in held if stage not in wanted]
        fetched = [f"{stage}UNSHARD" for stage in wanted if stage not in held]
        between.append((*reduced, *released, *fetched))
        held = wanted
        reduced = [f"{stage}REDUCE_GRAD" for stage, end in last.items() if end == place]
    return ComputeRow(tuple(groups), tuple(between))


def _next_stages(groups: Sequence[OpGroup], count: int) -> list[int]:
    """The next so many stages to run; all those of the first group, however many."""
    found: list[int] = []
    for place, group in enumerate(groups):
        if place and len(found) >= count:
            break
        found += [stage for stage in dict.fromkeys(op.stage for op in group) if stage not in found]
    return found


EQUAL_STAGES = PieceTimes(message=0.1)
"""Costs of stages of equally many layers: of a stage of one, F, I and W 1, B 2, any message 0.1."""


def action_rows(program: Program, rows: Sequence[ComputeRow], costs: Costs = EQUAL_STAGES) -> list[list[str]]:
    """The cells of each rank: its row with sends and receives in the places of one linear order of all ranks.

    program: of the rows' ops. costs: decide that order; equal stages where nothing else is known. Raises ProgramError
    for a program that is not valid, that torch's runtime cannot run, or whose groups wait for each other.
    """
    check_expressible(program)
    program = replace(program, sharded=1)  # what is gathered and scattered when, FSDP's actions say
    validate(program)
    graph = build_graph(program)
    rank_of = {op: rank for rank, ops in enumerate(program.ranks) for op in ops}
    gaps = [iter(row.between) for row in rows]
    cells: list[list[str]] = [[] for _ in rows]
    waiting = [next(gap) for gap in gaps]

    def put_between(rank: int) -> None:
        cells[rank].extend(waiting[rank])
        waiting[rank] = ()

    for each in _order(graph, rows, costs):
        if isinstance(each, Transfer):
            assert each.producer is not None and each.consumer is not None
            direction = "F" if each.kind == "activation" else "B"
            cells[each.source].append(f"{each.producer.stage}SEND_{direction}{each.producer.microbatch}")
            put_between(each.target)
            cells[each.target].append(f"{each.consumer.stage}RECV_{direction}{each.consumer.microbatch}")
        else:
            rank = rank_of[each[0]]
            put_between(rank)
            cells[rank].append(_cell(each))
            waiting[rank] = next(gaps[rank])
    for rank in range(len(rows)):
        put_between(rank)
    return cells


def check_expressible(program: Program) -> None:
    """Check that torch's runtime has an action for all that the program does. Raises ProgramError, which says what it
    has none for."""
    for fault, found in _inexpressible(program).items():
        if found:
            raise ProgramError(
                f"schedule {program.schedule} {fault}, which torch.distributed.pipelining's runtime has no action for."
            )


def _inexpressible(program: Program) -> dict[str, bool]:
    homes: dict[int, set[int]] = {}
    for rank, ops in enumerate(program.ranks):
        for op in ops:
            homes.setdefault(op.stage, set()).add(rank)
    return {
        "is an evaluation program": program.forward_only,
        "runs sequences in chunks": program.num_chunks > 1,
        "divides the output layer over the pipeline": any(stage.part is not None for stage in program.stages),
        "has weights that travel between ranks": any(s.placement in ("shipped", "ring") for s in program.stages),
        "runs a stage on several ranks": any(len(ranks) > 1 for ranks in homes.values()),
        "recomputes activations itself": any(stage.recompute for stage in program.stages),
        "says what becomes of single units' activations (offloading, recomputation)": bool(program.activations)
        or any(op.kind == "R" for ops in program.ranks for op in ops),
        "gives a rank nothing to run": not all(program.ranks),
    }


def _cell(group: OpGroup) -> str:
    return str(group[0]) if len(group) == 1 else f"({';'.join(map(str, group))})OVERLAP_F_B"


def _order(graph: Graph, rows: Sequence[ComputeRow], costs: Costs) -> list[OpGroup | Transfer]:
    """One linear order of all messages and groups of ops, a group at the place of its last op: what waits for any of
    its ops waits for that one. Raises ProgramError where groups wait for each other."""
    task = {op: number for number, op in enumerate(graph.ops)}
    at_last: dict[int, OpGroup] = {}
    for group in chain.from_iterable(row.groups for row in rows):
        last = task[group[-1]]
        at_last[last] = group
        for op in group[-2::-1]:  # what the first one has made leaves first, as its receiver needs it first
            messages = [each for each in graph.successors[task[op]] if each >= graph.num_ops]
            graph.successors[last] = [*messages, *graph.successors[last]]
            for message in messages:
                graph.num_dependencies[message] += 1
    times = list_schedule(graph, *BoundCosts(graph.program, costs).timers)
    check_ends(graph, times.order)
    return [
        at_last[number] if number < graph.num_ops else graph.transfer(number)
        for number in without_holds(graph, times).order
        if number >= graph.num_ops or number in at_last
    ]
