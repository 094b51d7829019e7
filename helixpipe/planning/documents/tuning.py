"""The number of slices N of the longest document: each tried, packed, and its step's time predicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Literal, NamedTuple

from helixpipe.common.errors import UserError
from helixpipe.common.flags import check_ranges, option
from helixpipe.common.ranges import MOST_CHUNKS
from helixpipe.lowering.lower import lower
from helixpipe.planning.documents.chunk_times import ChunkTimes
from helixpipe.planning.documents.filling import Fill, Mesh
from helixpipe.planning.documents.packing import Packing, balanced_mesh, check_lengths, fixed_mesh, pack
from helixpipe.planning.order.chunk_lengths import CHUNK_COUNTS
from helixpipe.planning.order.orders import backward_units, forward_units, one_forward_one_backward
from helixpipe.planning.order.pipeline_times import PipelineTimes, makespan
from helixpipe.program.costs import Costs
from helixpipe.program.program import Op, Program
from helixpipe.program.stages import Stage
from helixpipe.program.workload import Workload
from helixpipe.simulate.simulator import simulate

FORWARD_SHARE = 1 / 3
"""The forward's share of a chunk's time, in the estimate of a step."""

MOST_SLICES = 32
"""The most slices that are tried: more are not worth each chunk's launch and latency, and the time to plan."""

ROOM = 1.25
"""Tokens of a chunk, over those of the longest slice, that short documents may fill where the memory allows: without
a long context they take less time than a slice that has one, and with so much room about as much."""

SPREAD_OF_TIME = 0.062
"""The spread of chunks' times within which tokens are made as even as possible, as InfiniPipe publishes it."""

HALVINGS = 4
"""The number of times that the range between cuts of equal time and of equal length is halved."""

SIMULATED = 3
"""Packings that are simulated, of those that are estimated to be fastest."""

CLOSE = 1.02
"""Estimates, over the least, of which simulation may change the order."""

WORTH = 1.04
"""What a step is expected to take before anything is packed, over the least estimate, above which nothing is packed: it
is right to 1 or 2 % where it is near the least."""


@dataclass(frozen=True)
class PackingOptions:
    """Options of how documents of a step become chunks: the switches of an ablation."""

    infinipipe_split: Literal["mesh", "both", "fixed"] = option(
        "mesh",
        "With documents of all lengths: where long ones are cut. mesh: into slices of equal time; both: between that "
        "and equal lengths, so that chunks differ in tokens as little as a spread of their times of 6.2 % allows; "
        "fixed: into equal lengths, and chunks have no limit of time, as Seq1F1B with packing.",
    )
    infinipipe_chunks: str = option(
        "auto",
        "Slices N of the longest document; all chunks take about as long; auto: the best by predicted step time that "
        "fits into the memory.",
        metavar="N|auto",
        at_least=1,
        at_most=MOST_CHUNKS,
        words=("auto",),
    )
    infinipipe_packing: Literal["level", "best-fit", "none"] = option(
        "level",
        "How short documents fill chunks. level: the fewest chunks within the limits of time and tokens, evenly; "
        "best-fit: InfiniPipe's Algorithm 1; none: each has a chunk of its own.",
    )

    @property
    def chunks(self) -> int | None:
        """N; None for auto. Raises UserError."""
        given = self.infinipipe_chunks
        check_ranges(self)
        return None if given == "auto" else int(given)


class ChunkCapacity(NamedTuple):
    """The capacity of a chunk. slices: of the longest document. documents: if that is 1, how many of that length a
    chunk has room for.
    """

    slices: int
    documents: int = 1


class TriedPacking(NamedTuple):
    """A packing that was tried. estimate: of the step (`estimate`), inf if it does not fit. predicted: by simulation,
    if simulated.
    """

    choice: ChunkCapacity
    packing: Packing
    estimate: float
    predicted: float | None = None


@dataclass(frozen=True)
class Tuned:
    """The best packing, and all that were tried, in the order of `choices`."""

    packing: Packing
    tried: tuple[TriedPacking, ...]


def choices(lengths: Sequence[int], ranks: int, alignment: int = 1, least: int = 1) -> list[ChunkCapacity]:
    """Return the capacities to try: from large chunks, of several of the longest document, to such of `least` tokens on
    average. Several documents a chunk leave two chunks a rank, or fill no more than `least` tokens: fewer chunks than
    ranks then take less time than such that waste the hardware.
    """
    check_lengths(lengths)
    longest, total = max(lengths), sum(lengths)
    tried = [
        ChunkCapacity(1, documents)
        for documents in (64, 32, 16, 8, 4, 2)
        if documents * longest <= max(total / (2 * ranks), min(least, 2 * total))
    ]
    tried += [
        ChunkCapacity(count)
        for count in CHUNK_COUNTS
        if count <= MOST_SLICES and (count == 1 or longest >= count * max(least, alignment))
    ]
    return tried


def estimate(packing: Packing, ranks: int) -> float:
    """Return the time of a step of 1F1B over these chunks on `ranks` equal ranks, with messages that take no time."""
    times = [time / ranks for row in packing.chunk_times for time in row]
    forward, backward = ([time * share for time in times] for share in (FORWARD_SHARE, 1 - FORWARD_SHARE))
    return makespan(_orders(packing.workload, ranks), [forward] * ranks, [backward] * ranks, (), ())


def expected(mesh: Mesh, lengths: Sequence[int], times: ChunkTimes, ranks: int) -> float:
    """Return the time of a step of 1F1B over as few chunks as the mesh allows, all of one time: hardly ever more than
    what `estimate` says of the documents packed by it."""
    once, work = times.once, sum(map(times.of_document, lengths))
    count = ceil(sum(lengths) / mesh.tokens)
    if once < mesh.time < inf:
        count = max(count, ceil(work / (mesh.time - once) * (1 - 1e-9)))
    return (work / count + once) * (count + ranks - 1) / ranks


def _orders(workload: Workload, ranks: int) -> list[list[int]]:
    """Return the order of 1F1B over chunks of each rank, as `makespan` takes it."""
    number = {unit: place for place, unit in enumerate(forward_units(workload))}
    backwards = [~number[unit] for unit in backward_units(workload)]
    ahead = workload.most_chunks - 1
    return [one_forward_one_backward(range(len(number)), backwards, ranks - rank - 1 + ahead) for rank in range(ranks)]


@dataclass(frozen=True)
class Predicted:
    """The step of a packing by simulation of 1F1B over its chunks, one of these stages a rank; inf where it does not
    fit into `limit`, in the costs' unit of memory."""

    costs: Costs
    stages: tuple[Stage, ...]
    limit: float | None = None

    def __call__(self, packing: Packing) -> float:
        workload, ranks = packing.workload, len(self.stages)
        if self.limit is None:
            return PipelineTimes(self.stages, workload, self.costs).makespan(_orders(workload, ranks))
        orders = []
        for rank in range(ranks):
            forwards = [Op("F", rank, *unit) for unit in forward_units(workload)]
            backwards = [Op("B", rank, *unit) for unit in backward_units(workload)]
            ahead = ranks - rank - 1 + workload.most_chunks - 1
            orders.append(tuple(one_forward_one_backward(forwards, backwards, ahead)))
        program = Program("packing", self.stages, tuple(orders), workload)
        simulation = simulate(lower(program, self.costs), self.costs)
        return simulation.makespan if max(simulation.device_needs) <= self.limit else inf


def make_mesh(
    lengths: Sequence[int],
    times: ChunkTimes,
    choice: ChunkCapacity,
    options: PackingOptions,
    alignment: int = 1,
    room: float = ROOM,
    even: float = 0.0,
) -> Mesh:
    """Return what the documents are cut by. room, even: see `balanced_mesh`; Algorithm 1 and chunks of fixed lengths
    have no room beyond the mesh. Raises UserError if the longest document is too short for the choice.
    """
    if options.infinipipe_split == "fixed":
        return fixed_mesh(lengths, choice.slices, alignment, choice.documents)
    room = room if options.infinipipe_packing == "level" else 1.0
    return balanced_mesh(lengths, times, choice.slices, alignment, choice.documents, room, even)


def make_packing(
    lengths: Sequence[int],
    times: ChunkTimes,
    choice: ChunkCapacity,
    options: PackingOptions,
    alignment: int = 1,
    room: float = ROOM,
) -> Packing:
    """Pack the documents. For the parameters, see `make_mesh`, whose errors it raises."""
    fill: Fill = options.infinipipe_packing

    def packed(room: float, even: float = 0.0) -> Packing:
        return pack(lengths, times, make_mesh(lengths, times, choice, options, alignment, room, even), fill)

    return _even_in_both(packed, room) if options.infinipipe_split == "both" else packed(room)


def _even_in_both(packed: Callable[[float, float], Packing], room: float) -> Packing:
    """Return the packing whose tokens spread least among those whose times spread little enough; else the one whose
    times spread least. The cuts tried lie between those of equal time and of equal length, with and without room beyond
    the longest slice.
    """
    packings = []
    for each in sorted({room, 1.0}):
        low, high = 0.0, 1.0
        packings.append(packed(each, low))
        for _ in range(HALVINGS if packings[-1].spread_of_time <= SPREAD_OF_TIME else 0):
            packings.append(packed(each, middle := (low + high) / 2))
            low, high = (middle, high) if packings[-1].spread_of_time <= SPREAD_OF_TIME else (low, middle)
    within = [each for each in packings if each.spread_of_time <= SPREAD_OF_TIME]
    if within:
        return min(within, key=lambda each: each.spread_of_tokens)
    return min(packings, key=lambda each: each.spread_of_time)


def tuned(
    lengths: Sequence[int],
    times: ChunkTimes,
    ranks: int,
    options: PackingOptions | None = None,
    alignment: int = 1,
    least: int = 1,
    fits: Callable[[Packing], bool] = lambda packing: True,
    predict: Callable[[Packing], float] | None = None,
    recomputed: Callable[[Packing], float] = lambda packing: 0.0,
) -> Tuned:
    """Return the packing with the shortest step: every choice that is worth it is packed and estimated, and where
    `predict` is given the fastest few of those are simulated by it (inf: does not fit).

    fits: whether the memory holds it, asked before. recomputed: the share of the forwards that are recomputed so that
    it does, which takes its time. least: tokens below which chunks waste the hardware. Raises UserError where nothing
    fits, naming N, and for a number of slices that cannot be.
    """
    options = options or PackingOptions()
    given = options.chunks
    if given is not None:
        only = make_packing(lengths, times, ChunkCapacity(given), options, alignment)
        return Tuned(only, (TriedPacking(ChunkCapacity(given), only, estimate(only, ranks)),))
    every = choices(lengths, ranks, alignment, least)
    outlook = {
        choice: expected(make_mesh(lengths, times, choice, options, alignment), lengths, times, ranks)
        for choice in every
    }
    tried: list[TriedPacking] = []
    for choice in sorted(every, key=outlook.__getitem__):
        if tried and outlook[choice] > WORTH * min(each.estimate for each in tried):
            break
        packing = make_packing(lengths, times, choice, options, alignment)
        if not (fitting := fits(packing)):
            packing = make_packing(lengths, times, choice, options, alignment, room=1.0)
            fitting = fits(packing)
        longer = 1 + FORWARD_SHARE * recomputed(packing) if fitting else inf
        tried.append(TriedPacking(choice, packing, estimate(packing, ranks) * longer))
    tried.sort(key=lambda each: every.index(each.choice))
    if predict is not None:
        tried = _simulated(tried, lambda packing: predict(packing) * (1 + FORWARD_SHARE * recomputed(packing)))
    best = min(tried, key=_time)
    if _time(best) == inf:
        counts = ", ".join(str(each.choice.slices) for each in tried if each.choice.documents == 1)
        raise UserError(
            f"--infinipipe-chunks auto: with none of {counts} slices of the longest document, {max(lengths)} tokens, "
            "the step fits into the memory."
        )
    return Tuned(best.packing, tuple(tried))


def _time(tried: TriedPacking) -> float:
    return tried.estimate if tried.predicted is None else tried.predicted


def _simulated(tried: Sequence[TriedPacking], predict: Callable[[Packing], float]) -> list[TriedPacking]:
    """Predict the few packings that are estimated fastest, and more as long as none of these fits. The others get an
    infinite time.
    """
    simulated: list[TriedPacking] = []
    close = CLOSE * min(each.estimate for each in tried)
    for each in sorted(tried, key=lambda each: each.estimate):
        enough = len(simulated) >= SIMULATED or each.estimate > close
        if each.estimate == inf or (enough and any(_time(other) < inf for other in simulated)):
            simulated.append(each._replace(predicted=inf))
        else:
            simulated.append(each._replace(predicted=predict(each.packing)))
    return sorted(simulated, key=lambda each: (-each.choice.documents, each.choice.slices))
