"""Pieces over two halves of the tokens: what runs while a collective is under way, and where the tokens are.

That gradients equal those of one process is tested under schedules (tests/runtime/halves_cases.py).
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helixpipe.model.attention.context_parallel import ContextParallel, rows_of
from helixpipe.model.halving import Halving
from tests.distributed import run_ranks
from tests.model.halves import logits_of, watched, watched_over_context, with_dropout

CPU = torch.device("cpu")


@given(st.integers(1, 9), st.integers(1, 8))
def test_ranks_have_their_parts_of_the_first_half_and_then_of_the_second(rows: int, ranks: int) -> None:
    cut = Halving(rows * ranks, ranks)
    assert [*cut.half(0), *cut.half(1)] == list(range(rows * ranks))
    order = cut.gathered_order(CPU)
    if ranks == 1 or rows == 1:
        assert order is None
        return
    assert order is not None
    first, second = cut.rows
    assert first - second in (0, 1)
    for rank, own in enumerate(order.view(ranks, rows).tolist()):
        assert own[:first] == list(cut.half(0))[rank * first : (rank + 1) * first]
        assert own[first:] == list(cut.half(1))[rank * second : (rank + 1) * second]


@given(st.integers(1, 4), st.integers(1, 5), st.data())
def test_rows_are_found_in_the_runs_of_a_ring(size: int, each: int, data: st.DataObject) -> None:
    class Group:
        def size(self) -> int:
            return size

        def rank(self) -> int:
            return size - 1

    runs = ContextParallel(Group(), "p2p").runs(3, 2 * size * each)
    tokens = [token for run in runs for token in run]
    start = data.draw(st.integers(0, len(tokens) - 1))
    stop = data.draw(st.integers(start + 1, len(tokens)))
    found = rows_of(runs, range(start, stop))
    assert [token for run in found for token in run] == tokens[start:stop]
    assert all(found)


def idle(events: list[str]) -> list[int]:
    """Collectives, by their number in the order of their starts, that nothing is computed beside."""
    starts = {event.split()[1]: place for place, event in enumerate(events) if event.startswith("start")}
    ends = {event.split()[1]: place for place, event in enumerate(events) if event.startswith("end")}
    assert starts.keys() == ends.keys() and all(starts[number] < ends[number] for number in starts)
    first = min((int(number) for number in starts), default=0)
    return [int(number) - first for number in starts if "product" not in events[starts[number] : ends[number]]]


@pytest.mark.parametrize("split", [False, True], ids=["B", "I and W"])
def test_collectives_run_while_the_other_half_computes(split: bool) -> None:
    """All but what the first half begins with and the second ends with. A late result is NaN until it is waited for, so
    that a use before would be seen in the gradients. With W apart the last sum of input gradients is an end, too."""
    ranks = run_ranks(watched, 2, split, timeout=120.0)
    for found in ranks:
        for (_, sequence_parallel), (forward, backward, finite) in found.items():
            assert finite
            assert idle(forward) == ([0, 15] if sequence_parallel else [7])
            last = [23 if sequence_parallel else 7] if split else []
            assert idle(backward) == ([0] if sequence_parallel else []) + last


def test_swaps_run_while_the_other_half_computes() -> None:
    """Of the first half's first swap in the forward, and the second half's in the backward, each beside a product."""
    for forward, backward, finite in run_ranks(watched_over_context, 2, timeout=120.0):
        assert finite
        assert sum(event.startswith("start") for event in forward) == 8
        assert idle(forward) == [] and idle(backward) == []


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 6), st.integers(0, 5))
def test_ranks_that_swap_have_their_runs_of_each_half(size: int, tp: int, rows: int, offset: int) -> None:
    """What they swap of a half are then its tokens in their order."""

    class Group:
        def size(self) -> int:
            return size

    context = ContextParallel(Group(), "a2a", tp)
    cut, length = Halving(rows * tp, tp), rows * tp * size
    runs = [context.runs(offset, length, rank) for rank in range(size)]
    assert all(sum(map(len, own)) == rows * tp for own in runs)
    if size == 1 or not cut.possible:
        assert all(len(own) == 1 for own in runs)
    tokens = [[token for run in own for token in run] for own in runs]
    halves = [[token for own in tokens for token in own[half.start : half.stop]] for half in map(cut.half, (0, 1))]
    assert halves[0] + halves[1] == list(range(offset, offset + length))


def test_logits_are_in_the_order_of_the_tokens() -> None:
    assert all(error < 1e-12 for results in run_ranks(logits_of, 2, timeout=120.0) for error in results)


def test_dropout_does_not_depend_on_which_pieces_run_together() -> None:
    for results in run_ranks(with_dropout, 2, timeout=120.0):
        for result in results:
            assert result["error"][0] < 1e-9, result
