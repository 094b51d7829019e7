"""Costs bound to a program: what its ops and messages take and its buffers weigh.

Costs are asked for by work, not by number: equal work (of the same kind and stage, of equal extents, with equal
activations) is asked for once, for there are far more ops than kinds of work.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from helixpipe.lowering.channels import busiest_ends
from helixpipe.program.costs import Contents, Costs, Leaving, Load, Work
from helixpipe.program.program import Op, Program, Unit
from helixpipe.program.stages import Activations, Piece, Segment, Stage, segments
from helixpipe.program.tasks import OF_WEIGHTS, Buffer
from helixpipe.program.transfer import TRANSFER_KINDS, Transfer, Waited
from helixpipe.program.workload import Extent, Extents

_NOTHING: tuple[Extents, Extents] = ((), ())
_DIFFER_INSIDE = frozenset({"recomputed", "workspace"})
"""Kinds of buffers that depend on whether a backward recomputes or an R has done so."""


def stage_work(
    kind: str,
    stages: Sequence[Stage],
    stage: int,
    extents: Extents,
    whole: float | None,
    crosses: Callable[[int], bool] = lambda cut: True,
    recomputed: Sequence[Sequence[Piece]] | None = None,
) -> Work:
    """Return the work of an op of a stage, for the cost model. crosses: whether the two sides of a cut are on different
    ranks; the cut before a stage has its number. recomputed: runs that R makes again, those of the stage if not given.
    """
    own = stages[stage]
    runs = tuple(map(tuple, own.recompute if recomputed is None else recomputed))
    if kind in "WR":
        pieces = own.pieces if kind == "W" else tuple(piece for run in runs for piece in run)
        return Work(kind, pieces, extents, whole, starts=() if kind == "W" else tuple(run[0] for run in runs))
    before, after = (
        stages[cut].pieces[0] if 0 < cut < len(stages) and crosses(cut) else None for cut in (stage, stage + 1)
    )
    if own.part is not None:
        after = None  # the sums over its logits, a few bytes
    receives, sends = (before, after) if kind == "F" else (after, before)
    parts = own.segments if runs == own.recompute else segments(own.pieces, Activations(runs))
    starts = tuple(part.pieces[0] for part in parts) if runs else ()
    return Work(kind, own.pieces, extents, whole, receives, sends, starts=starts)


Timers = tuple[Callable[[Op], float], Callable[[Transfer], float]]


Likeness = tuple[str, int, int, int, bool]
"""What the size of a buffer of a program depends on."""


@dataclass
class _KnownAnswers:
    """What costs have answered of programs of one workload that have all in common but their orders and their units'
    activations. Keys have identities of extents, which live as long as the workload, and of activations."""

    activations: dict[Activations, Activations] = field(default_factory=dict)
    op_times: dict[tuple[object, ...], float] = field(default_factory=dict)
    recompute_times: dict[tuple[int, int, int], float] = field(default_factory=dict)
    transfer_times: dict[tuple[str, Hashable, Likeness], float] = field(default_factory=dict)
    handling_times: dict[tuple[str, int, Likeness, bool], float] = field(default_factory=dict)
    sizes: dict[Likeness, float] = field(default_factory=dict)
    workspaces: dict[tuple[str, Likeness], float] = field(default_factory=dict)


class BoundCosts:
    """`costs` of a program's ops, transfers and buffers. Where the program has no ops yet, as of a schedule that is
    being made, every cut between stages is taken to lie between ranks. Costs are asked once for all orders of the same
    stages on one workload, which keeps what they answer until others are bound to it."""

    def __init__(self, program: Program, costs: Costs):
        self.program, self.costs = program, costs
        self.whole = program.workload.mean_tokens
        self._extents = program.workload.extents
        self._rows = program.workload.row_extents
        every: dict[Hashable, _KnownAnswers] = program.workload.derive("answers", costs, dict)
        known = every.setdefault(self._answers_for, _KnownAnswers())
        # Of equal activations one stands for all, so that they can be told apart by their identity.
        shared = known.activations
        usual = [stage.activations for stage in program.stages]
        self._usual = [shared.setdefault(each, each) for each in usual]
        self._own = {tuple(unit): shared.setdefault(each, each) for unit, each in program.activations.items()}
        self._beside = program.beside
        self._recomputes = any(each.recompute for each in {*self._usual, *self._own.values()})
        self._op_times, self._recompute_times = known.op_times, known.recompute_times
        self._transfer_times, self._handling_times = known.transfer_times, known.handling_times
        self._sizes, self._workspaces = known.sizes, known.workspaces
        first: dict[tuple[object, ...], int] = {}
        stages = range(len(program.stages))
        by_kind = getattr(costs, "by_kind", False)
        self._alike = [first.setdefault(self._kind_of(each), each) for each in stages] if by_kind else list(stages)
        self._link_class = getattr(costs, "link_class", None)
        self._links: dict[tuple[int, ...], Hashable] = {}

    @property
    def alike(self) -> Sequence[int]:
        """Of each stage the first one whose units do equal work."""
        return self._alike

    @property
    def timers(self) -> Timers:
        """The functions for durations that `list_schedule` takes."""
        return self.op_time, self.transfer_time

    def op_time(self, op: Op) -> float:
        """Return the time of an op; a backward whose unit is recomputed without an R op takes the time of R as well."""
        if op[0] == "R":
            return self.recompute_time(op)
        if self._beside and (other := self._beside.get(op)) is not None:
            time = self._time_beside(op, other)
        else:
            key = self._work_key(op)
            known = self._op_times.get(key)
            time = known if known is not None else self._op_times.setdefault(key, self.costs.op_time(self.work(op)))
        return time + self.recompute_time(op) if self._recomputes and self.recomputes_inside(op) else time

    def recompute_time(self, op: Op) -> float:
        """Return the time of recomputing what the op's unit recomputes."""
        _, stage, microbatch, chunk = op
        key = (self._alike[stage], id(self._extents[microbatch][chunk]), id(self._activations(op[1:])))
        time = self._recompute_times.get(key)
        if time is None:
            time = self._recompute_times[key] = self.costs.op_time(self.work(op._replace(kind="R")))
        return time

    def recomputes_inside(self, op: Op) -> bool:
        """Whether the op is a backward that recomputes, because its unit has no R op."""
        unit = op[1:]
        return op[0] in "BI" and bool(self._activations(unit).recompute) and unit not in self._explicit

    def transfer_time(self, transfer: Transfer) -> float:
        """Return the time of a transfer that has its resource alone; none where nothing in the step waits for it."""
        _, kind, ranks, unit, _, _, _ = transfer
        row = TRANSFER_KINDS[kind]
        if row.waited is Waited.STEP:
            return 0.0
        link = (self.link(ranks), self._ends) if row.resource == "link" else ()
        key = (kind, link, self._likeness(row.moves, *unit))
        time = self._transfer_times.get(key)
        if time is None:
            moves = self.contents(Buffer(row.moves, ranks[0], *unit)) is not None
            time = self.costs.transfer_time(self.load(kind, ranks, unit)) if moves else 0.0
            self._transfer_times[key] = time
        return time

    def handling_time(self, transfer: Transfer, sends: bool) -> float:
        """Return the compute time that the transfer takes on its source (sends), or on its target, beside that of
        ops."""
        row = TRANSFER_KINDS[transfer.kind]
        if not row.beside_ops:
            return 0.0
        key = (transfer.kind, self._ends, self._likeness(row.moves, *transfer.unit), sends)
        time = self._handling_times.get(key)
        if time is None:
            load = self.load(transfer.kind, transfer.ranks, transfer.unit)
            time = self._handling_times[key] = self.costs.handling_time(load, sends)
        return time

    def load(self, kind: str, ranks: tuple[int, ...], unit: Unit) -> Load:
        """Return what a transfer of that kind moves, which belongs to that unit."""
        row = TRANSFER_KINDS[kind]
        contents = self.contents(Buffer(row.moves, ranks[0], *unit))
        assert contents is not None, f"{kind} of {unit} moves nothing"
        members = getattr(self.program, row.group) if row.group else len(ranks)
        if row.resource == "link":
            return Load(kind, ranks, contents, members, self._ends)
        return Load(kind, (), contents, members)

    def size(self, buffer: Buffer) -> float:
        """Return the size of a buffer, on whichever device or host."""
        kind, _, stage, microbatch, chunk, _ = buffer
        key = self._likeness(kind, stage, microbatch, chunk)
        size = self._sizes.get(key)
        if size is None:
            contents = self.contents(buffer)
            size = self.costs.size(contents) if contents is not None else 0.0
            if kind == "saved" and self._activations((stage, microbatch, chunk)).offload:
                size -= self.size(buffer._replace(kind="offloaded"))
            self._sizes[key] = size
        return size

    def workspace(self, op: Op) -> float:
        """Return what an op needs while it runs beside its buffers."""
        key = op.kind, self._likeness("workspace", *op[1:])
        size = self._workspaces.get(key)
        if size is None:
            contents = self.contents(Buffer("workspace", 0, *op[1:]))
            assert contents is not None
            size = self._workspaces[key] = self.costs.size(contents._replace(op=op.kind))
        return size

    def pair_workspace(self, forward: Op, backward: Op) -> float:
        """Return what a forward and a backward that run at the same time need beside the backward's buffers, with all
        that the forward will save."""
        contents = self.contents(Buffer("workspace", 0, *backward[1:]))
        assert contents is not None
        beside = self.contents(Buffer("saved", 0, *forward[1:]))
        return self.costs.size(contents._replace(op=backward.kind, beside=beside))

    def link(self, ranks: tuple[int, ...]) -> Hashable:
        """Return what the time of a message between two ranks depends on beside what it carries."""
        if self._link_class is None:
            return ranks
        if ranks not in self._links:
            self._links[ranks] = self._link_class(*ranks)
        return self._links[ranks]

    def _likeness(self, kind: str, stage: int, microbatch: int, chunk: int) -> Likeness:
        """Return what the size of a buffer depends on: of equal ones one is asked for."""
        if kind in OF_WEIGHTS:
            return kind, stage, 0, 0, False
        alike = self._alike[stage]
        if chunk < 0:  # keys and values of a row
            return kind, alike, id(self._rows.get(microbatch, _NOTHING)), 0, False
        unit = (stage, microbatch, chunk)
        inside = kind in _DIFFER_INSIDE and unit not in self._explicit
        return kind, alike, id(self._extents[microbatch][chunk]), id(self._activations(unit)), inside

    def pair_time(self, forward: Op, backward: Op) -> float:
        """Return the time of a forward and a backward that run at the same time, whether the program says so or not."""
        own = self._time_beside(forward, backward) + self._time_beside(backward, forward)
        return own + self.recompute_time(backward) if self.recomputes_inside(backward) else own

    def _time_beside(self, op: Op, other: Op) -> float:
        """Return the share of an op in the time of both, but for what it recomputes inside."""
        key = tuple(self._work_key(each) for each in (op, other))
        time = self._op_times.get(key)
        if time is None:
            time = self._op_times[key] = self.costs.op_time(self.work(op)._replace(beside=self.work(other)))
        return time

    def _work_key(self, op: Op) -> tuple[object, ...]:
        """Return what the work of an op depends on. What its unit recomputes says where runs of pieces begin
        (`Work.starts`)."""
        kind, stage, microbatch, chunk = op
        extents, activations = self._extents[microbatch][chunk], self._activations(op[1:])
        return kind, self._alike[stage], id(extents), id(activations), *self._crossing(op)

    def work(self, op: Op) -> Work:
        """Return the work of an op, for the cost model."""
        kind, stage, microbatch, chunk = op
        extents, runs = self._extents[microbatch][chunk], self._activations(op[1:]).recompute
        before, after = self._crossing(op)
        crosses = {stage: before, stage + 1: after}.__getitem__
        work = stage_work(kind, self.program.stages, stage, extents, self.whole, crosses, runs)
        return work._replace(alone=True) if self.program.forward_only else work

    def contents(self, buffer: Buffer) -> Contents | None:
        """Return what a buffer holds; None for nothing: keys and values of a row that is not cut, and turns."""
        kind, _, stage, microbatch, chunk, _ = buffer
        own, unit = self.program.stages[stage], (stage, microbatch, chunk)
        if kind in OF_WEIGHTS:
            narrow = kind == "weight_gradients" and own.placement == "ring"
            gradient_bytes = self.program.ring.gradient_bytes if narrow else 4
            return Contents(kind, own.segments, (), self.whole, gradient_bytes=gradient_bytes)
        if kind == "turn":
            return None
        if kind in ("keys_values", "kv_gradients"):
            whole = self._rows.get(microbatch, _NOTHING)[kind == "kv_gradients"]
            extents = whole if chunk < 0 else self._block(microbatch, chunk)
            return Contents(kind, own.segments, extents, self.whole) if extents else None
        extents = self._extents[microbatch][chunk]
        if kind in ("activation", "gradient"):
            after = self.program.stages[stage + (kind == "gradient")].pieces[:1]
            return Contents(kind, (Segment(after, False),), extents, self.whole)
        activations = self._activations(unit)
        inside = kind in _DIFFER_INSIDE and unit not in self._explicit
        if kind in ("offloaded", "fetched"):
            stages = self.program.stages
            neighbours = (
                stages[stage - 1].pieces[-1] if stage else None,
                stages[stage + 1].pieces[0] if stage + 1 < len(stages) else None,
            )
            leaving = Leaving(activations.offload, *neighbours, self.program.min_offloaded_bytes)
            return Contents("offloaded", segments(own.pieces, activations), extents, self.whole, leaving=leaving)
        return Contents(kind, segments(own.pieces, activations), extents, self.whole, inside)

    def _block(self, microbatch: int, chunk: int) -> Extents:
        """Of the keys and values of one chunk: its tokens."""
        return (Extent(sum(part.tokens for part in self._extents[microbatch][chunk]), 0.0, True),)

    def _activations(self, unit: tuple[int, ...]) -> Activations:
        return (self._own.get(unit) if self._own else None) or self._usual[unit[0]]

    def _kind_of(self, number: int) -> tuple[object, ...]:
        """Return what the work of a stage's units depends on: of stages that have it in common one is asked for."""
        stages, own = self.program.stages, self.program.stages[number]
        before, after = stages[number - 1 : number] if number else (), stages[number + 1 : number + 2]
        pieces = (*(each.pieces[-1] for each in before), *own.pieces, *(each.pieces[0] for each in after))
        first = next((piece.layer for piece in own.pieces if piece.layer >= 0), 0)
        kinds = tuple((piece.kind, piece.layer >= 0 and piece.layer - first, piece.part) for piece in pieces)
        return kinds, len(before), len(after), self._usually_crossing[number], own.placement, own.recompute

    @cached_property
    def _ends(self) -> int:
        return busiest_ends(self.program)

    def _crossing(self, op: Op) -> tuple[bool, bool]:
        """Return whether the unit before an op's, and the one after it, is on another rank: a message then takes time
        of both. Units that are not in the program yet are taken to be on ranks of their own."""
        _, stage, microbatch, chunk = op
        usual = self._usually_crossing[stage]
        if usual is not None:
            return usual
        own, before, after = (self._rank_of.get((each, microbatch, chunk)) for each in (stage, stage - 1, stage + 1))
        return own is None or before != own, own is None or after != own

    @cached_property
    def _usually_crossing(self) -> list[tuple[bool, bool] | None]:
        """For each stage what `_crossing` returns for all its units; None where they differ, or may."""
        homes: list[set[int]] = [set() for _ in self.program.stages]
        for rank, ops in enumerate(self.program.ranks):
            for stage in {op[1] for op in ops}:
                homes[stage].add(rank)
        cuts = [None if one & other and len(one | other) > 1 else not one & other for one, other in pairwise(homes)]
        sides = pairwise([True, *cuts, True])
        return [None if before is None or after is None else (before, after) for before, after in sides]

    @cached_property
    def _rank_of(self) -> dict[tuple[int, ...], int]:
        """The rank of each unit."""
        return {op[1:]: rank for rank, ops in enumerate(self.program.ranks) for op in ops}

    @property
    def _answers_for(self) -> tuple[object, ...]:
        """What answers depend on beside units and their activations."""
        program = self.program
        fields = (program.forward_only, program.ring, program.min_offloaded_bytes, program.sharded, program.num_ranks)
        return program.stages, *fields

    @cached_property
    def _explicit(self) -> frozenset[tuple[int, ...]]:
        """Units with an R op."""
        return frozenset(op[1:] for ops in self.program.ranks for op in ops if op[0] == "R")
