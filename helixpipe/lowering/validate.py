"""Validation before launch: completeness, placement, order, deadlock, with messages a person can act on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

from helixpipe.common.errors import ProgramError
from helixpipe.lowering.build import graph_of
from helixpipe.lowering.compiled import is_sound
from helixpipe.lowering.graph import Graph, op_dependencies
from helixpipe.lowering.index import OpIndex
from helixpipe.lowering.validate_workload import check_activations, check_workload
from helixpipe.program.program import OP_KINDS, Op, Program, Unit
from helixpipe.program.stages import HEAD_MTP, OWNED, PLACEMENTS, Stage, joined_head, model_pieces


class CircleError(ProgramError):
    """A program whose ops wait for each other. circle: of each op of it the next one, and whether the first waits for
    what that makes or only comes after it on its rank. ended: the ops that can run all the same."""

    def __init__(
        self, sentence: str, program: Program, circle: Sequence[tuple[Op, Op, bool]], ended: Collection[Op]
    ) -> None:
        super().__init__(sentence)
        self.program, self.circle, self.ended = program, circle, ended


def validate(program: Program, ends: bool = True) -> Graph:
    """Check that the program is complete and that running it ends; raises ProgramError with the first fault.

    In this order: the stages are the model; documents are whole, their slices in order; activations are of units and
    pieces there are; every op is in range; every unit has exactly one F, then exactly one B, or
    one I and one W (none of them in a forward-only program), R at most once; nothing twice, nothing missing; every
    unit stays on one rank, and so do stages whose weights are resident and keys and values of a document; each
    rank's order and the dependencies together have no cycle. Returns the program's graph, which the last two checks
    need and so does whoever goes on.

    ends: whether to look for a cycle; who list-schedules the graph comes upon one anyway (see `check_ends`).
    """
    program.derive("valid", None, lambda: _check(program))
    graph = graph_of(program)
    if ends and not (graph.compiled is not None and graph.compiled.ended() == graph.num_tasks):
        check_ends(graph, _ended(graph))
    return graph


def _check(program: Program) -> None:
    """All of `validate` but the search for a cycle."""
    _check_stages(program)
    check_workload(program.workload)
    check_activations(program)
    _check_turns(program)
    if is_sound(program, graph_of):
        return
    _check_ranges(program)
    index = OpIndex(program)
    _check_no_duplicates(index)
    _check_units(program, index)
    _check_placement(program, index)
    _check_pairs(program)
    _check_own_order(graph_of(program, index))


def check_ends(graph: Graph, order: Collection[int]) -> None:
    """Check that every task has run. Raises ProgramError with the ops that wait for each other."""
    if len(order) == graph.num_tasks:
        return
    ran = set(order)
    stuck = {op for task, op in enumerate(graph.ops) if task not in ran}
    needed = op_dependencies(graph)
    before = {op: list(producers) for op, producers in needed.items()}
    for ops in graph.program.ranks:
        for previous, op in pairwise(ops):
            before[op].append(previous)
    ranks = dict(zip(graph.ops, graph.ranks, strict=True))
    cycle = _find_cycle(stuck, before)
    circle = [(op, target, target in needed[op]) for op, target in zip(cycle, cycle[1:] + cycle[:1], strict=True)]
    sentence = _describe_cycle(circle, ranks)
    raise CircleError(sentence, graph.program, circle, frozenset(graph.ops) - stuck)


def untrainable(program: Program) -> str | None:
    """Why training cannot run a valid program, a sentence; None when it can."""
    if program.forward_only:
        return f"schedule {program.schedule} has no backward: it is an evaluation program."
    for rank, ops in enumerate(program.ranks):
        if not ops and not program.pieces_of_rank(rank):
            return f"schedule {program.schedule} gives pipeline rank {rank} nothing to run."
    workload = program.workload
    if any(workload.documents(number) is None for number in range(len(workload))):
        return f"schedule {program.schedule} does not have every document in one piece of one microbatch: not trained."
    return None


def _check_stages(program: Program) -> None:
    pieces = tuple(piece for stage in program.stages for piece in stage.pieces)
    expected = model_pieces(program.num_layers)
    joined = joined_head(pieces)
    roles = tuple(
        piece._replace(kind=piece.role) if piece.layer >= 0 or piece.kind == HEAD_MTP else piece for piece in joined
    )
    if roles != expected:
        at = next(
            (i for i, (a, b) in enumerate(zip(roles, expected, strict=False)) if a != b),
            min(len(pieces), len(expected)),
        )
        there = str(pieces[at]) if at < len(pieces) else "nothing"
        wanted = str(expected[at]) if at < len(expected) else "nothing"
        raise ProgramError(f"the stages are not the model in order: piece {at} is {there} where {wanted} was expected.")
    for index, stage in enumerate(program.stages):
        if not stage.pieces:
            raise ProgramError(f"stage {index} has no pieces.")
        if any(piece.part is not None for piece in stage.pieces) and (
            stage.part is None or stage.placement != "resident"
        ):
            raise ProgramError(f"stage {index} has a part of the head, which must be a resident stage of its own.")
        if stage.placement not in PLACEMENTS:
            raise ProgramError(
                f"stage {index} has unknown placement {stage.placement!r}; known are {', '.join(PLACEMENTS)}."
            )
        _check_owner(index, stage, program.num_ranks)
    if program.ring.slots < 1:
        raise ProgramError(f"a ring needs room for at least 1 copy of weights on each rank, not {program.ring.slots}.")


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


def _check_ranges(program: Program) -> None:
    stages, chunks = len(program.stages), [len(each) for each in program.workload.microbatches]
    for rank, ops in enumerate(program.ranks):
        for op in ops:
            kind, stage, microbatch, chunk = op
            inside = 0 <= stage < stages and 0 <= microbatch < len(chunks) and 0 <= chunk < chunks[microbatch]
            if not inside or kind not in OP_KINDS:
                _refuse_range(program, rank, op)


def _refuse_range(program: Program, rank: int, op: Op) -> None:
    if op.kind not in OP_KINDS:
        raise ProgramError(f"rank {rank}: {op} has unknown kind {op.kind!r}; known are {', '.join(OP_KINDS)}.")
    limits = len(program.stages), program.num_microbatches, program.num_chunks
    for name, value, limit in zip(("stage", "microbatch", "chunk"), op[1:], limits, strict=True):
        if not 0 <= value < limit:
            raise ProgramError(f"rank {rank}: {op} names {name} {value}, but the last {name} is {limit - 1}.")
    last = len(program.workload.chunks(op.microbatch)) - 1
    raise ProgramError(
        f"rank {rank}: {op} names chunk {op.chunk}, but the last of microbatch {op.microbatch} is {last}."
    )


def _check_no_duplicates(index: OpIndex) -> None:
    if index.twice is not None:
        first, second = index.twice
        ranks = index.ranks
        raise ProgramError(f"{index.ops[second]} appears twice: on rank {ranks[first]} and on rank {ranks[second]}.")


def _check_units(program: Program, index: OpIndex) -> None:
    forward, backward = index.tasks["F"], index.tasks["B"]
    plain = not program.forward_only and not any(index.tasks[kind] for kind in "IWR")
    for number, unit in enumerate(program.units()):
        if plain and number in forward and number in backward:
            continue
        _check_unit(program, unit, [kind for kind, tasks in index.tasks.items() if number in tasks])


def _check_unit(program: Program, unit: Unit, kinds: list[str]) -> None:
    """kinds: of its ops."""
    if "F" not in kinds:
        raise ProgramError(f"{Op('F', *unit)} is missing: every unit needs exactly one forward.")
    if program.forward_only:
        if len(kinds) > 1:
            raise ProgramError(f"{Op(kinds[1], *unit)} has no place in a forward-only program.")
        return
    if "R" in kinds and not program.activations_of(unit).recompute:
        whose = "its unit" if unit in program.activations else f"stage {unit.stage}"
        raise ProgramError(f"{Op('R', *unit)} has nothing to do: {whose} recomputes none of its pieces.")
    inputs, weights = "I" in kinds, "W" in kinds
    if "B" not in kinds:
        missing = "" if inputs and weights else "W" if inputs else "I" if weights else "B"
        if missing:
            raise ProgramError(f"{Op(missing, *unit)} is missing: every unit needs one B, or one I and one W.")
    elif inputs or weights:
        other = "I" if inputs else "W"
        raise ProgramError(
            f"{Op('B', *unit)} and {Op(other, *unit)} exclude each other: a unit has one B, or one I and one W."
        )


def _check_placement(program: Program, index: OpIndex) -> None:
    ranks, forward = index.ranks, index.tasks["F"]
    for task, unit in enumerate(index.units):
        home = ranks[forward[unit]]
        if ranks[task] != home:
            op = index.ops[task]
            raise ProgramError(
                f"{op} is on rank {ranks[task]} but its forward is on rank {home}, where its activations are."
            )
    for number, stage in enumerate(program.stages):
        if stage.placement == "resident" and stage.has_weights:
            first = number * index.per_stage
            units = range(first, first + index.per_stage)
            _check_same_rank(index, units, f"stage {number} is resident, so all its ops belong on one rank")
        elif stage.has_attention and not program.kv_blocks:
            for place in program.workload.units():
                for earlier in program.workload.earlier_chunks(*place):
                    _check_same_rank(
                        index,
                        [index.unit(number, *earlier), index.unit(number, *place)],
                        f"the keys and values of {_shared(program, earlier, place)} in stage {number} stay on one rank",
                    )

    _check_parts_of_head(program, index)


def _check_turns(program: Program) -> None:
    if not program.turns:
        return
    places = {op: (rank, at) for rank, ops in enumerate(program.ranks) for at, op in enumerate(ops)}
    reached = [-1] * program.num_ranks
    for number, ends in enumerate(program.turns):
        if not ends:
            raise ProgramError(f"turn {number} has no ops; it must name the last op of each rank that runs any in it.")
        ranks = [places[op][0] for op in ends if op in places]
        if len(set(ranks)) < len(ranks):
            twice = next(rank for rank in ranks if ranks.count(rank) > 1)
            raise ProgramError(f"turn {number} must name one op of rank {twice}, the last that it runs in the turn.")
        for op in ends:
            rank, at = places.get(op, (-1, -1))
            if rank < 0:
                raise ProgramError(f"turn {number} ends with {op}, which no rank runs.")
            if at <= reached[rank]:
                raise ProgramError(
                    f"turn {number} ends with {op}, which rank {rank} runs before the end of a turn before."
                )
            reached[rank] = at
    for rank, ops in enumerate(program.ranks):
        if left := ops[reached[rank] + 1 :]:
            raise ProgramError(f"rank {rank} runs {left[0]} after the last turn; turns must hold all ops.")


def _check_pairs(program: Program) -> None:
    """A forward, and after it on its rank a backward of another unit, both with weights that are whole and here."""
    left = set(program.pairs)
    for rank, ops in enumerate(program.ranks if left else ()):
        for at, op in enumerate(ops):
            if op not in program.pairs:
                continue
            left.discard(op)
            after = ops[at + 1] if at + 1 < len(ops) else None
            if op.kind != "F" or after is None or after.kind not in "BI" or after.unit == op.unit:
                beside = "nothing" if after is None else f"{after}"
                raise ProgramError(
                    f"rank {rank}: a pair is a forward and the backward of another unit after it, and not {op} and "
                    f"{beside}."
                )
            if program.sharded > 1 or any(program.stages[each.stage].owner not in (None, rank) for each in (op, after)):
                raise ProgramError(
                    f"rank {rank}: {op} and {after} cannot run beside each other: weights come for them."
                )
    if left:
        raise ProgramError(f"{min(left)} is to run beside another op, but is not there.")


def _check_parts_of_head(program: Program, index: OpIndex) -> None:
    """A part on every rank: all of them take part in what the parts exchange."""
    parts = range(program.chain, len(program.stages))
    homes = [index.ranks[index.tasks["F"][stage * index.per_stage]] for stage in parts if index.per_stage]
    if homes and sorted(homes) != list(range(program.num_ranks)):
        listed = ", ".join(map(str, homes))
        raise ProgramError(
            f"each of the {program.num_ranks} ranks must have one part of the head, but of its {len(parts)} parts the "
            f"ranks are {listed}."
        )


def _shared(program: Program, earlier: tuple[int, int], place: tuple[int, int]) -> str:
    """The words for what of a microbatch, or of two, is attended to."""
    if earlier[0] == place[0]:
        return f"microbatch {place[0]}"
    before, after = (program.workload.chunks(microbatch)[chunk] for microbatch, chunk in (earlier, place))
    documents = {part.document for part in before} & {part.document for part in after}
    return f"document {min(documents)}, which is in microbatches {earlier[0]} and {place[0]},"


def _check_same_rank(index: OpIndex, units: Sequence[int], rule: str) -> None:
    ranks, ops = index.ranks, index.ops
    tasks = [index.tasks["F"][unit] for unit in units]
    for task in tasks:
        if ranks[task] != ranks[tasks[0]]:
            first = f"{ops[tasks[0]]} is on rank {ranks[tasks[0]]}"
            raise ProgramError(f"{rule}, but {first} and {ops[task]} on rank {ranks[task]}.")


def _check_own_order(graph: Graph) -> None:
    """Faults visible on one rank alone: a person understands these better than a cycle."""
    for task, successors in enumerate(graph.successors[: len(graph.ops)]):
        for successor in successors:
            if successor < task and graph.ranks[successor] == graph.ranks[task]:
                op, producer = graph.ops[successor], graph.ops[task]
                sentence = f"rank {graph.ranks[task]}: {op} comes before {producer}, which it needs."
                circle = [(op, producer, True), (producer, op, False)]
                raise CircleError(
                    sentence, graph.program, circle, {graph.ops[each] for each in _ended(graph) if each < graph.num_ops}
                )


def _ended(graph: Graph) -> list[int]:
    """The tasks that can run to their end, by Kahn's algorithm over the dependencies and each rank's own order."""
    waiting = list(graph.num_dependencies)
    last = {tasks.stop - 1 for tasks in graph.rank_tasks}
    for tasks in graph.rank_tasks:
        for task in tasks[1:]:
            waiting[task] += 1
    ready = [task for task, count in enumerate(waiting) if count == 0]
    for task in ready:  # grows
        own = [task + 1] if task < graph.num_ops and task not in last else []
        for successor in (*graph.successors[task], *own):
            waiting[successor] -= 1
            if waiting[successor] == 0:
                ready.append(successor)
    return ready


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


def _describe_cycle(circle: Sequence[tuple[Op, Op, bool]], ranks: dict[Op, int]) -> str:
    # A run of ops that only come after one another on a rank is told as its two ends.
    corners = [i for i in range(len(circle)) if circle[i][2] or circle[i - 1][2]]
    parts = []
    for i, j in zip(corners, corners[1:] + corners[:1], strict=True):
        (op, _, direct), target = circle[i], circle[j][0]
        relation = "waits for" if direct else "comes after"
        parts.append(f"{op} (rank {ranks[op]}) {relation} {target} (rank {ranks[target]})")
    return "the program can never finish, its ops wait for each other in a circle: " + ", ".join(parts) + "."
