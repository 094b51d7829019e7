"""Training, validation and test data as whole documents, behind the same data flags as samples of equal length.

`--split` divides the documents of each file as it does for samples: train has the first, validation the next. Files of
conversations (--sft) are tokenized by rank 0 first.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import numpy
import torch
from torch.utils.data import Dataset

from helixpipe.common.errors import DataError
from helixpipe.common.output import say
from megatron.pretrain.data.boundaries import check_boundaries, end_of_document
from megatron.pretrain.data.conversation_files import open_conversations, tokenize_once
from megatron.pretrain.data.document_files import DocumentFile, IndexedDocuments, MockDocuments
from megatron.pretrain.data.document_order import DocumentOrder, NoDocuments, Share
from megatron.pretrain.data.documents import DocumentStream, read_document
from megatron.pretrain.data.indexed_files import check_vocabulary, read_indexed_file
from megatron.pretrain.data.options import DataOptions, SplitSource, split_sources
from megatron.pretrain.data.rows import row
from megatron.pretrain.data.together import AllRanks

logger = logging.getLogger(__name__)


class Orders(NamedTuple):
    """The documents of each split; None where it has none."""

    train: DocumentOrder | None
    valid: DocumentOrder | None
    test: DocumentOrder | None

    @property
    def counts(self) -> list[str]:
        """A line for the log about each split that has some: how many, how many are cut or left out."""
        return [f"{name}: {order.counts}" for name, order in self._asdict().items() if order is not None]


def build_orders(options: DataOptions, tokenizer: Any) -> Orders:
    """Return the documents of the three splits, in their order. Collective, for every rank: nothing but indices is
    read.

    Raises DataError, on every rank, when files are missing or corrupt, hold no documents for training, or documents are
    too long and `options.long_documents` refuses them.
    """
    sources = split_sources(options)
    paths = list(dict.fromkeys(path for source in sources if source.blend for path in source.blend[0]))
    ranks = AllRanks.of_job()
    folders = ranks.on_first(lambda: _prepare(options, tokenizer, paths))
    orders = ranks.together(lambda: _orders(options, tokenizer, sources, folders))
    if ranks.is_first:
        for line in orders.counts:
            say(f" > {line}")
    return orders


def build_stream(
    order: DocumentOrder,
    options: DataOptions,
    tokenizer: Any,
    documents_a_step: int | None,
    *,
    first_step: int = 0,
    consumed: int = 0,
) -> DocumentStream:
    """Return the stream of a split's steps: `options.max_tokens` tokens in each, or else `documents_a_step`."""
    return DocumentStream(
        order,
        documents_a_step=None if options.max_tokens is not None else documents_a_step,
        max_tokens=options.max_tokens,
        first_step=first_step,
        consumed=consumed,
        eod=end_of_document(tokenizer) if options.eod_mask_loss else None,
    )


class PaddedDocuments(Dataset[dict[str, torch.Tensor]]):
    """Samples of equal length, each one document with padding behind it, which has no loss.

    As megatron-core's datasets: a sample is a dict of `tokens`, `labels`, `position_ids` and `loss_mask`, each
    [seq_length]. Position ids begin anew at the padding. `real` (bool) tells the document from the padding.
    """

    def __init__(self, order: DocumentOrder, samples: int, seq_length: int, eod: int | None) -> None:
        self._order, self._samples, self._seq_length, self._eod = order, samples, seq_length, eod

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self._samples:
            raise IndexError(index)
        ((place, length),) = self._order.places(index, 1)
        document = read_document(self._order, place, length, self._eod)
        fields = row([document, self._seq_length - length])._asdict()
        fields["position_ids"] = numpy.concatenate([numpy.arange(length), numpy.arange(self._seq_length - length)])
        fields["real"] = numpy.arange(self._seq_length) < length
        return {name: torch.from_numpy(values) for name, values in fields.items()}


def padded(order: DocumentOrder | None, samples: int, seq_length: int, eod: int | None) -> PaddedDocuments | None:
    return None if order is None or samples == 0 else PaddedDocuments(order, samples, seq_length, eod)


def _prepare(options: DataOptions, tokenizer: Any, paths: list[str]) -> dict[str, str]:
    """Check the files, on rank 0 only. Returns the folder with the tokens of each file of conversations."""
    if options.sft:
        cache, how = options.data_cache_path, options.sft_tokenizer_prompt_format
        return {path: tokenize_once(path, tokenizer, how, cache) for path in paths}
    files = [read_indexed_file(path) for path in paths]
    for file in files:
        check_vocabulary(file, tokenizer.vocab_size)
    if options.eod_mask_loss:  # boundaries are the index's, whatever the tokens say
        check_boundaries(options, tokenizer, files)
    return {}


def _orders(options: DataOptions, tokenizer: Any, sources: list[SplitSource], folders: dict[str, str]) -> Orders:
    opened: dict[str, DocumentFile] = {}

    def opening(path: str) -> DocumentFile:
        if path not in opened:
            mapped = options.mmap_bin_files
            if options.sft:
                opened[path] = open_conversations(folders[path], path, mapped=mapped)
            else:
                opened[path] = IndexedDocuments(read_indexed_file(path), mapped=mapped, vocab_size=tokenizer.vocab_size)
                _check_documents(opened[path], options.seq_length)
        return opened[path]

    mock = MockDocuments(options.seed, tokenizer.vocab_size) if options.mock_data else None
    orders: list[DocumentOrder | None] = []
    for source in sources:
        if mock is not None:
            shares = [_share(source, mock, None)]
        elif source.blend is not None:
            prefixes, weights = source.blend
            each = weights if weights is not None else [None] * len(prefixes)
            shares = [_share(source, opening(path), weight) for path, weight in zip(prefixes, each, strict=True)]
        else:
            shares = []
        orders.append(_order(options, source, shares))
    return Orders(*orders)


def _check_documents(file: DocumentFile, seq_length: int) -> None:
    if len(file.lengths) == 1 and file.lengths[0] - 1 > seq_length:
        raise DataError(
            f"{file.name} is one document of {file.lengths[0]} tokens, more than --seq-length {seq_length}: an index "
            "without boundaries; preprocess it with a line for each document"
        )


def _share(source: SplitSource, file: DocumentFile, weight: float | None) -> Share:
    return Share(file, *source.documents(len(file.lengths)), weight)


def _order(options: DataOptions, source: SplitSource, shares: list[Share]) -> DocumentOrder | None:
    """Return the order of a split's documents, or None if the split is not train and has none. Warns where some were
    expected.
    """
    if not shares or source.end <= source.begin:
        if source.name == "train":
            raise DataError(f"--split {options.split} leaves nothing for training")
        return None
    try:
        return DocumentOrder(shares, options.seed, options.seq_length, options.long_documents)
    except NoDocuments as error:
        if source.name == "train":
            raise DataError(f"no training data: {error}") from error
        logger.warning("no %s data: %s", source.name, error)
        return None
