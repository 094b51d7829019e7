"""What the units of a program could offload for nothing: the time that hides their copies. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf

from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.graph import Graph
from helixpipe.lowering.order import Times
from helixpipe.planning.offload import OffloadOptions, timed, with_shares
from helixpipe.planning.recompute_choice import Runs
from helixpipe.program.costs import Costs
from helixpipe.program.program import Program, Unit
from helixpipe.program.stages import Piece, Stage
from helixpipe.program.tasks import Buffer


class Base:
    """A program that offloads nothing yet, and what each of its units could offload for nothing.

    hidden: for each rank and unit the share that can be copied in the time that hides it, which may be above 1.
    """

    def __init__(self, program: Program, options: OffloadOptions, costs: Costs):
        self.program, self.costs = program, costs
        self.graph, self.times = timed(program, costs)
        everything = with_shares(program, options, dict.fromkeys(program.units(), 1.0), costs)
        size = BoundCosts(everything, costs).size
        self.hidden: list[dict[Unit, float]] = []
        self.spans: list[dict[Unit, float]] = []
        bound = BoundCosts(program, costs)
        self.recomputing = [sum(bound.recompute_time(op) for op in ops if op.kind in "BI") for ops in program.ranks]
        for rank, tasks in enumerate(self.graph.rank_tasks):
            spans = dict(_spans(self.graph, self.times, tasks))
            shares = {}
            for unit, span in spans.items():
                leaving = size(Buffer("offloaded", rank, *unit))
                copying = max(costs.copy_time(leaving, False), costs.copy_time(leaving, True)) if leaving else 0.0
                if leaving and span > 0:
                    shares[unit] = span / copying if copying else inf
            self.hidden.append(shares)
            self.spans.append(spans)

    def shares(self, places: Sequence[float]) -> dict[Unit, float]:
        """places: of each rank, between nothing (0), all that is hidden (0.5) and everything (1)."""
        shares: dict[Unit, float] = {}
        for rank, place in enumerate(places):
            shares |= self._shares(rank, place)
        return shares

    def exposed(self, rank: int, place: float) -> float:
        """The time of copies that nothing hides."""
        hidden, spans = self.hidden[rank], self.spans[rank]
        return sum(
            max(0.0, share / hidden[unit] - 1) * spans[unit] for unit, share in self._shares(rank, place).items()
        )

    def _shares(self, rank: int, place: float) -> dict[Unit, float]:
        hidden = self.hidden[rank]
        if place <= 0:
            return {}
        if place <= 0.5:
            return {unit: 2 * place * min(1.0, share) for unit, share in hidden.items()}
        most = max([1.0, *(1 / share for share in hidden.values() if 0 < share < 1)])
        factor = 1 + (2 * place - 1) * (most - 1)
        return {unit: min(1.0, factor * share) for unit, share in hidden.items()}


def _spans(graph: Graph, times: Times, tasks: range) -> Iterator[tuple[Unit, float]]:
    """For each unit of a rank the time that hides a copy of it in either direction."""
    ops = [graph.ops[task] for task in tasks]
    start = {op: times.start[task] for op, task in zip(ops, tasks, strict=True)}
    end = {op: times.end[task] for op, task in zip(ops, tasks, strict=True)}
    readers = {}
    for op in reversed(ops):
        if op.kind in "RBI":
            readers[op.unit] = op  # the first that needs what F saved
    forwards = [op for op in ops if op.kind == "F"]
    reading = sorted(readers.values(), key=start.__getitem__)
    until = {op: end[after] for op, after in pairwise(forwards)}
    since = {op: start[before] for before, op in pairwise(reading)}
    for op in forwards:
        reader = readers[op.unit]
        gap = start[reader] - end[op]
        yield op.unit, min(until.get(op, inf) - end[op], start[reader] - since.get(reader, -inf), gap / 2)


def recomputing(stage: Stage, runs: Runs, share: float) -> Stage:
    """The stage with the first layers recomputing that; as it is where it does so already."""
    layers = sorted({piece.layer for piece in stage.pieces if piece.layer >= 0})
    own: list[tuple[Piece, ...]] = []
    for layer in layers[: round(share * len(layers))]:
        for run in runs:
            pieces = tuple(piece for piece in stage.pieces if piece.layer == layer and piece.kind in run)
            if pieces:
                own.append(pieces)
    return replace(stage, recompute=tuple(own)) if own else stage
