"""A step over documents of all lengths: dealt over pipelines, packed into rows and ordered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from math import inf
from operator import le, sub

from helixpipe.common.collector import collector_paused
from helixpipe.common.errors import ScheduleError
from helixpipe.planning.catalogue import Shape
from helixpipe.planning.documents.chunk_times import ChunkTimes
from helixpipe.planning.documents.dealing import Hands, deal, document_times
from helixpipe.planning.documents.packing import Packing
from helixpipe.planning.documents.tuning import PackingOptions, Predicted, tuned
from helixpipe.planning.memory.recompute import RecomputeOptions
from helixpipe.program.costs import Contents, Costs
from helixpipe.program.program import Program
from helixpipe.program.stages import Segment, Stage, even_stages
from helixpipe.program.workload import Extent, Slice, Workload


def dealt(lengths: Sequence[int], costs: Costs, layers: int, pipelines: int) -> tuple[Hands, tuple[float, ...]]:
    """Return the documents of each pipeline, by number, and each document's predicted time: what it adds to a chunk of
    usual size. Raises UserError for fewer documents than pipelines.
    """
    whole = sum(lengths) / max(len(lengths), 1)
    each = tuple(document_times(lengths, ChunkTimes(costs, even_stages(costs.layer_kinds(layers), 1), whole)))
    return deal(each, lengths, pipelines), each


MOST_ROWS_OF_PADDING = 64


@dataclass(frozen=True)
class StepPacker:
    """Packs a pipeline's documents for a schedule.

    shape: of the problem, but for the microbatches; its costs must be known. adapts: whether the schedule itself
    recomputes what the memory asks for. alignment: tokens of a chunk are a multiple of it. least: tokens below which
    chunks waste the hardware.
    """

    shape: Shape
    options: PackingOptions
    adapts: bool = False
    alignment: int = 1
    least: int = 1

    @collector_paused()
    def pack(self, lengths: Sequence[int], search: bool = True) -> Packing:
        """Return the documents as rows of chunks, with the best number of slices if that is left open: by simulation of
        1F1B over its chunks, whatever the schedule. If layers are recomputed as the memory asks for it, any packing
        that fits with all of them recomputed may be chosen. search: whether the fastest few by estimate are simulated;
        else estimates decide, much faster. Raises UserError if nothing fits.
        """
        shape, costs = self.shape, self.costs
        times = self.times(lengths)
        even = even_stages(shape.layer_kinds, shape.ranks)
        stages = RecomputeOptions("full").stages(even) if self.adapts else shape.recompute.stages(even)
        tokens = max(min(sum(lengths) // (8 * shape.ranks), max(lengths)), 1)
        held = token_capacity(costs, stages, shape.memory_limit, tokens, times.whole)
        kept = token_capacity(costs, even, shape.memory_limit, tokens, times.whole)
        predicted = Predicted(costs, shape.even_stages(shape.ranks), None if self.adapts else shape.memory_limit)
        packed = tuned(
            lengths,
            times,
            shape.ranks,
            self.options,
            self.alignment,
            self.least,
            lambda packing: fits(packing.workload, held),
            predicted if search else None,
            lambda packing: over_capacity(packing.workload, kept) if self.adapts else 0.0,
        )
        return packed.packing

    def times(self, lengths: Sequence[int]) -> ChunkTimes:
        """Return the times of chunks of these documents, over the whole model."""
        return ChunkTimes(self.costs, even_stages(self.shape.layer_kinds, 1), sum(lengths) / len(lengths))

    @property
    def costs(self) -> Costs:
        assert self.shape.costs is not None
        return self.shape.costs


def row_program(build: Callable[[Shape], Program], shape: Shape, workload: Workload, alignment: int = 1) -> Program:
    """Return a schedule's program of these rows. build: makes its program from a shape with a `ragged` workload. If it
    needs a multiple of something, as helix does, rows of padding are added. Raises ScheduleError if no number is right.
    """
    refusals: list[ScheduleError] = []
    for missing in range(MOST_ROWS_OF_PADDING):
        rows = _with_padding(workload, missing, alignment)
        try:
            return build(replace(shape, microbatches=len(rows), ragged=rows))
        except ScheduleError as error:
            refusals.append(error)
    raise refusals[0]


def _with_padding(workload: Workload, rows: int, tokens: int) -> Workload:
    """Add `rows` rows of `tokens` tokens of padding, each a document of its own, numbered after the others."""
    documents = 1 + max(part.document for chunks in workload.microbatches for chunk in chunks for part in chunk)
    added = tuple(((Slice(documents + number, 0, tokens),),) for number in range(rows))
    return Workload((*workload.microbatches, *added)) if rows else workload


def token_capacity(
    costs: Costs, stages: Sequence[Stage], limit: float | None, tokens: int, whole: float | None
) -> list[float]:
    """Return the most tokens in flight for each stage, one a rank, with chunks of `tokens` tokens; inf without a limit.

    An estimate, near what the memory sweep of a step gives. It counts, at the peak, what is kept, an op's workspace,
    what it recomputes, and messages of three chunks; it takes each row to be cut. It leaves out keys and values of a
    row's finished chunks, which stay as long as the row. whole: as of `Work`. limit: in the unit of memory.
    """
    if limit is None:
        return [inf] * len(stages)
    room = []
    chunk = (Extent(tokens, 0, True),)
    for number, stage in enumerate(stages):

        def size(kind: str, segments: tuple[Segment, ...]) -> float:
            return costs.size(Contents(kind, segments, chunk, whole, in_backward=True))

        segments = stage.segments
        kept = size("saved", segments) + size("keys_values", segments) + size("kv_gradients", segments)
        besides_kept = size("workspace", segments) + size("recomputed", segments)
        cuts = [stages[cut].pieces[:1] for cut in (number, number + 1) if 0 < cut < len(stages)]
        besides_kept += 3 * max((size("activation", (Segment(cut, False),)) for cut in cuts), default=0.0)
        left = limit - costs.static_memory(stage.pieces) - besides_kept
        room.append(max(left, 0.0) * tokens / kept if kept else inf)
    return room


def tokens_in_flight(workload: Workload, ranks: int) -> list[int]:
    """Return the most tokens that each rank keeps at a time under 1F1B over chunks: right after one of its forwards."""
    rows = [workload.tokens(row) for row in range(len(workload))]
    forwards = [*accumulate(chain.from_iterable(rows))]
    backwards = [*accumulate(chain.from_iterable(map(reversed, rows)), initial=0)]
    warmups = (ranks - rank - 1 + workload.most_chunks - 1 for rank in range(ranks))
    return [max(map(sub, forwards[min(warmup, len(forwards) - 1) :], backwards)) for warmup in warmups]


def over_capacity(workload: Workload, capacity: Sequence[float]) -> float:
    """Return the share of the fullest rank's tokens that exceeds its capacity; 0 if all fits. capacity: of each rank
    (`token_capacity`).
    """
    kept = tokens_in_flight(workload, len(capacity))
    return max(max(1 - most / tokens, 0.0) for tokens, most in zip(kept, capacity, strict=True))


def fits(workload: Workload, capacity: Sequence[float]) -> bool:
    """Whether no rank keeps more tokens than its capacity. capacity: of each rank (`token_capacity`)."""
    return all(map(le, tokens_in_flight(workload, len(capacity)), capacity))
