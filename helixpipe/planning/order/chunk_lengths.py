"""Cuts a sequence into chunks: of equal length, or of equal time.

Under causal attention a later chunk of the same length takes longer. A pipeline step is as slow as its slowest chunk,
so the lengths are chosen on the costs at hand: given by hand, of a model on named hardware, or measured. Seq1F1B
("computation-wise partition", arXiv 2406.03488) balances FLOPs; where attention kernels reach less of the peak than
matrix products, equal FLOPs are not equal times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise
from math import inf, lcm

from helixpipe.common.errors import UserError
from helixpipe.costs.hardware import Hardware
from helixpipe.lowering.bound import stage_work
from helixpipe.lowering.lower import lower
from helixpipe.program.costs import Costs
from helixpipe.program.program import Program
from helixpipe.program.stages import Stage
from helixpipe.program.workload import Extent
from helixpipe.simulate.simulator import Simulation, simulate

KERNEL_TOKENS = 64
"""Chunks start at multiples of this where they can: tiles of matrix products and of attention kernels stay whole."""

CHUNK_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 96, 128, 160)
"""Numbers of chunks that are tried when the best is wanted: what a chunk costs in bubble falls as one over its number,
so steps by ratios of 4/3 and 3/2 (5/4 at the end, for N = 80 and 160 of SPPO's setups) miss at most a few percent of
it."""

OPS_TRIED = 200_000
"""Ops of the programs simulated to find a number of chunks, all together; some tens of seconds. Counts up to FEW_CHUNKS
are tried whatever that takes."""

FEW_CHUNKS = 16
"""The most chunks that are tried where nothing says how short a chunk may be: costs without the price of a short chunk
make more of them look ever better."""

FEW_COUNTS = tuple(count for count in CHUNK_COUNTS if count <= FEW_CHUNKS)

CLOSE = 1e-3
"""Part of a chunk's time to which equal times are equal before lengths are rounded."""


def default_alignment(seq_length: int, chunks: int, unit: int = 1) -> int:
    """Return the tokens that lengths are multiples of: of what ranks can share, and of 64 if the sequence allows."""
    whole = lcm(unit, KERNEL_TOKENS)
    return whole if seq_length >= chunks * whole else unit


def average_lengths(seq_length: int, chunks: int, alignment: int = 1) -> tuple[int, ...]:
    """Return lengths that add up to the sequence and differ by `alignment` tokens at most, longer ones first.

    All but the last are multiples of the alignment. Raises UserError when there are fewer multiples than chunks.
    """
    _require_room(seq_length, chunks, alignment)
    multiples, rest = divmod(seq_length, alignment)
    size, more = divmod(multiples, chunks)
    lengths = [(size + (chunk < more)) * alignment for chunk in range(chunks)]
    return (*lengths[:-1], lengths[-1] + rest)


def balanced_lengths(
    costs: Costs, stages: tuple[Stage, ...], seq_length: int, chunks: int, alignment: int = 1
) -> tuple[int, ...]:
    """Return lengths that add up to the sequence, whose chunks take equally long, forward and backward of all `stages`.

    All but the last are multiples of the alignment. Among those lengths the longest time of a chunk is the least
    possible, and cuts are as near to those of exactly equal times as that allows. Costs without any time give equal
    lengths. Raises UserError when there are fewer multiples than chunks.
    """
    _require_room(seq_length, chunks, alignment)
    cuts = _Cuts(costs, stages, seq_length, chunks, alignment)
    if chunks == 1 or not cuts.time(0, seq_length):
        return average_lengths(seq_length, chunks, alignment)
    equal = cuts.equal_times()
    longest = cuts.least_longest_time(equal)
    earliest = cuts.earliest(longest)
    ends = [0]
    for chunk, target in enumerate(equal, start=1):
        latest = cuts.furthest(ends[-1], chunk, longest, alignment)
        nearest = round(target / alignment) * alignment
        ends.append(min(max(nearest, earliest[chunk]), latest))
    ends.append(seq_length)
    return tuple(end - start for start, end in pairwise(ends))


def chunk_times(costs: Costs, stages: tuple[Stage, ...], lengths: tuple[int, ...]) -> tuple[float, ...]:
    """Time of each chunk, forward and backward of all stages, in the unit of the costs."""
    starts = accumulate(lengths, initial=0)
    stored = len(lengths) > 1
    extents = (Extent(length, start, stored) for length, start in zip(lengths, starts, strict=False))
    return tuple(_chunk_time(costs, stages, extent, sum(lengths)) for extent in extents)


def short_chunks(seq_length: int, chunks: int, micro_batch_size: int, hardware: Hardware) -> str | None:
    """Return a sentence of warning when chunks are on average so short that they waste the hardware, else None."""
    if chunks == 1 or seq_length * micro_batch_size >= chunks * hardware.short_chunk:
        return None
    return (
        f"{chunks} chunks of {seq_length * micro_batch_size / chunks:.0f} tokens of a microbatch are too short to keep "
        f"{hardware.name} busy: below {hardware.short_chunk} tokens, fewer and longer chunks are faster."
    )


def chunk_counts(
    seq_length: int, micro_batch_size: int, hardware: Hardware | None = None, unit: int = 1
) -> tuple[int, ...]:
    """Return the numbers of chunks to simulate: those that leave each chunk a unit of tokens or more.

    Args:
        seq_length: in tokens.
        micro_batch_size: in sequences.
        hardware: with it, those that `short_chunks` does not warn of; without, those up to `FEW_CHUNKS`.
        unit: of what number of tokens lengths must be multiples.
    """
    return tuple(
        count
        for count in (FEW_COUNTS if hardware is None else CHUNK_COUNTS)
        if count == 1 or count * unit <= seq_length
        if hardware is None or short_chunks(seq_length, count, micro_batch_size, hardware) is None
    )


def best_chunks(
    make: Callable[[int], Program],
    costs: Costs,
    fits: Callable[[Simulation], bool] = lambda simulation: True,
    counts: Iterable[int] = FEW_COUNTS,
) -> Program:
    """Return the program with the shortest simulated step among those that `make` returns for the numbers of chunks and
    that fit into the memory; of equally fast ones that with the fewest chunks.

    Counts are tried upwards, and no more of them once two in a row were slower than the fastest before, whether that
    fitted or not, as long as one has fitted: more chunks save ever less bubble and cost ever more. Nor if the programs
    would come to more than `OPS_TRIED` ops. Raises UserError when none fits.
    """
    tried: list[int] = []
    best: tuple[float, Program] | None = None
    fastest, slower, ops, last = inf, 0, 0, 0
    for count in sorted(counts):
        if count > FEW_CHUNKS and tried and ops + last * count / tried[-1] > OPS_TRIED:
            break
        program = make(count)
        tried.append(count)
        ops += (last := sum(map(len, program.ranks)))
        simulation = simulate(lower(program, costs), costs)
        if fits(simulation) and (best is None or simulation.makespan < best[0] * (1 - 1e-9)):
            best = simulation.makespan, program
        slower = 0 if simulation.makespan < fastest * (1 - 1e-9) else slower + 1
        fastest = min(fastest, simulation.makespan)
        if slower == 2 and best is not None and count >= FEW_CHUNKS:
            break
    if best is None:
        raise UserError(
            f"--pipe-sp-splits auto: with none of {', '.join(map(str, tried))} chunks the step fits into the memory."
        )
    return best[1]


def _require_room(seq_length: int, chunks: int, alignment: int) -> None:
    if seq_length < chunks * alignment:
        raise UserError(
            f"--seq-length {seq_length} is too short for {chunks} chunks of {alignment} tokens (--chunk-alignment) or "
            f"more; at most {max(1, seq_length // alignment)} such chunks fit."
        )


def _chunk_time(costs: Costs, stages: tuple[Stage, ...], extent: Extent, whole: float) -> float:
    ops = ((kind, stage) for stage in range(len(stages)) for kind in "FB")
    return sum(costs.op_time(stage_work(kind, stages, stage, (extent,), whole)) for kind, stage in ops)


class _Cuts:
    """Ways to cut one sequence. A cut is the number of tokens before it; the k-1 inner ones are multiples of the
    alignment, so only the last chunk may be shorter than that. Times grow with a chunk's end and shrink with its start,
    so greedy searches from either side are exact."""

    def __init__(self, costs: Costs, stages: tuple[Stage, ...], seq_length: int, chunks: int, alignment: int):
        self.costs, self.stages = costs, stages
        self.seq_length, self.chunks, self.alignment = seq_length, chunks, alignment
        self.known: dict[tuple[int, int], float] = {}
        self.lengths: dict[int, float] = {}
        """The length found last of each chunk, by its number from 1: the first guess of the next search."""

    def time(self, start: int, end: int) -> float:
        """Return the time of the chunk between two cuts."""
        if (start, end) not in self.known:
            extent = Extent(end - start, start, end - start < self.seq_length)
            self.known[start, end] = _chunk_time(self.costs, self.stages, extent, self.seq_length)
        return self.known[start, end]

    def furthest(self, start: int, number: int, longest: float, step: int) -> int:
        """Return the last multiple of `step` at which chunk `number` (from 1) may end if it starts at `start` and takes
        no longer than `longest`; room is left for the chunks after it, and it has one step at least.
        """
        low, high = start // step + 1, -(-self.seq_length // step) - (self.chunks - number)
        if low >= high:
            return low * step

        def early(end: int) -> bool:
            return self.time(start, end * step) <= longest

        # Most chunks end about where the pass before had them end, corrected as if times were in proportion to lengths.
        guess = start + self.lengths.get(number, self.seq_length / self.chunks)
        guess *= 1 if guess <= low * step else 1 + self._missing(start, min(round(guess), self.seq_length), longest)
        middle, jump = min(max(low, int(guess / step)), high), 1
        if early(middle):
            while middle < high and early(min(middle + jump, high)):
                middle, jump = min(middle + jump, high), 4 * jump
            low, high = middle, min(middle + jump - 1, high)
        else:
            while middle > low and not early(max(middle - jump, low)):
                middle, jump = max(middle - jump, low), 4 * jump
            low, high = max(middle - jump, low), max(middle - 1, low)
        while low < high:
            middle = (low + high + 1) // 2
            if early(middle):
                low = middle
            else:
                high = middle - 1
        self.lengths[number] = low * step - start
        return low * step

    def _missing(self, start: int, end: int, longest: float) -> float:
        """Return how much farther than `end` a chunk could reach, as a share of `end`, if times were proportional to
        lengths.
        """
        time = self.time(start, end)
        return (longest / time - 1) * (end - start) / end if time else 0.0

    def equal_times(self) -> list[int]:
        """Return the inner cuts, to a token, of chunks that take equally long: each takes the target time, which is
        adjusted until the last one takes it too.
        """
        target = self.time(0, self.seq_length) / self.chunks
        for _ in range(20):
            cuts = self._greedy(target, 1)
            last = self.time(cuts[-1], self.seq_length)
            if abs(last - target) <= CLOSE * target:
                break
            target += (last - target) / self.chunks
        return cuts[1:]

    def least_longest_time(self, equal: list[int]) -> float:
        """Return the least time that no chunk need exceed, found by halving, then by asking for less than what was
        found.

        equal: the inner cuts of chunks that take equally long, near which it is looked for first.
        """
        lengths = average_lengths(self.seq_length, self.chunks, self.alignment)
        low, high = 0.0, max(chunk_times(self.costs, self.stages, lengths))
        times = [self.time(start, end) for start, end in pairwise((0, *equal, self.seq_length)) if end > start]
        for guess in (max(times) * (1 + CLOSE * (1 << more)) for more in range(0, 8, 2)):
            longest = self._longest_of(guess)
            high = min(high, longest)
            if longest <= guess:
                break
            low = guess
        while high - low > CLOSE * high:
            middle = (low + high) / 2
            longest = self._longest_of(middle)
            low, high = (low, longest) if longest <= middle else (middle, min(high, longest))
        while (longest := self._longest_of(high * (1 - 1e-12))) < high:
            high = longest
        return high

    def earliest(self, longest: float) -> list[int]:
        """Return, for each chunk, the first cut from which the rest of the sequence fits within `longest` a chunk."""
        step = self.alignment
        starts = [self.seq_length]
        for chunk in reversed(range(1, self.chunks)):
            low, high = chunk, (starts[0] - 1) // step
            while low < high:
                middle = (low + high) // 2
                if self.time(middle * step, starts[0]) <= longest:
                    high = middle
                else:
                    low = middle + 1
            starts.insert(0, low * step)
        return [0, *starts]

    def _greedy(self, longest: float, step: int) -> list[int]:
        """Return the first cut, 0, and the inner ones, each as far on as the time allows."""
        cuts = [0]
        for number in range(1, self.chunks):
            cuts.append(self.furthest(cuts[-1], number, longest, step))
        return cuts

    def _longest_of(self, longest: float) -> float:
        """Return the longest time of a chunk if each goes as far as `longest` allows; more than that if it is too
        little.
        """
        cuts = [*self._greedy(longest, self.alignment), self.seq_length]
        return max(self.time(start, end) for start, end in pairwise(cuts))
