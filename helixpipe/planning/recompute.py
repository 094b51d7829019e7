"""Recomputation: which pieces drop their activations after the forward, and when they are made again. No torch here.

What a stage recomputes is part of the program (`Stage.recompute`). When is too: a unit with an R op recomputes there,
and one without does it inside its backward, run by run, once the gradient has come. `place_early` adds R ops where a
rank would otherwise wait, which takes recomputation off the path from one rank's backward to the next.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from math import inf
from typing import Literal

from helixpipe.common.errors import ScheduleError
from helixpipe.common.flags import option
from helixpipe.costs.by_hand import unit_costs
from helixpipe.lowering.graph import Graph, Times, build_graph, list_schedule
from helixpipe.lowering.lower import timers
from helixpipe.lowering.validate import validate
from helixpipe.program.costs import Costs
from helixpipe.program.program import Op, Piece, Program, Stage, Unit
from helixpipe.simulate.stash import StashWalk, copies

MODULES = {"core_attn": "attn", "mlp": "mlp"}
"""Values of `--recompute-modules` and the piece each means."""

SWEEPS = 8
"""How often `place_early` looks for idle time again, at most; what it finds is nearly always there in two."""


@dataclass(frozen=True)
class RecomputeOptions:
    """Megatron-LM's flags, and two of our own: `without-attention` (HelixPipe, 2025) and `--no-recompute-early`."""

    recompute_granularity: Literal["selective", "full", "without-attention"] | None = option(
        None,
        "Recompute activations in the backward: full, whole layers; selective, core attention alone (Korthikanti et "
        "al., 2022); without-attention, all but core attention and its projection, queries, keys and values as well.",
    )
    recompute_activations: bool = option(False, "The same as --recompute-granularity selective.")
    recompute_method: Literal["uniform", "block"] | None = option(
        None,
        "With full: uniform, all layers, in groups of --recompute-num-layers; block, the first --recompute-num-layers "
        "of each stage, one by one (default: uniform).",
    )
    recompute_num_layers: int | None = option(
        None, "With full: layers recomputed together (uniform) or in each stage (block) (default: 1)."
    )
    recompute_modules: tuple[str, ...] | None = option(
        None, "With selective: what to recompute (default: core_attn).", choices=tuple(MODULES), nargs="+"
    )
    recompute_early: bool = option(True, "Recompute in idle time, before the gradient comes, where memory allows.")

    @property
    def granularity(self) -> str | None:
        return "selective" if self.recompute_activations else self.recompute_granularity

    def check(self) -> None:
        """Raise ScheduleError, naming the flag, for options that do not go together."""
        given = self.recompute_granularity
        if self.recompute_activations and given not in (None, "selective"):
            raise ScheduleError(f"--recompute-activations means selective, but --recompute-granularity is {given}.")
        for flag, value, needed in (
            ("--recompute-method", self.recompute_method, "full"),
            ("--recompute-num-layers", self.recompute_num_layers, "full"),
            ("--recompute-modules", self.recompute_modules, "selective"),
        ):
            if value is not None and self.granularity != needed:
                raise ScheduleError(f"{flag} needs --recompute-granularity {needed}.")
        if self.recompute_num_layers is not None and self.recompute_num_layers < 1:
            raise ScheduleError(f"--recompute-num-layers must be at least 1, not {self.recompute_num_layers}.")

    def stages(self, stages: Iterable[Stage]) -> tuple[Stage, ...]:
        """The stages with what these options recompute."""
        return tuple(replace(stage, recompute=self.runs(stage.pieces)) for stage in stages)

    def runs(self, pieces: Sequence[Piece]) -> tuple[tuple[Piece, ...], ...]:
        """The runs of a stage's pieces that these options recompute; embed and head are never among them."""
        granularity = self.granularity
        if granularity is None:
            return ()
        if granularity == "full":
            layers = [tuple(group) for layer, group in groupby(pieces, key=lambda piece: piece.layer) if layer >= 0]
            count = self.recompute_num_layers or 1
            if self.recompute_method == "block":
                return tuple(layers[:count])
            return tuple(sum(layers[at : at + count], ()) for at in range(0, len(layers), count))
        if granularity == "selective":
            chosen = {MODULES[module] for module in self.recompute_modules or ("core_attn",)}
            return tuple((piece,) for piece in pieces if piece.kind in chosen)
        kept = {"embed", "attn", "proj", "head"}  # proj's output takes no more than the residual that would be kept
        return tuple(tuple(run) for keep, run in groupby(pieces, key=lambda piece: piece.kind in kept) if not keep)


def recomputed(
    program: Program, options: RecomputeOptions, costs: Costs | None = None, limit: float | None = None
) -> Program:
    """The program with what the options recompute, unless its schedule has chosen that itself, and R ops in idle time
    unless they say otherwise. Raises ProgramError when R ops are to be placed in a program that is not valid."""
    own = any(stage.recompute for stage in program.stages)
    if options.granularity is not None and not own:
        program = replace(program, stages=options.stages(program.stages))
    if options.recompute_early and any(stage.recompute for stage in program.stages):
        validate(program)
        program = place_early(program, costs or unit_costs(), limit)
    return program


def place_early(program: Program, costs: Costs, limit: float | None = None) -> Program:
    """Add an R op for every unit that is recomputed, each where its rank would otherwise wait.

    An R goes right before its backward, so that it may run before the gradient has come; where it would still keep the
    backward waiting, into an earlier gap of its rank that is long enough. So no op starts later than before. What an R
    makes is kept until its backward: a rank that would then keep more than `limit` (in the costs' unit, weights and
    optimizer included) keeps its R inside the backward, or in its place before it. Without a limit every R goes before
    its backward, and into earlier gaps as long as its rank keeps no more for it. One that is still right before
    its backward, on a rank that makes the gradient itself, is left to the backward.
    """
    if program.forward_only or not any(stage.recompute for stage in program.stages):
        return program
    explicit = {op.unit for ops in program.ranks for op in ops if op.kind == "R"}
    for rank, ops in enumerate(program.ranks):
        placed = tuple(
            each
            for op in ops
            for each in (
                (op._replace(kind="R"), op)
                if op.kind in "BI" and program.stages[op.stage].recompute and op.unit not in explicit
                else (op,)
            )
        )
        program = _if_it_fits(program, _with_rank(program, rank, placed), rank, costs, inf if limit is None else limit)
    for _ in range(SWEEPS):
        moved = _fill_gaps(program, costs, limit)
        if moved is program:
            break
        program = moved
    for rank, ops in enumerate(program.ranks):
        program = _with_rank(program, rank, _without_vain(ops, explicit))
    return program


def _without_vain(ops: Sequence[Op], given: Container[Unit]) -> tuple[Op, ...]:
    """A rank's ops without every R right before its backward whose gradient the rank makes itself: the backward could
    start as soon, and run by run keeps less. given: units whose R was there before."""
    own = {op.unit for op in ops if op.kind in "BI"}
    vain = {
        op
        for op, after in pairwise(ops)
        if op.kind == "R" and op.unit == after.unit and op.unit not in given
        if op.unit._replace(stage=op.stage + 1) in own
    }
    return tuple(op for op in ops if op not in vain)


def peak_memory(program: Program, costs: Costs, rank: int) -> float:
    """What a rank keeps at most, in the costs' unit: weights, gradients, copies of others' (all it ever has room for),
    optimizer and stash, without messages."""
    walk, peak = StashWalk(program, costs, rank), 0.0
    for op in program.ranks[rank]:
        peak = max(peak, walk.run(op), walk.now)
        if op.kind in "BW":
            walk.free(op)
    return peak + copies(program, costs, rank) + costs.static_memory(program.pieces_of_rank(rank))


def _if_it_fits(old: Program, new: Program, rank: int, costs: Costs, limit: float) -> Program:
    """The new program, unless its rank then keeps more than the limit and more than before."""
    return new if peak_memory(new, costs, rank) <= max(limit, peak_memory(old, costs, rank)) else old


def _with_rank(program: Program, rank: int, ops: tuple[Op, ...]) -> Program:
    return replace(program, ranks=(*program.ranks[:rank], ops, *program.ranks[rank + 1 :]))


def _fill_gaps(program: Program, costs: Costs, limit: float | None) -> Program:
    """One sweep over all ranks' idle times; the very same program when no R has moved."""
    graph = build_graph(program)
    times = list_schedule(graph, *timers(program, costs))
    for rank in range(program.num_ranks):
        ops = _fill_rank(program, graph, times, rank)
        if ops != program.ranks[rank]:
            program = _if_it_fits(program, _with_rank(program, rank, ops), rank, costs, 0.0 if limit is None else limit)
    return program


def _fill_rank(program: Program, graph: Graph, times: Times, rank: int) -> tuple[Op, ...]:
    """The rank's ops with every R moved, in turn, into the first gap before it that is long enough, if its own place
    keeps its backward waiting."""
    tasks = graph.rank_tasks[rank]
    left: dict[int, float] = {}  # place in the order -> idle time before it that is not taken yet
    end = 0.0
    for place, task in enumerate(tasks):
        if times.start[task] > end:
            left[place] = times.start[task] - end
        end = times.end[task]
    own, position = program.ranks[rank], {op: place for place, op in enumerate(program.ranks[rank])}
    ready = _gradient_arrivals(graph, times)
    moves: dict[int, list[Op]] = {}
    for place, op in enumerate(own):
        if op.kind != "R":
            continue
        backward = tasks[place] + 1 if place + 1 < len(own) and own[place + 1].unit == op.unit else None
        if backward is None or times.end[tasks[place]] <= ready.get(backward, 0.0):
            continue  # moved already, or its backward waits for the gradient anyway
        length = times.end[tasks[place]] - times.start[tasks[place]]
        first = position[op._replace(kind="F")]
        gap = next((at for at, idle in left.items() if first < at < place and idle >= length > 0), None)
        if gap is not None:
            left[gap] -= length
            moves.setdefault(gap, []).append(op)
    if not moves:
        return own
    moved = {op for group in moves.values() for op in group}
    return tuple(
        each
        for place, op in enumerate(own)
        for each in (*moves.get(place, ()), *(() if op in moved else (op,)))
    )  # fmt: skip


def _gradient_arrivals(graph: Graph, times: Times) -> dict[int, float]:
    """For each backward, when the last of what it waits for has come, its own R apart."""
    arrivals: dict[int, float] = {}
    for task, successors in enumerate(graph.successors):
        if graph.is_message(task) or graph.ops[task].kind in "BI":
            for successor in successors:
                if not graph.is_message(successor):
                    arrivals[successor] = max(arrivals.get(successor, 0.0), times.end[task])
    return arrivals
