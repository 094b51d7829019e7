"""Random programs, and the rules of docs/architecture.md written again as naively as possible: the validator's judge.

Nothing here uses `helixpipe.lowering.graph` or `helixpipe.lowering.validate`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random

from helixpipe.costs.by_hand import PieceTimes
from helixpipe.program.program import OP_KINDS, Op, Program, Unit
from helixpipe.program.stages import OWNED, PIECE_KINDS, PLACEMENTS, Piece, RingOptions, Stage, model_pieces, split_head
from helixpipe.program.workload import Chunk, Slice, Workload, uniform


def random_program(
    rng: Random, placements: Sequence[str] = PLACEMENTS, divided: bool = False, turned: bool = False
) -> Program:
    """A valid program: random cuts, placements (half of them resident, the rest these), splits and recomputation, in a
    random order that respects the needs. divided: the head is divided over the ranks. turned: half of them
    in turns."""
    num_ranks, workload = rng.randint(1, 4), random_workload(rng)
    pieces = model_pieces(rng.randint(1, 2))
    parts: tuple[Piece, ...] = ()
    if divided:
        norm, *parts_in_order = split_head(num_ranks)
        pieces, parts = (*pieces[:-1], norm), tuple(parts_in_order)
    num_stages = rng.randint(1, 6)
    cuts = [0, *sorted(rng.sample(range(1, len(pieces)), num_stages - 1)), len(pieces)]
    forward_only = rng.random() < 0.1
    split, recompute = rng.choice((0, 0.5, 1)), rng.choice((0, 0.3, 1))
    stages = tuple(
        Stage(pieces[a:b], rng.choice(("resident", rng.choice(placements))), random_runs(pieces[a:b], recompute, rng))
        for a, b in pairwise(cuts)
    )
    stages = tuple(
        replace(stage, owner=rng.randrange(num_ranks)) if stage.placement in OWNED else stage for stage in stages
    )
    ops: dict[Op, int] = {}
    homes: dict[tuple[int, ...], int] = {}
    if divided:
        homes = {(num_stages + number,): rank for number, rank in enumerate(rng.sample(range(num_ranks), num_ranks))}
        stages += tuple(Stage((part,), recompute=random_runs((part,), recompute, rng)) for part in parts)
    for unit in every_unit(stages, workload):
        stage = stages[unit.stage]
        key: tuple[int, ...] = unit
        if stage.placement == "resident":
            key = unit[:1]
        elif stage.has_attention:
            key = (unit.stage, -1 - min(linked(workload, unit.microbatch, unit.chunk)))
        rank = homes.setdefault(key, rng.randrange(num_ranks))
        kinds = "F" if forward_only else "FIW" if rng.random() < split else "FB"
        if not forward_only and stage.recompute and rng.random() < 0.7:
            kinds += "R"
        ops.update((Op(kind, *unit), rank) for kind in kinds)
    ring, in_turns = RingOptions(rng.choice((1, 1, 2, 3))), rng.random() < 0.5 and turned
    empty = Program("random", stages, ((),) * num_ranks, workload, forward_only, ring)
    ranks: list[list[Op]] = [[] for _ in range(num_ranks)]
    pending, done = sorted(ops), dict[Op, None]()
    needed = {op: needs(empty, op, ops.keys()) for op in pending}
    eager = rng.choice((1, 3, len(pending)))  # of how many ready ops to choose the next from: few gives deep orders
    while pending:
        ready = [op for op in pending if needed[op] <= done.keys()]
        op = rng.choice(ready[-eager:])
        pending.remove(op)
        done[op] = None
        ranks[ops[op]].append(op)
    order, size = list(done) if in_turns else [], 1 + len(ops) // 3
    turns = [{ops[op]: op for op in order[at : at + size]} for at in range(0, len(order), size)]
    return replace(empty, ranks=tuple(map(tuple, ranks)), turns=tuple(tuple(ends.values()) for ends in turns))


def random_runs(pieces: tuple[Piece, ...], probability: float, rng: Random) -> tuple[tuple[Piece, ...], ...]:
    """Runs of pieces to recompute, with gaps of any size between them."""
    cuts = sorted(rng.sample(range(len(pieces) + 1), rng.randint(0, len(pieces) + 1)))
    return tuple(pieces[a:b] for a, b in pairwise(cuts) if rng.random() < probability)


def random_workload(rng: Random) -> Workload:
    """Microbatches all cut alike; or each into chunks of its own, some with short documents beside the long one, which
    may go on in the next microbatch."""
    num_microbatches, num_chunks = rng.randint(1, 4), rng.choice((1, 1, 2, 3))
    if rng.random() < 0.6:
        lengths = None if rng.random() < 0.5 else tuple(rng.randint(1, 9) for _ in range(num_chunks))
        return uniform(num_microbatches, num_chunks, lengths, proportional=rng.random() < 0.5)
    microbatches, document, start, documents = [], 0, 0, 1
    for _ in range(num_microbatches):
        chunks = []
        for _ in range(rng.randint(1, 3)):
            slices = [Slice(document, start, rng.randint(1, 9))]
            start += slices[0].length
            for _ in range(rng.choice((0, 0, 1, 2))):
                slices.append(Slice(documents, 0, rng.randint(1, 3)))
                documents += 1
            chunks.append(tuple(slices))
        microbatches.append(tuple(chunks))
        if rng.random() < 0.7:
            document, start, documents = documents, 0, documents + 1
    return Workload(_renumbered(microbatches))


def _renumbered(microbatches: list[tuple[Chunk, ...]]) -> tuple[tuple[Chunk, ...], ...]:
    """Documents numbered as they come: one may have been numbered and got no slice."""
    numbers: dict[int, int] = {}
    return tuple(
        tuple(tuple(s._replace(document=numbers.setdefault(s.document, len(numbers))) for s in c) for c in chunks)
        for chunks in microbatches
    )


def linked(workload: Workload, microbatch: int, chunk: int) -> set[int]:
    """The documents whose keys and values lie where this chunk runs: its own, and those of chunks they are in."""
    documents = {part.document for part in workload.microbatches[microbatch][chunk]}
    while True:
        more = {
            part.document
            for chunks in workload.microbatches
            for other in chunks
            if documents & {part.document for part in other}
            for part in other
        }
        if more <= documents:
            return documents
        documents |= more


def earlier(workload: Workload, microbatch: int, chunk: int) -> list[tuple[int, int]]:
    """Where earlier slices of the chunk's documents are."""
    starts = {part.document: part.start for part in workload.microbatches[microbatch][chunk]}
    return [
        (m, c)
        for m, chunks in enumerate(workload.microbatches)
        for c, other in enumerate(chunks)
        if any(part.document in starts and part.start < starts[part.document] for part in other)
    ]


def every_unit(stages: tuple[Stage, ...], workload: Workload) -> list[Unit]:
    sizes = [len(chunks) for chunks in workload.microbatches]
    return [Unit(s, m, c) for s in range(len(stages)) for m, size in enumerate(sizes) for c in range(size)]


def needs(program: Program, op: Op, present: set[Op]) -> set[Op]:
    """The ops that `op` waits for; `present`: all ops of the program."""
    kind, stage, microbatch, chunk = op

    def backward(stage: int, microbatch: int, chunk: int) -> Op:
        split = Op("I", stage, microbatch, chunk)
        return split if split in present else Op("B", stage, microbatch, chunk)

    attention = program.stages[stage].has_attention
    parts = [number for number, each in enumerate(program.stages) if each.part is not None]
    needed = set()
    if kind == "F":
        if stage in parts:
            needed.add(Op("F", parts[0] - 1, microbatch, chunk))
        elif stage > 0:
            needed.add(Op("F", stage - 1, microbatch, chunk))
        if attention:
            needed |= {Op("F", stage, *place) for place in earlier(program.workload, microbatch, chunk)}
    elif kind == "R":
        needed.add(Op("F", stage, microbatch, chunk))
    elif kind == "W":
        needed.add(Op("I", stage, microbatch, chunk))
    else:
        recompute = Op("R", stage, microbatch, chunk)
        needed.add(recompute if recompute in present else Op("F", stage, microbatch, chunk))
        if stage in parts:
            needed |= {Op("F", part, microbatch, chunk) for part in parts}
        elif stage + 1 in parts:
            needed |= {backward(part, microbatch, chunk) for part in parts}
        elif stage + 1 < len(program.stages):
            needed.add(backward(stage + 1, microbatch, chunk))
        if attention:
            later = [p for p in program.workload.units() if (microbatch, chunk) in earlier(program.workload, *p)]
            needed |= {backward(stage, *place) for place in later}
    return needed


def can_run(program: Program) -> bool:
    """Brute force: units complete and at home, then run ops one by one until nothing moves."""
    where = [(op, rank) for rank, ops in enumerate(program.ranks) for op in ops]
    count = Counter(op for op, _ in where)
    units = every_unit(program.stages, program.workload)
    if any(number > 1 for number in count.values()) or not {op.unit for op in count} <= set(units):
        return False
    for unit in units:
        found = {kind for kind in OP_KINDS if count[Op(kind, *unit)]}
        if "R" in found and not program.stages[unit.stage].recompute:
            return False
        if found not in ([{"F"}] if program.forward_only else [{*"FB"}, {*"FIW"}, {*"FBR"}, {*"FIWR"}]):
            return False
    homes: dict[tuple[int, ...], int] = {}
    for op, rank in where:
        stage = program.stages[op.stage]
        rules: list[tuple[int, ...]] = [op.unit]
        if stage.placement == "resident" and any(piece.kind != "attn" for piece in stage.pieces):
            rules.append(op.unit[:1])
        if stage.has_attention:
            workload = program.workload
            rules += [(op.stage, -1 - each) for each in linked(workload, op.microbatch, op.chunk)]
        if any(homes.setdefault(rule, rank) != rank for rule in rules):
            return False
    parts = {number for number, stage in enumerate(program.stages) if stage.part is not None}
    of_parts = {(op.stage, rank) for op, rank in where if op.stage in parts}
    if parts and sorted(rank for _, rank in of_parts) != list(range(program.num_ranks)):
        return False
    needed = {op: needs(program, op, count.keys()) for op in count}
    left, done, moved = [list(ops) for ops in program.ranks], set[Op](), True
    while moved:
        moved = False
        for ops in left:
            if ops and needed[ops[0]] <= done:
                done.add(ops.pop(0))
                moved = True
    return not any(left)


def mutate(program: Program, rng: Random) -> Program:
    """One random change, which may or may not leave the program valid."""
    ranks = [list(ops) for ops in program.ranks]
    rank = rng.choice([r for r, ops in enumerate(ranks) if ops] or [0])
    ops = ranks[rank]
    if not ops:
        return program
    other = ranks[rng.randrange(len(ranks))]
    at = rng.randrange(len(ops))
    change = rng.choice(("swap", "next", "drop", "twice", "move", "away", "unit", "kind", "rows", "window", "number"))
    if change == "swap":
        to = rng.randrange(len(ops))
        ops[at], ops[to] = ops[to], ops[at]
    elif change == "next":
        ops[at - 1], ops[at] = ops[at], ops[at - 1]
    elif change == "drop":
        ops.pop(at)
    elif change == "twice":
        other.insert(rng.randint(0, len(other)), ops[at])
    elif change == "move":
        ops.insert(rng.randrange(len(ops)), ops.pop(at))
    elif change == "away":
        op = ops.pop(at)
        other.insert(rng.randint(0, len(other)), op)
    elif change == "unit":
        moving = [op for op in ops if op.unit == ops[at].unit]
        ranks[rank] = [op for op in ops if op not in moving]
        other = ranks[rng.randrange(len(ranks))]
        start = rng.randint(0, len(other))
        other[start:start] = moving
    elif change == "kind":
        ops[at] = ops[at]._replace(kind=rng.choice(OP_KINDS))
    elif change == "rows":
        rng.shuffle(ranks)
    elif change == "window":
        part = ops[at : at + 4]
        rng.shuffle(part)
        ops[at : at + 4] = part
    else:
        ops[at] = ops[at]._replace(**{rng.choice(("stage", "microbatch", "chunk")): rng.randint(-1, 5)})
    return replace(program, ranks=tuple(map(tuple, ranks)))


def random_costs(rng: Random) -> PieceTimes:
    """Piece and message times, some of them 0."""
    times = {kind: rng.choice((0.0, 1.0, rng.uniform(0, 5))) for kind in PIECE_KINDS}
    return PieceTimes(times, rng.choice((0.5, 1.0, 2.0, 3.0)), rng.choice((0.0, 0.1, rng.uniform(0, 20))))
