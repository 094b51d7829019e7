"""Validation before launch: completeness, placement, order, deadlock, with messages a person can act on. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from helixpipe.common.errors import ProgramError
from helixpipe.lowering.graph import Graph, build_graph, dependencies
from helixpipe.program.program import OP_KINDS, OWNED, PLACEMENTS, Op, Program, Stage, Unit, model_pieces


def validate(program: Program) -> Graph:
    """Check that the program is complete and that running it ends; raises ProgramError with the first fault.

    In this order: the stages are the model; every op is in range; every unit has exactly one F, then exactly one B, or
    one I and one W (none of them in a forward-only program), R at most once; nothing twice, nothing missing; every
    unit stays on one rank, and so do stages whose weights are resident and keys and values of a microbatch; each
    rank's order and the dependencies together have no cycle. Returns the program's graph, which the last two checks
    need and so does whoever goes on.
    """
    _check_stages(program)
    _check_ranges(program)
    ranks = _check_no_duplicates(program)
    _check_units(program, ranks)
    _check_placement(program, ranks)
    graph = build_graph(program)
    _check_own_order(graph)
    _check_no_cycle(graph)
    return graph


def untrainable(program: Program) -> str | None:
    """Why training cannot run a valid program, a sentence; None when it can."""
    if program.forward_only:
        return f"schedule {program.schedule} has no backward: it is an evaluation program."
    for rank, ops in enumerate(program.ranks):
        if not ops and not program.pieces_of_rank(rank):
            return f"schedule {program.schedule} gives pipeline rank {rank} nothing to run."
    return None


def _check_stages(program: Program) -> None:
    pieces = tuple(piece for stage in program.stages for piece in stage.pieces)
    expected = model_pieces(program.num_layers)
    if pieces != expected:
        at = next(
            (i for i, (a, b) in enumerate(zip(pieces, expected, strict=False)) if a != b),
            min(len(pieces), len(expected)),
        )
        found = str(pieces[at]) if at < len(pieces) else "nothing"
        wanted = str(expected[at]) if at < len(expected) else "nothing"
        raise ProgramError(f"the stages are not the model in order: piece {at} is {found} where {wanted} was expected.")
    for index, stage in enumerate(program.stages):
        if not stage.pieces:
            raise ProgramError(f"stage {index} has no pieces.")
        _check_recompute(index, stage)
        if stage.placement not in PLACEMENTS:
            raise ProgramError(
                f"stage {index} has unknown placement {stage.placement!r}; known are {', '.join(PLACEMENTS)}."
            )
        _check_owner(index, stage, program.num_ranks)
    for name, size in (("microbatches", program.num_microbatches), ("chunks", program.num_chunks)):
        if size < 1:
            raise ProgramError(f"the number of {name} must be at least 1, not {size}.")
    if program.ring.slots < 1:
        raise ProgramError(f"a ring needs room for at least 1 copy of weights on each rank, not {program.ring.slots}.")
    if program.chunk_lengths is not None and (
        len(program.chunk_lengths) != program.num_chunks or min(program.chunk_lengths) < 1
    ):
        raise ProgramError(f"chunk lengths {program.chunk_lengths} do not fit {program.num_chunks} chunks.")


def _check_owner(index: int, stage: Stage, num_ranks: int) -> None:
    if stage.placement not in OWNED:
        if stage.owner is not None:
            raise ProgramError(
                f"stage {index} is {stage.placement}, and only a {' or '.join(OWNED)} stage has an owner."
            )
    elif stage.owner is None or not 0 <= stage.owner < num_ranks:
        raise ProgramError(
            f"stage {index} is {stage.placement}, so it needs an owner among ranks 0 to {num_ranks - 1}."
        )


def _check_recompute(index: int, stage: Stage) -> None:
    start = 0
    for run in stage.recompute:
        at = stage.pieces.index(run[0], start) if run and run[0] in stage.pieces[start:] else -1
        if at < 0 or stage.pieces[at : at + len(run)] != run:
            shown = " ".join(map(str, run)) or "an empty run"
            raise ProgramError(f"stage {index} cannot recompute {shown}: not a run of its pieces, or out of order.")
        start = at + len(run)


def _check_ranges(program: Program) -> None:
    for rank, ops in enumerate(program.ranks):
        for op in ops:
            if op.kind not in OP_KINDS:
                raise ProgramError(f"rank {rank}: {op} has unknown kind {op.kind!r}; known are {', '.join(OP_KINDS)}.")
            for name, value, limit in (
                ("stage", op.stage, len(program.stages)),
                ("microbatch", op.microbatch, program.num_microbatches),
                ("chunk", op.chunk, program.num_chunks),
            ):
                if not 0 <= value < limit:
                    raise ProgramError(f"rank {rank}: {op} names {name} {value}, but the last {name} is {limit - 1}.")


def _check_no_duplicates(program: Program) -> dict[Op, int]:
    """The rank of every op."""
    ranks: dict[Op, int] = {}
    for rank, ops in enumerate(program.ranks):
        for op in ops:
            if op in ranks:
                raise ProgramError(f"{op} appears twice: on rank {ranks[op]} and on rank {rank}.")
            ranks[op] = rank
    return ranks


def _check_units(program: Program, ranks: dict[Op, int]) -> None:
    for unit in all_units(program):
        forward, backward, inputs, weights = (Op(kind, *unit) in ranks for kind in "FBIW")
        if not forward:
            raise ProgramError(f"{Op('F', *unit)} is missing: every unit needs exactly one forward.")
        if program.forward_only:
            extra = [kind for kind in "BIWR" if Op(kind, *unit) in ranks]
            if extra:
                raise ProgramError(f"{Op(extra[0], *unit)} has no place in a forward-only program.")
            continue
        if Op("R", *unit) in ranks and not program.stages[unit.stage].recompute:
            raise ProgramError(f"{Op('R', *unit)} has nothing to do: stage {unit.stage} recomputes none of its pieces.")
        if backward and (inputs or weights):
            other = "I" if inputs else "W"
            raise ProgramError(
                f"{Op('B', *unit)} and {Op(other, *unit)} exclude each other: a unit has one B, or one I and one W."
            )
        if not backward:
            missing = "" if inputs and weights else "W" if inputs else "I" if weights else "B"
            if missing:
                raise ProgramError(f"{Op(missing, *unit)} is missing: every unit needs one B, or one I and one W.")


def _check_placement(program: Program, ranks: dict[Op, int]) -> None:
    for op, rank in ranks.items():
        home = ranks[Op("F", *op.unit)]
        if rank != home:
            raise ProgramError(f"{op} is on rank {rank} but its forward is on rank {home}, where its activations are.")
    chunks = range(program.num_chunks)
    for index, stage in enumerate(program.stages):
        units = [Unit(index, microbatch, chunk) for microbatch in range(program.num_microbatches) for chunk in chunks]
        if stage.placement == "resident" and stage.has_weights:
            _check_same_rank(units, ranks, f"stage {index} is resident, so all its ops belong on one rank")
        elif stage.has_attention:
            for microbatch in range(program.num_microbatches):
                own = units[microbatch * len(chunks) : (microbatch + 1) * len(chunks)]
                _check_same_rank(
                    own, ranks, f"the keys and values of microbatch {microbatch} in stage {index} stay on one rank"
                )


def _check_same_rank(units: list[Unit], ranks: dict[Op, int], rule: str) -> None:
    first = Op("F", *units[0])
    for unit in units:
        op = Op("F", *unit)
        if ranks[op] != ranks[first]:
            raise ProgramError(f"{rule}, but {first} is on rank {ranks[first]} and {op} on rank {ranks[op]}.")


def _check_own_order(graph: Graph) -> None:
    """Faults visible on one rank alone: a person understands these better than a cycle."""
    for task, successors in enumerate(graph.successors[: len(graph.ops)]):
        for successor in successors:
            if successor < task and graph.ranks[successor] == graph.ranks[task]:
                op, producer = graph.ops[successor], graph.ops[task]
                raise ProgramError(f"rank {graph.ranks[task]}: {op} comes before {producer}, which it needs.")


def _check_no_cycle(graph: Graph) -> None:
    """Kahn's algorithm over the dependencies and each rank's own order."""
    waiting = list(graph.num_dependencies)
    last = {tasks.stop - 1 for tasks in graph.rank_tasks}
    for tasks in graph.rank_tasks:
        for task in tasks[1:]:
            waiting[task] += 1
    ready = [task for task, count in enumerate(waiting) if count == 0]
    num_ops = len(graph.ops)
    while ready:
        task = ready.pop()
        own = [task + 1] if task < num_ops and task not in last else []
        for successor in (*graph.successors[task], *own):
            waiting[successor] -= 1
            if waiting[successor] == 0:
                ready.append(successor)
    stuck = {graph.ops[task] for task, count in enumerate(waiting[:num_ops]) if count}
    if stuck:
        before = {}
        waits_for = dependencies(graph.program)
        for ops in graph.program.ranks:
            for previous, op in zip((None, *ops), ops, strict=False):
                before[op] = [producer for producer, _ in waits_for(op)]
                if previous is not None:
                    before[op].append(previous)
        ranks = dict(zip(graph.ops, graph.ranks, strict=True))
        raise ProgramError(_describe_cycle(_find_cycle(stuck, before), waits_for, ranks))


def _find_cycle(stuck: set[Op], before: dict[Op, list[Op]]) -> list[Op]:
    """Follow what a stuck op waits for until one repeats; every stuck op waits for a stuck op, so one does."""
    path: list[Op] = [min(stuck)]
    seen = {path[0]: 0}
    while True:
        op = next(producer for producer in before[path[-1]] if producer in stuck)
        if op in seen:
            return path[seen[op] :]
        seen[op] = len(path)
        path.append(op)


def _describe_cycle(cycle: list[Op], waits_for: Callable[[Op], list[tuple[Op, str]]], ranks: dict[Op, int]) -> str:
    direct = [
        any(producer == target for producer, _ in waits_for(op))
        for op, target in zip(cycle, cycle[1:] + cycle[:1], strict=True)
    ]
    # A run of ops that only come after one another on a rank is told as its two ends.
    corners = [i for i in range(len(cycle)) if direct[i] or direct[i - 1]]
    parts = []
    for i, j in zip(corners, corners[1:] + corners[:1], strict=True):
        op, target = cycle[i], cycle[j]
        relation = "waits for" if direct[i] else "comes after"
        parts.append(f"{op} (rank {ranks[op]}) {relation} {target} (rank {ranks[target]})")
    return "the program can never finish, its ops wait for each other in a circle: " + ", ".join(parts) + "."


def all_units(program: Program) -> Iterator[Unit]:
    """Every unit the program must run, one at a time: a file may name microbatch 999999999."""
    for stage in range(len(program.stages)):
        for microbatch in range(program.num_microbatches):
            for chunk in range(program.num_chunks):
                yield Unit(stage, microbatch, chunk)
