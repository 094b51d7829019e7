"""Calls the compiled core: what a program is in flat arrays, and its graph, times and streams made from them.

Every function has a Python twin that gives the same; None, or False, says that the twin is to be asked: nothing was
compiled, or the program has a fault which that one describes. Costs are asked of one sample of each kind of equal
work.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import Any, cast

from helixpipe.compiled import core
from helixpipe.lowering.bound import BoundCosts, Timers
from helixpipe.lowering.graph import Draft, Graph
from helixpipe.lowering.order import TaskTimes, list_schedule
from helixpipe.lowering.project import RETURN_SLACK, Action, Instruction, LoweredProgram
from helixpipe.program.program import OP_KINDS, Op, Program, Unit
from helixpipe.program.stages import Activations
from helixpipe.program.tasks import BUFFER_KINDS, OF_WEIGHTS, RESOURCE_KINDS, Buffer
from helixpipe.program.transfer import TRANSFER_KINDS, Transfer, TransferKind, Waited

_WAITED = (Waited.READER, Waited.ENDED, Waited.USERS, Waited.STEP)
_ACTIONS = (Action.RUN, Action.SEND, Action.RECV, Action.START, Action.WAIT, Action.FREE)
_KINDS = tuple(TRANSFER_KINDS)
_BUFFER = partial(tuple.__new__, Buffer)
_INSTRUCTION = partial(tuple.__new__, Instruction)


def _index_of(program: Program) -> Any | None:
    """Return the ops of a program in flat arrays; None also where one is out of range."""
    module = core()
    if module is None:
        return None

    def make() -> Any | None:
        chunks = [len(each) for each in program.workload.microbatches]
        try:
            return module.Index(program.ranks, chunks, len(program.stages))
        except (TypeError, ValueError):
            return None

    return program.derive("index", None, make)


def is_sound(program: Program, graph_of: Callable[[Program], Graph]) -> bool:
    """Whether all that `validate` asks of the ops holds, of a program whose stages, workload and activations are right,
    but that it ends. graph_of: makes its graph."""
    index = _index_of(program)
    if index is None or index.twice or program.pairs:
        return False
    of_unit, recompute = _activations(program, index.per_stage)
    if not index.whole_units(program.forward_only, [recompute[each] for each in of_unit]):
        return False
    rows = _rows(program)
    for number, stage in enumerate(program.stages if index.per_stage else ()):
        if stage.placement == "resident" and stage.has_weights:
            if not index.together(number):
                return False
        elif stage.has_attention and not program.kv_blocks and not index.together(number, rows):
            return False
    parts = range(program.chain, len(program.stages)) if index.per_stage else ()
    if parts and sorted(map(index.home, parts)) != list(range(program.num_ranks)):
        return False
    graph = graph_of(program)
    return graph.compiled is not None and not graph.compiled.against_own_order()


def incomplete() -> type[Exception]:
    """What a compiled draft raises where a program lacks an op that others wait for; where nothing was compiled there
    is no such draft."""
    module = core()
    return RuntimeError if module is None else cast(type[Exception], module.Incomplete)


def draft_of(program: Program) -> CompiledDraft | None:
    """Return a draft whose graph is compiled data."""
    index, module = _index_of(program), core()
    if index is None or module is None or program.pairs:  # pairs are for the twin
        return None
    rows = [(name, *_row(kind)) for name, kind in TRANSFER_KINDS.items()]
    tables = module.Tables(list(BUFFER_KINDS), rows, [kind in OF_WEIGHTS for kind in BUFFER_KINDS])
    of_unit, recompute = _activations(program, index.per_stage)
    extents, rows_alike = _extents(program)
    graph = module.Graph(index, tables, extents, rows_alike, of_unit, recompute, program.forward_only)
    return CompiledDraft(program, index, graph)


def _row(kind: TransferKind) -> tuple[int, int, int, bool, bool]:
    resource, moves = RESOURCE_KINDS.index(kind.resource), BUFFER_KINDS.index(kind.moves)
    return resource, moves, _WAITED.index(kind.waited), kind.passed_on, kind.beside_ops


def _activations(program: Program, per_stage: int) -> tuple[list[int], list[bool]]:
    """Return for each unit the number of its activations, of equal ones the same; and for each number whether they
    recompute anything."""
    numbers: dict[Activations, int] = {}
    known: dict[int, int] = {}  # by identity: most are one object

    def number(own: Activations) -> int:
        if id(own) not in known:
            known[id(own)] = numbers.setdefault(own, len(numbers))
        return known[id(own)]

    usual = [stage.activations for stage in program.stages]
    of_unit = list(chain.from_iterable([number(own)] * per_stage for own in usual))
    if program.activations:
        offsets = [0]
        for chunks in program.workload.microbatches:
            offsets.append(offsets[-1] + len(chunks))
        for (stage, microbatch, chunk), own in program.activations.items():
            of_unit[stage * per_stage + offsets[microbatch] + chunk] = number(own)
    return of_unit, [bool(each.recompute) for each in numbers]


def _extents(program: Program) -> tuple[list[int], list[int]]:
    """Return for each chunk of each microbatch the number of its extents, and for each microbatch that of its row."""
    numbers: dict[int, int] = {}
    extents = program.workload.extents
    of_chunk = [numbers.setdefault(id(each), len(numbers)) for chunks in extents for each in chunks]
    numbers, rows = {}, program.workload.row_extents
    of_row = [
        1 + numbers.setdefault(id(rows[microbatch]), len(numbers)) if microbatch in rows else 0
        for microbatch in range(len(program.workload))
    ]
    return of_chunk, of_row


def _rows(program: Program) -> list[list[int]]:
    """Return the rows of several chunks, each the numbers of its chunks among all."""
    rows = program.workload.rows
    if not rows:
        return []
    number = {place: at for at, place in enumerate(program.workload.units())}
    return [[number[place] for place in places] for places in rows]


class CompiledDraft(Draft):
    """A draft of compiled data, which passes use as any other. Where they read tasks, it has them as lists."""

    def __init__(self, program: Program, index: Any, compiled: Any):
        self.program, self.index, self.compiled = program, index, compiled
        self.per_stage = index.per_stage
        self.replica_sums = []

    def adds(self, name: str) -> bool:
        if name == "activations":
            self.compiled.activations(self.program.chain)
            return True
        if name == "keys_values":
            rows = _rows(self.program)
            stages = [number for number, stage in enumerate(self.program.stages) if stage.has_attention and rows]
            if not all(self.index.together(stage, rows) for stage in stages):
                return False
            for stage in stages:
                self.compiled.keys_values(stage, rows, self.program.kv_blocks)
            return True
        return False

    def __getattr__(self, name: str) -> Any:
        """Return one of the lists that a pass of Python's reads, which is made now."""
        if name not in _LISTS:
            raise AttributeError(name)
        value = self.__dict__[name] = _LISTS[name](self)
        return value

    @property
    def num_transfers(self) -> int:
        return int(self.compiled.num_transfers)

    def wait(self, task: int, before: int) -> None:
        self.compiled.wait(task, before)

    def buffer(self, buffer: Buffer, writer: int, readers: Iterable[int] = (), freed_by: int = -1) -> int:
        number: int = self.compiled.buffer(BUFFER_KINDS.index(buffer.kind), *buffer[1:], writer, -1)
        for reader in readers:
            self.compiled.read(reader, number)
        if freed_by >= 0:
            self.compiled.frees_too(freed_by, number)
        return number

    def read(self, task: int, number: int) -> None:
        self.compiled.read(task, number)

    def also_reads(self, task: int, number: int) -> None:
        self.compiled.reads_too(task, number)

    def also_frees(self, task: int, number: int) -> None:
        self.compiled.frees_too(task, number)

    def crosses(self, number: int, giver: int = -1, taker: int = -1) -> None:
        if giver >= 0:
            self.compiled.gives(giver, number)
        if taker >= 0:
            self.compiled.takes(taker, number)

    def lend(self, op: int, transfer: int) -> None:
        self.compiled.lend(op, transfer - self.compiled.num_ops)

    def collect(self, op: int, transfer: int) -> None:
        self.compiled.collect(op, transfer - self.compiled.num_ops)

    def transfer(
        self, kind: str, ranks: tuple[int, ...], unit: Unit, producer: int = -1, consumer: int = -1,
        *, takes: Iterable[int] = (), follows: int = -1,
    ) -> int:  # fmt: skip
        task: int = self.compiled.transfer(
            _KINDS.index(kind), list(ranks), *unit, producer, consumer, list(takes), follows
        )
        return task

    def unit_order(self) -> list[int]:
        order: list[int] = self.compiled.unit_order()
        return order

    def finished(self) -> Graph:
        self.compiled.finish()
        return _graph(self.program, self.index, self.compiled)


_LISTS: dict[str, Callable[[CompiledDraft], Any]] = {
    "ops": lambda own: list(chain.from_iterable(own.program.ranks)),
    "ranks": lambda own: own.index.ranks,
    "rank_tasks": lambda own: _rank_tasks(own.index),
    "units": lambda own: own.index.units,
    "offsets": lambda own: _offsets(own.program),
    "forward": lambda own: own.index.tasks(OP_KINDS.index("F")),
    "weight": lambda own: own.index.tasks(OP_KINDS.index("W")),
    "recompute": lambda own: own.index.tasks(OP_KINDS.index("R")),
    "backward": lambda own: [
        split if split >= 0 else whole
        for whole, split in zip(own.index.tasks(OP_KINDS.index("B")), own.index.tasks(OP_KINDS.index("I")), strict=True)
    ],
}


def _offsets(program: Program) -> list[int]:
    offsets, number = [], 0
    for chunks in program.workload.microbatches:
        offsets.append(number)
        number += len(chunks)
    return offsets


def _rank_tasks(index: Any) -> list[range]:
    return [range(start, end) for start, end in pairwise(index.first)]


def _op_of(program: Program, compiled: Any, task: int) -> Op:
    rank, place = compiled.place(task)
    return program.ranks[rank][place]


def _transfer(compiled: Any, number: int, op: Callable[[int], Op] | None = None) -> Transfer:
    """Return a transfer; without the ops that it belongs to, which costs do not ask for, where none are given."""
    kind, ranks, stage, microbatch, chunk, producer, consumer, follows = compiled.transfer_fields(number)
    made, needed = (None if op is None or task < 0 else op(task) for task in (producer, consumer))
    return Transfer(number, _KINDS[kind], ranks, Unit(stage, microbatch, chunk), made, needed, follows)


def _buffer(compiled: Any, number: int) -> Buffer:
    kind, *others = compiled.buffer_fields(number)
    return _BUFFER((BUFFER_KINDS[kind], *others))


def _graph(program: Program, index: Any, compiled: Any) -> Graph:
    def of_transfers(numbers: Sequence[int]) -> dict[Op, Transfer]:
        lent = [(op, number) for op, number in zip(graph_ops(), numbers, strict=True) if number >= 0]
        op_of = partial(_op_of, program, compiled)
        known = {number: _transfer(compiled, number, op_of) for _, number in lent}
        return {op: known[number] for op, number in lent}

    def graph_ops() -> list[Op]:
        return list(chain.from_iterable(program.ranks))

    def transfers() -> list[Transfer]:
        op = graph_ops().__getitem__
        return [_transfer(compiled, number, op) for number in range(compiled.num_transfers)]

    return Graph.of(
        compiled,
        program=lambda: program,
        ops=graph_ops,
        ranks=lambda: index.ranks,
        rank_tasks=lambda: _rank_tasks(index),
        transfers=transfers,
        successors=compiled.successors,
        num_dependencies=lambda: compiled.num_dependencies,
        buffers=lambda: [_buffer(compiled, number) for number in range(compiled.num_buffers)],
        writer=lambda: compiled.writer,
        writes=compiled.writes,
        reads=compiled.reads,
        frees=compiled.frees,
        takes=lambda: compiled.all_taken,
        gives=lambda: compiled.all_given,
        saved=lambda: compiled.saved,
        recomputes=lambda: set(compiled.recomputes()),
        weights_of=lambda: of_transfers(compiled.weights_of),
        sum_of=lambda: of_transfers(compiled.sum_of),
        pairs=dict,
    )


# ------------------------------------------------------------------------------------------------ times and streams


def _task_times(graph: Graph, bound: BoundCosts) -> list[float]:
    """Return the time of each kind of equal task."""
    same = bound.program is graph.program  # and not one with the same ops that recomputes other pieces
    asked = partial(_asked, graph, bound.timers, _alike(graph, bound))
    return graph.program.derive("task times", bound.costs, asked) if same else asked()


def _asked(graph: Graph, timers: Timers, alike: _Alike) -> list[float]:
    compiled, num_ops, (op_time, transfer_time) = graph.compiled, graph.num_ops, timers
    samples, of = compiled.samples(*alike)
    times = [
        op_time(_op_of(graph.program, compiled, task))
        if task < num_ops
        else transfer_time(_transfer(compiled, task - num_ops))
        for task in samples
    ]
    return [times[each] for each in of]


_Alike = tuple[list[int], list[int]]
"""Of each stage the first one with equal work, of each resource the first one with equal links."""


def _alike(graph: Graph, bound: BoundCosts) -> _Alike:
    first: dict[Hashable, int] = {}
    links = [
        first.setdefault(bound.link(tuple(ranks)) if len(ranks) == 2 else number, number)
        for number, ranks in enumerate(graph.compiled.resource_ranks)
    ]
    return list(bound.alike), links


def _unlike(graph: Graph) -> _Alike:
    """Every stage and resource by itself."""
    return list(range(len(graph.program.stages))), list(range(len(graph.compiled.resource_ranks)))


def transfer_samples(graph: Graph) -> list[Transfer]:
    """Return transfers of which each that may take time at all has an equal one."""
    compiled, num_ops = graph.compiled, graph.num_ops
    if compiled is None:
        return graph.transfers
    samples, _ = compiled.samples(*_unlike(graph))
    return [_transfer(compiled, task - num_ops) for task in samples if task >= num_ops]


def buffer_sizes(graph: Graph, bound: BoundCosts) -> tuple[list[float], list[float]]:
    """Return the size of each kind of equal buffer, and of each kind of equal op's workspace, of a compiled graph."""
    compiled, alike = graph.compiled, _alike(graph, bound)
    samples, of_buffer = compiled.sizes_alike(*alike)
    sizes = [bound.size(_buffer(compiled, number)) for number in samples]
    samples, of_op = compiled.workspaces_alike(*alike)
    workspaces = [bound.workspace(_op_of(graph.program, compiled, task)) for task in samples]
    return [sizes[each] for each in of_buffer], [workspaces[each] for each in of_op]


def _times(compiled: Any) -> TaskTimes:
    return TaskTimes.of(
        compiled,
        start=lambda: compiled.start,
        end=lambda: compiled.end,
        order=lambda: compiled.order,
        crowded=lambda: compiled.crowded,
    )


def earliest_times(graph: Graph, bound: BoundCosts) -> TaskTimes:
    """Return when each task runs if all run as early as they can. bound: costs of the graph's program, or of one with
    the same ops on the same chunks."""
    if graph.compiled is None:
        return list_schedule(graph, *bound.timers)
    return _times(graph.compiled.schedule(_task_times(graph, bound)))


def earliest_times_by(graph: Graph, timers: Timers) -> TaskTimes:
    """Return the same, with times from elsewhere."""
    if graph.compiled is None:
        return list_schedule(graph, *timers)
    return _times(graph.compiled.schedule(_asked(graph, timers, _unlike(graph))))


def times_of_streams(
    lowered: LoweredProgram, bound: BoundCosts, added: Callable[[Op], float] | None = None
) -> TaskTimes:
    """Return when each task runs in the order of the streams, of a compiled program. added: what an op takes longer."""
    graph = lowered.graph
    more = [] if added is None else list(map(added, graph.ops))
    return _times(lowered.compiled.times(_task_times(graph, bound), more))


def rank_work(graph: Graph, times: TaskTimes) -> list[float]:
    """Return the time that each rank spends in ops."""
    if graph.compiled is not None and times.compiled is not None:
        return list(times.compiled.busy(graph.compiled))
    busy = [0.0] * len(graph.rank_tasks)
    for task, rank in enumerate(graph.ranks):
        busy[rank] += times.end[task] - times.start[task]
    return busy


def rank_spans(graph: Graph, times: TaskTimes) -> list[tuple[float, float]]:
    """Return, of each rank that has ops, when the first starts and the last ends."""
    if graph.compiled is not None and times.compiled is not None:
        return list(times.compiled.spans(graph.compiled))
    return [(times.start[own[0]], times.end[own[-1]]) for own in graph.rank_tasks if own]


def lowered_of(graph: Graph, times: TaskTimes) -> LoweredProgram | None:
    """Return the lowered program of a compiled graph and its earliest times."""
    module = core()
    if graph.compiled is None or times.compiled is None or module is None:
        return None
    program = graph.program
    placements = [stage.placement for stage in program.stages]
    shipped = [each == "shipped" for each in placements]
    compiled = module.Lowered(graph.compiled, times.compiled, "ring" in placements, shipped, RETURN_SLACK)
    return LoweredProgram.of(
        compiled,
        program=lambda: program,
        graph=lambda: graph,
        order=lambda: tuple(compiled.order),
        streams=lambda: tuple(_stream(graph, *compiled.stream(rank)) for rank in range(program.num_ranks)),
        openings=lambda: tuple(compiled.openings),
    )


def _stream(graph: Graph, actions: list[int], tasks: list[int]) -> tuple[Instruction, ...]:
    ops, transfers, num_ops = graph.ops, graph.transfers, graph.num_ops
    return tuple(
        _INSTRUCTION((_ACTIONS[action], ops[task], None, task))
        if task < num_ops
        else _INSTRUCTION((_ACTIONS[action], None, transfers[task - num_ops], task))
        for action, task in zip(actions, tasks, strict=True)
    )
