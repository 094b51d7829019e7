"""Computes how many tokens a pipeline can hold from the bytes that the cost model counts.

Under 1F1B over chunks, rank r of p keeps all chunks of a row until its first backward, and those that are on their way
down the pipeline: of rows of at most N chunks it holds N + p - r - 1 chunks at its peak (InfiniPipe has it with ranks
from 1). What a token takes of a rank is the model's: saved tensors, keys and values and their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from math import inf
from operator import le, sub

from helixpipe.program.costs import Contents, Costs
from helixpipe.program.stages import Segment, Stage
from helixpipe.program.workload import Extent, Workload


def token_capacity(
    costs: Costs, stages: Sequence[Stage], limit: float | None, tokens: int, whole: float | None
) -> list[float]:
    """Return the most tokens in flight for each stage, one a rank, with chunks of `tokens` tokens; inf without a limit.

    An estimate, near what the sweep says of a step: at the peak an op's workspace, what it recomputes, and messages of
    three chunks are taken to be there beside all that is kept, and each row to be cut; but keys and values of a row's
    chunks that are done, which stay as long as the row, are not. whole: as of `Work`. limit: in the unit of memory.
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
        beside = size("workspace", segments) + size("recomputed", segments)
        cuts = [stages[cut].pieces[:1] for cut in (number, number + 1) if 0 < cut < len(stages)]
        beside += 3 * max((size("activation", (Segment(cut, False),)) for cut in cuts), default=0.0)
        left = limit - costs.static_memory(stage.pieces) - beside
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
