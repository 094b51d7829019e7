"""Rows of documents as a workload lays them out, and the threads that read them."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helixpipe.program.workload import Chunk, Slice, Workload
from megatron.pretrain.data.documents import DocumentStream
from megatron.pretrain.data.rows import RowDocument, RowReader, parts
from tests.data.test_document_stream import ordered

CPU = torch.device("cpu")


def cut(document: int, length: int, lengths: list[int]) -> list[Slice]:
    """A document in slices of at most the given lengths, over and over."""
    found, start = [], 0
    for most in itertools.cycle(lengths):
        found.append(Slice(document, start, min(most, length - start)))
        start += found[-1].length
        if start == length:
            return found
    raise AssertionError


@settings(max_examples=40)
@given(
    st.lists(st.integers(2, 30), min_size=1, max_size=9),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(1, 4),
    st.integers(1, 8),
    st.integers(0, 2),
    st.randoms(use_true_random=False),
)
def test_rows_are_the_documents_whatever_the_chunks(
    sizes: list[int], cuts: list[int], rows: int, alignment: int, fillers: int, chance: random.Random
) -> None:
    """Fillers, at the ends of rows and in rows of their own, are no real tokens on any rank."""
    stream = DocumentStream(ordered(sizes), documents_a_step=len(sizes))
    dealt = list(range(len(sizes)))  # a rank's documents, in the order it was dealt them
    chance.shuffle(dealt)
    dealt = dealt[: max(1, len(dealt) - 2)]
    lengths = [stream.lengths(0)[number] for number in dealt]
    microbatches: list[tuple[Chunk, ...]] = []
    expected: list[list[tuple[int, int]]] = []
    for first in range(0, len(dealt), rows):
        own = list(range(first, min(first + rows, len(dealt))))
        slices = [part for document in own for part in cut(document, lengths[document], cuts)]
        padding = -sum(lengths[document] for document in own) % alignment
        slices += [Slice(len(dealt) + first, 0, padding)] if padding else []
        half = len(slices) // 2  # chunks hold slices of several documents
        microbatches.append(tuple(chunk for chunk in (tuple(slices[:half]), tuple(slices[half:])) if chunk))
        expected.append([(dealt[document], lengths[document]) for document in own] + [(-1, padding)] * (padding > 0))
    for number in range(fillers):
        microbatches.append(((Slice(2 * len(dealt) + number, 0, alignment),),))
        expected.append([(-1, alignment)])

    reader = RowReader(stream, CPU, threads=2)
    middle = RowReader(stream, CPU, whole=False)
    for each in (reader, middle):
        each.ask(0, Workload(tuple(microbatches)), dealt)
        each.ask(1, Workload(tuple(microbatches[:0])), [])
    made, bounds = reader.take(0), middle.take(0)
    assert reader.take(1) == []
    reader.close()
    middle.close()
    for batch, bound, documents in zip(made, bounds, expected, strict=True):
        tokens, labels, mask, positions = [], [], [], []
        for number, length in documents:
            begin = stream.step(0).places[number].document
            tokens += [begin + i for i in range(length)] if number >= 0 else [0] * length
            labels += [begin + i + 1 for i in range(length)] if number >= 0 else [0] * length
            mask += [float(number >= 0)] * length
            positions += range(length)
        assert batch.tokens.tolist() == [tokens] and batch.labels.tolist() == [labels]
        assert batch.loss_mask.tolist() == [mask]
        assert batch.documents is not None and bound.documents is not None
        assert batch.documents.lengths == bound.documents.lengths == (tuple(length for _, length in documents),)
        real = None if all(mask) else [[bool(value) for value in mask]]
        for tokens_of in (batch.real, bound.real):
            assert (None if tokens_of is None else tokens_of.mask.tolist()) == real
        assert batch.position_ids is None and batch.documents.positions()[:, 0].tolist() == positions
        assert (batch.tokens.dtype, batch.loss_mask.dtype, bound.tokens.numel()) == (torch.int64, torch.float32, 0)


@pytest.mark.parametrize(
    "slices",
    [
        [Slice(0, 1, 3)],
        [Slice(0, 0, 3), Slice(0, 4, 1)],
        [Slice(0, 0, 3), Slice(1, 0, 2), Slice(0, 3, 1)],
        [Slice(0, 0, 3), Slice(1, 0, 2), Slice(0, 0, 3)],
    ],
)
def test_documents_must_lie_whole_in_their_row(slices: list[Slice]) -> None:
    with pytest.raises(ValueError, match=r"document 0 is not whole in its row"):
        parts([tuple(slices)])


def test_slices_of_a_document_make_one_part() -> None:
    chunks = [(Slice(4, 0, 3),), (Slice(4, 3, 2), Slice(1, 0, 2)), (Slice(2, 0, 1),)]
    assert parts(chunks) == (RowDocument(4, 5), RowDocument(1, 2), RowDocument(2, 1))


def test_a_plan_for_other_documents_and_steps_out_of_turn_are_refused() -> None:
    stream = DocumentStream(ordered([6, 9]), documents_a_step=2)
    lengths = stream.lengths(0)
    workload = Workload((((Slice(0, 0, lengths[0]),),), ((Slice(1, 0, lengths[1]),),)))
    reader = RowReader(stream, CPU)
    with pytest.raises(
        ValueError, match=f"document 0 of the plan has {lengths[0]} tokens, in step 0 it has {lengths[1]}"
    ):
        reader.ask(0, workload, [1, 0])
    reader.ask(0, workload, [0, 1])
    with pytest.raises(ValueError, match="the rows of step 0 come next, not those of step 1"):
        reader.take(1)
    reader.close()
