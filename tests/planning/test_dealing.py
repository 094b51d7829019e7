"""Dealing documents over data-parallel ranks."""

from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixpipe.common.errors import UserError
from helixpipe.planning.documents.dealing import deal, differencing, greedy, unevenness

BATCH = st.lists(st.integers(1, 60), min_size=1, max_size=12)


@given(lengths=BATCH, ranks=st.integers(1, 4))
@settings(max_examples=80)
def test_every_document_once_and_never_worse_than_greedy(lengths, ranks):
    times = [length + length**2 / 40 for length in lengths]
    if len(lengths) < ranks:
        with pytest.raises(UserError, match="too few"):
            deal(times, lengths, ranks)
        return
    hands = deal(times, lengths, ranks)
    assert sorted(document for hand in hands for document in hand) == list(range(len(lengths)))
    assert len(hands) == ranks and all(hands)
    assert unevenness(hands, times, lengths)[0] <= unevenness(greedy(times, lengths, ranks), times, lengths)[0] + 1e-9


def test_near_the_best_there_is():
    draws = random.Random(3)
    for _ in range(5):
        lengths = [draws.randint(1, 100) for _ in range(7)]
        sums = (
            [sum(n for n, r in zip(lengths, at, strict=True) if r == rank) for rank in range(3)]
            for at in product(range(3), repeat=7)
        )
        best = min(max(each) for each in sums)
        assert unevenness(deal(lengths, lengths, 3), lengths, lengths)[0] <= 1.1 * best


def test_differencing_beats_greedy_on_skewed_batches():
    draws = random.Random(1)
    gains = []
    for _ in range(20):
        lengths = [min(int(draws.lognormvariate(6.5, 1.8)), 12000) + 1 for _ in range(64)]
        times = [length + length**2 / 30000 for length in lengths]
        even = sum(times) / 4
        gains.append(
            [unevenness(way(times, lengths, 4), times, lengths)[0] / even - 1 for way in (differencing, greedy)]
        )
    assert sum(by_differencing for by_differencing, _ in gains) < 0.5 * sum(by_greedy for _, by_greedy in gains)


def test_tokens_decide_among_equal_times():
    times, tokens = [4.0, 4.0, 4.0, 4.0], [10, 1, 10, 1]
    assert unevenness(deal(times, tokens, 2), times, tokens) == (8.0, 11)


def test_one_rank_and_no_rank():
    assert deal([3.0, 1.0], [3, 1], 1) == ((0, 1),)
    with pytest.raises(UserError, match="0 data-parallel ranks"):
        deal([1.0], [1], 0)


def test_the_same_whatever_the_order_of_equals():
    assert deal([1.0] * 7, [5] * 7, 3) == deal([1.0] * 7, [5] * 7, 3)
    assert sorted(map(len, deal([1.0] * 7, [5] * 7, 3))) == [2, 2, 3]


def test_no_rank_goes_without_a_document():
    assert all(deal([100.0, 0.0, 0.0], [9, 1, 1], 3))
