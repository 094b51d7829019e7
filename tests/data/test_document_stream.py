"""Steps of whole documents: their order, their lengths, and where a run goes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixpipe.common.errors import DataError
from megatron.pretrain.data.document_files import Excerpt
from megatron.pretrain.data.document_order import DocumentCounts, DocumentOrder, NoDocuments, Share
from megatron.pretrain.data.documents import DocumentStream, StepDocuments


@dataclass
class Fake:
    """Document d is d, d + 1, d + 2, …"""

    sizes: list[int]
    name: str = "fake"
    first_trained: None = None
    lengths: numpy.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.lengths = numpy.array(self.sizes, numpy.int64)

    def read(self, document: int, count: int) -> Excerpt:
        return Excerpt(document + numpy.arange(min(count, self.sizes[document])), None)


def ordered(sizes: list[int], capacity: int = 100, seed: int = 3, **how: str) -> DocumentOrder:
    return DocumentOrder([Share(Fake(sizes), 0, len(sizes))], seed, capacity, how.get("long_documents", "truncate"))


def steps(stream: DocumentStream, first: int, count: int) -> list[StepDocuments]:
    return [stream.step(step) for step in range(first, first + count)]


SIZES = st.lists(st.integers(0, 60), min_size=1, max_size=30).filter(lambda sizes: max(sizes) > 1)


@settings(max_examples=60)
@given(SIZES, st.integers(1, 50), st.one_of(st.tuples(st.integers(1, 9)), st.integers(50, 150)), st.integers(0, 12))
def test_every_document_once_an_epoch_and_a_run_goes_on(
    sizes: list[int], capacity: int, size: int | tuple[int], stop: int
) -> None:
    how = {"documents_a_step": size[0]} if isinstance(size, tuple) else {"max_tokens": size}
    stream = DocumentStream(ordered(sizes, capacity), **how)
    whole = steps(stream, 0, stop + 6)

    # Every document once an epoch, none of less than two tokens, and those of the capacity at most.
    places = [place for step in whole for place in step.places]
    lengths = [length for step in whole for length in step.lengths]
    usable = [document for document, tokens in enumerate(sizes) if tokens > 1]
    assert stream.round_size == len(usable)
    for begin in range(0, len(places) - len(usable) + 1, len(usable)):
        assert sorted(document for _, document in places[begin : begin + len(usable)]) == usable
    assert lengths == [min(sizes[document] - 1, capacity) for _, document in places]
    assert [step.consumed for step in whole] == list(accumulate([0] + [len(step.places) for step in whole[:-1]]))

    # Steps are as large as was asked for, and no smaller than they have to be.
    if isinstance(size, tuple):
        assert all(len(step.places) == size[0] for step in whole)
    else:
        assert all(step.tokens <= size for step in whole)
        assert all(step.tokens + after.lengths[0] > size for step, after in pairwise(whole))

    # What a checkpoint keeps is enough to go on in the middle of an epoch.
    resumed = DocumentStream(ordered(sizes, capacity), first_step=stop, consumed=whole[stop].consumed, **how)
    assert steps(resumed, stop, 6) == whole[stop:]
    assert resumed.lengths(stop + 3) == whole[stop + 3].lengths  # also when it is looked at first
    assert [step.digest for step in whole] == [stream.step(step.step).digest for step in whole]
    assert len({step.digest for step in whole}) == len(whole)

    # And the lengths of the index are those of what is read.
    for step in whole[:2]:
        for number, (_, document) in enumerate(step.places):
            read = stream.read(step, number)
            assert len(read.tokens) == len(read.labels) == len(read.loss_mask) == step.lengths[number]
            numpy.testing.assert_array_equal(read.labels, read.tokens + 1)
            assert read.tokens[0] == document


def test_epochs_and_seeds_have_their_own_order() -> None:
    stream = DocumentStream(ordered([9] * 40), documents_a_step=40)
    first, second = (stream.step(step).places for step in (0, 1))
    assert sorted(first) == sorted(second) and first != second != tuple(sorted(first))
    assert DocumentStream(ordered([9] * 40, seed=4), documents_a_step=40).step(0).places not in (first, second)


def test_steps_come_in_any_order_and_are_forgotten() -> None:
    stream = DocumentStream(ordered(list(range(2, 30))), max_tokens=100)
    seventh = stream.step(7)
    assert stream.step(2).step == 2 and stream.consumed(7) == seventh.consumed
    stream.forget(7)
    assert stream.step(7) is seventh and stream._steps.keys() == {7}
    with pytest.raises(ValueError, match="before the stream's first"):
        DocumentStream(ordered([5]), max_tokens=9, first_step=3).lengths(2)


def test_what_becomes_of_long_and_empty_documents() -> None:
    sizes = [0, 1, 2, 11, 12, 50]
    assert ordered(sizes, 10).counts == DocumentCounts(used=4, truncated=2, skipped=0, empty=2)
    skipping = ordered(sizes, 10, long_documents="skip")
    assert skipping.counts == DocumentCounts(used=2, truncated=0, skipped=2, empty=2)
    assert str(skipping.counts) == "2 documents, 2 too long and skipped, 2 without two tokens left out"
    assert sorted(skipping.trained(0, 9).tolist()) == [1, 10]
    with pytest.raises(
        DataError, match="fake has 2 documents of more than --seq-length 10 tokens, the first of them numb"
    ):
        ordered(sizes, 10, long_documents="refuse")
    with pytest.raises(NoDocuments, match=r"fake has no document for it .0 documents, 3 without two tokens left out"):
        ordered([0, 1, 1])


def test_files_without_weights_are_one_epoch_and_weights_are_shares_of_tokens() -> None:
    shares = [Share(Fake([11] * 30), 0, 30), Share(Fake([41] * 10), 2, 10)]
    order = DocumentOrder(shares, 1, 100, "truncate")
    places = [place for place, _ in order.places(0, 38)]
    assert sorted(places) == [(0, i) for i in range(30)] + [(1, i) for i in range(2, 10)]
    assert {place.file for place in places[:20]} == {0, 1}  # mixed throughout

    weighted = [Share(share.file, share.begin, share.end, weight) for share, weight in zip(shares, (1, 4), strict=True)]
    order = DocumentOrder(weighted, 1, 100, "truncate")
    found = order.places(0, 10 * order.round_size)
    tokens = [sum(length for place, length in found if place.file == file) for file in (0, 1)]
    assert tokens[1] / sum(tokens) == pytest.approx(0.8, abs=0.01)
    of_second = [place.document for place, _ in found if place.file == 1]
    for begin in range(0, len(of_second) - 7, 8):  # in epochs of its own
        assert sorted(of_second[begin : begin + 8]) == list(range(2, 10))
    trained = numpy.concatenate([order.trained(begin, 7) for begin in range(0, 28, 7)])
    assert trained.tolist() == [length for _, length in order.places(0, 28)]


def test_predictions_after_an_end_of_document_can_be_left_out() -> None:
    stream = DocumentStream(ordered([6]), documents_a_step=1, eod=2)
    assert stream.read(stream.step(0), 0).loss_mask.tolist() == [1, 1, 0, 1, 1]
