"""Microbatches of samples of equal length, read by loader processes, with the boundaries of their documents.

Where a document ends is found out in the loader processes: numbers on the host, so that no rank has to ask its device.
Position ids tell it as megatron-core makes them, 0 after each end-of-document token. (The tokens no longer do: what
equals the padding token has become 0 in them, which may be the end-of-document token.)
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy
import torch
from torch.utils.data import DataLoader, Dataset

from helixpipe.common.errors import DataError
from helixpipe.model.documents import Documents
from helixpipe.model.real_tokens import RealTokens
from megatron.pretrain.data.indexed_files import check_tokens
from megatron.pretrain.process.lifetime import end_with_parent
from megatron.pretrain.process.signals import SIGNALS

T = TypeVar("T")

_FIELDS = ("tokens", "labels", "loss_mask", "position_ids")


@dataclass(frozen=True)
class Isolation:
    """How documents within a sample are isolated: --reset-attention-mask and --reset-position-ids."""

    attention: bool = False
    """Microbatches come with `documents`, so that tokens attend to their own document only."""
    positions: bool = False
    """Position ids begin again at 0 with each document."""


def batch_iterator(
    dataset: Dataset[dict[str, torch.Tensor]],
    sampler: Iterable[list[int]],
    make: Callable[..., T],
    *,
    num_workers: int = 0,
    device: torch.device | None = None,
    isolation: Isolation | None = None,
    whole: bool = True,
    vocab_size: int | None = None,
) -> Iterator[T]:
    """Yield this rank's microbatches one at a time, in the sampler's order, for ever or until the data is used up.

    Args:
        sampler: yields the sample indices of each microbatch (`MicrobatchSampler`).
        make: called with tokens, labels, loss_mask and position_ids, each [micro_batch_size, seq_length], by keyword,
            with documents where `isolation` is of attention, and with real where samples say what is no padding.
        device: where the tensors go; with CUDA they are copied from pinned memory, asynchronously.
        whole: False for a rank that needs the documents only: the tensors it gets are empty.
        vocab_size: tokens of the tokenizer, or None to take all ids.

    Raises:
        DataError: when more microbatches are asked for than the data has, or a token is not in the vocabulary.
    """
    on_cuda = device is not None and device.type == "cuda"
    loader = DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=_Collation(isolation or Isolation(), whole),
        num_workers=num_workers,
        worker_init_fn=_settle_worker,
        pin_memory=on_cuda,
    )
    for batch, documents, real in loader:
        if vocab_size is not None:
            for name in ("tokens", "labels"):
                check_tokens(batch[name].numpy(), vocab_size, "the data")
        if device is not None:
            batch = {name: tensor.to(device, non_blocking=on_cuda) for name, tensor in batch.items()}
        beside: dict[str, Any] = {} if documents is None else {"documents": Documents(documents, device)}
        if real is not None:
            beside["real"] = RealTokens(real, device)
        yield make(**batch, **beside)
    raise DataError(f"the data is used up: the dataset has {len(dataset)} samples")  # type: ignore[arg-type]


def document_lengths(position_ids: numpy.ndarray) -> tuple[int, ...]:
    """Return the tokens of each document of a sample, in order, by its position ids [s], which are 0
    where one begins.
    """
    begins = numpy.flatnonzero(position_ids == 0)
    return tuple(numpy.diff(begins, append=len(position_ids)).tolist())


@dataclass(frozen=True)
class _Collation:
    """Samples side by side: their tensors, and the documents' lengths of each, or None, and which of their tokens are
    real, or None. Runs in loader processes."""

    isolation: Isolation
    whole: bool

    def __call__(
        self, items: list[dict[str, torch.Tensor]]
    ) -> tuple[dict[str, torch.Tensor], tuple[tuple[int, ...], ...] | None, torch.Tensor | None]:
        positions = [item["position_ids"] for item in items]
        documents = tuple(document_lengths(each.numpy()) for each in positions) if self.isolation.attention else None
        real = torch.stack([item["real"] for item in items]) if "real" in items[0] else None
        if not self.whole:
            return {name: torch.empty(0) for name in _FIELDS}, documents, real
        batch = {name: torch.stack([item[name] for item in items]) for name in _FIELDS}
        if not self.isolation.positions:
            batch["position_ids"] = torch.arange(len(positions[0])).expand(len(items), -1).contiguous()
        return batch, documents, real


def _settle_worker(worker: int) -> None:
    """Tie a loader process to its rank. Launchers send SIGTERM to all processes of a job, terminals SIGINT and SIGHUP,
    but this one has to go on for the step that comes before saving. And it must not outlive a killed rank,
    whose connections it inherited: the other ranks would not see them close (torch's own watch takes 5 s)."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
