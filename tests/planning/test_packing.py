"""Algorithm 1 and level filling: every token once, limits kept, no two tails together, and balance."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixpipe.common.errors import UserError
from helixpipe.lowering.validate_workload import check_workload
from helixpipe.planning.documents import filling
from helixpipe.planning.documents.chunk_times import ChunkTimes
from helixpipe.planning.documents.filling import Mesh
from helixpipe.planning.documents.packing import Packing, balanced_mesh, fixed_mesh, most_slices, pack, spread
from helixpipe.program.costs import Work
from helixpipe.program.stages import even_stages
from helixpipe.program.workload import attention_pairs
from tests.planning.packing_costs import MODEL_COSTS

LENGTHS = st.lists(st.one_of(st.integers(1, 12), st.integers(1, 90)), min_size=1, max_size=14)


@dataclass(frozen=True)
class Simple:
    """Times of a chunk: once, and for each token and each pair of a query and a key it sees."""

    once: float = 2.0
    token: float = 1.0
    pair: float = 0.05

    def op_time(self, work: Work) -> float:
        return self.once + self.token * sum(e.tokens for e in work.extents) + self.pair * attention_pairs(work.extents)


def times_of(once: float = 2.0, pair: float = 0.05) -> ChunkTimes:
    return ChunkTimes(Simple(once, pair=pair), even_stages(1, 1), 10, usual=8)


def checked(packing: Packing, lengths: list[int], mesh: Mesh, times: ChunkTimes) -> None:
    """Whatever the filling: what must be true of every packing."""
    check_workload(packing.workload)
    found: dict[int, int] = {}
    for row, chunks in enumerate(packing.workload.microbatches):
        for number, chunk in enumerate(chunks):
            cut = [part for part in chunk if part.document < len(lengths) and part.length < lengths[part.document]]
            assert len(cut) <= 1 and (not cut or chunk[0] == cut[0])  # no two tails, and a tail comes first
            assert number == len(chunks) - 1 or len(chunk) == 1
            for part in chunk:
                found[part.document] = found.get(part.document, 0) + part.length
        assert packing.chunk_times[row] == pytest.approx(
            [times.of_chunk([(part.length, part.start) for part in chunk]) for chunk in chunks]
        )
        for tokens in packing.workload.tokens(row):
            assert tokens % mesh.alignment == 0 and tokens <= mesh.tokens
    assert [found[document] for document in range(len(lengths))] == lengths
    padding = [tokens for document, tokens in found.items() if document >= len(lengths)]
    assert sum(padding) == packing.padding and all(tokens < mesh.alignment for tokens in padding)
    assert packing.tokens == sum(lengths) and packing.documents == len(lengths)
    assert max(map(max, packing.chunk_times)) <= packing.time_limit * (1 + 1e-9)


@given(
    lengths=LENGTHS,
    slices=st.integers(1, 5),
    alignment=st.sampled_from([1, 1, 2, 4]),
    fill=st.sampled_from(["level", "best-fit", "none"]),
    fixed=st.booleans(),
)
@settings(max_examples=150)
def test_every_token_once_within_the_limits(lengths, slices, alignment, fill, fixed):
    if slices > most_slices(max(lengths), alignment):
        return
    times = times_of()
    mesh = fixed_mesh(lengths, slices, alignment) if fixed else balanced_mesh(lengths, times, slices, alignment)
    packing = pack(lengths, times, mesh, fill)
    checked(packing, lengths, mesh, times)
    assert packing == pack(lengths, times, mesh, fill)
    if fill != "best-fit":
        assert packing.time_limit == mesh.time  # only line 14 raises it


def line_14(lengths: list[int], mesh: Mesh, times: ChunkTimes) -> float:
    """The limit of time at the end of Algorithm 1 with the mended line, done naively."""
    limit = mesh.time
    buckets = []
    shorts = []
    for length in sorted(lengths, reverse=True):
        if length <= max(mesh.lengths[0], mesh.tokens if mesh.slices == 1 else 0):
            shorts.append(length)
            continue
        start = 0
        for most in mesh.lengths:
            if length - start <= most:
                break
            start += most
        buckets.append([(length - start, start)])
    for length in shorts:
        room = [each for each in buckets if sum(part[0] for part in each) + length <= mesh.tokens]
        if not room:
            buckets.append([(length, 0)])
            continue
        while True:
            fits = [each for each in room if times.of_chunk([*each, (length, 0)]) <= limit + 1e-9]
            if fits:
                break
            limit = max(limit, min(times.of_chunk([*each, (length, 0)]) for each in room))
        min(fits, key=lambda each: times.of_chunk(each) / sum(part[0] for part in each)).append((length, 0))
    return limit


@given(lengths=LENGTHS, slices=st.integers(1, 5))
@settings(max_examples=60)
def test_the_limit_rises_by_line_14_alone(lengths, slices):
    if max(lengths) < slices:
        return
    times = times_of(once=0.0)
    mesh = balanced_mesh(lengths, times, slices)
    assert pack(lengths, times, mesh, "best-fit").time_limit == pytest.approx(line_14(lengths, mesh, times))


def test_tails_take_short_documents_and_rows_are_chains():
    times = times_of(once=0.0, pair=0.01)
    mesh = Mesh((10, 8), 12, 40.0)
    packing = pack([18, 15, 3, 4, 12], times, replace(mesh, lengths=(10, 8)), "level")
    by_first = {row[0][0].document: row for row in packing.workload.microbatches}
    assert [part.length for part in by_first[0][0]] == [10] and by_first[0][1][0].start == 10
    assert len(by_first[0]) == len(by_first[1]) == len(by_first[4]) == 2  # 12 is longer than the mesh's first
    assert sum(len(chunk) for row in packing.workload.microbatches for chunk in row) == 8
    assert len(packing.workload) == 3  # both short ones joined tails


def test_line_14_as_printed_would_not_end():
    """The chunk with the least time has no room for the tokens: only others may raise the limit."""
    times = times_of(once=0.0, pair=0.0)
    mesh = Mesh((10, 10), 10, 20.0)
    packing = pack([20, 13, 9, 2], times, mesh, "best-fit")
    checked(packing, [20, 13, 9, 2], mesh, times)


def test_level_is_more_even_than_best_fit():
    lengths = [900, 400, 300] + [20 + 7 * number % 90 for number in range(80)]
    times = times_of(pair=0.002)
    for slices in (4, 8):
        mesh = balanced_mesh(lengths, times, slices)
        level, best_fit = (pack(lengths, times, mesh, fill) for fill in ("level", "best-fit"))
        assert max(map(max, level.chunk_times)) <= mesh.time * (1 + 1e-9)
        assert max(map(max, best_fit.chunk_times)) > 1.2 * mesh.time
        assert len(level.chunk_tokens) <= 1.15 * len(best_fit.chunk_tokens)


def test_a_mesh_of_equal_times():
    times = times_of(pair=0.02)
    mesh = balanced_mesh([50, 400], times, 4)
    starts = [sum(mesh.lengths[:number]) for number in range(4)]
    each = [times.of_slice(length, start) for length, start in zip(mesh.lengths, starts, strict=True)]
    assert sum(mesh.lengths) == 400 and mesh.lengths[0] > 2 * mesh.lengths[3]
    assert max(each) == mesh.time and min(each) > 0.97 * mesh.time
    assert fixed_mesh([50, 400], 4) == Mesh((100,) * 4, 100, inf)


def test_chunks_of_several_documents_where_none_is_long():
    times = times_of(pair=0.0)
    lengths = [5] * 12
    alone, together = (pack(lengths, times, balanced_mesh(lengths, times, 1, documents=n)) for n in (1, 4))
    assert len(alone.chunk_tokens) == 12 and together.chunk_tokens == (20, 20, 20)


@given(
    longest=st.integers(2, 400),
    slices=st.integers(2, 8),
    alignment=st.sampled_from([1, 2, 8, 16]),
    once=st.floats(0.0, 30.0),
    pair=st.floats(0.0, 0.05),
)
@settings(max_examples=150, deadline=None)
def test_cuts_are_the_multiples_nearest_in_time(longest, slices, alignment, once, pair):
    if slices > most_slices(longest, alignment):
        return
    times = times_of(once=once, pair=pair)
    ends = list(accumulate(balanced_mesh([longest], times, slices, alignment).lengths))[:-1]
    share = (times.of_slice(longest) - times.once) / slices
    for number, end in enumerate(ends, 1):
        before = ends[number - 2] if number > 1 else 0
        last = (longest - 1) // alignment - (slices - 1 - number)
        valid = range(before + alignment, last * alignment + 1, alignment)
        error = {cut: abs(times.of_slice(cut) - times.once - number * share) for cut in valid}
        assert end in error and error[end] <= min(error.values()) + 1e-9 * share


def test_spread():
    assert spread([3.0, 5.0]) == 0.25 and spread([]) == 0.0 and spread([2, 2]) == 0.0


def test_a_real_model_keeps_its_limits():
    """What is estimated while filling is corrected by what the cost model says of the whole chunk."""
    lengths = [30000, 21000, 9000] + [64 + 97 * number % 5000 for number in range(90)]
    times = ChunkTimes(MODEL_COSTS, even_stages(MODEL_COSTS.model.layers, 1), 2.0)
    mesh = balanced_mesh(lengths, times, 6, 64)
    packing = pack(lengths, times, mesh)
    checked(packing, lengths, mesh, times)
    assert packing.time_limit == mesh.time and packing.spread_of_time < 0.1


@pytest.mark.parametrize(
    ("lengths", "slices", "alignment", "says"),
    [
        ([], 1, 1, "no documents"),
        ([4, 0, 3], 1, 1, "document 1 has 0 tokens"),
        ([30, 7], 16, 2, "--infinipipe-chunks 16 is too many for a longest document of 30 tokens.*at most 15"),
    ],
)
def test_refused(lengths, slices, alignment, says):
    times = times_of()
    with pytest.raises(UserError, match=says):
        pack(lengths, times, balanced_mesh(lengths, times, slices, alignment))


@dataclass(frozen=True)
class Crowded(Simple):
    """Documents of a chunk get in each other's way, which what one adds to a chunk does not show."""

    crowding: float = 0.5

    def op_time(self, work: Work) -> float:
        return super().op_time(work) + self.crowding * (len(work.extents) - 1) ** 2


def test_limits_are_kept_where_estimates_are_too_low():
    times = ChunkTimes(Crowded(), even_stages(1, 1), 10, usual=8)
    lengths = [60, 40, *[4] * 30]
    mesh = balanced_mesh(lengths, times, 3)
    packing = pack(lengths, times, mesh)
    checked(packing, lengths, mesh, times)
    assert packing.time_limit == mesh.time


class Waiting(Crowded):
    """Chunks that are too short to hide it take as long as something else."""

    def op_time(self, work: Work) -> float:
        return max(super().op_time(work), 5000 + self.crowding * len(work.extents))


@pytest.mark.parametrize("crowding", [0.5, 1e-3, 1e-7])
def test_places_are_looked_for_a_few_times_however_much_estimates_are_too_low(
    crowding: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though a limit lowered by what a chunk takes too long lets every document keep its place."""
    looked = []

    def noted(*given: Any) -> Any:
        looked.append(given)
        assert len(looked) < 100
        return leveled(*given)

    leveled = filling._leveled
    monkeypatch.setattr(filling, "_leveled", noted)
    times = ChunkTimes(Waiting(crowding=crowding, pair=0.0), even_stages(1, 1), 10)
    for lengths in ([1] * 5, [3] * 8, [1, 2, 3, 4]):
        mesh = balanced_mesh(lengths, times, 1, 4)
        checked(pack(lengths, times, mesh), lengths, mesh, times)
        looked.clear()
