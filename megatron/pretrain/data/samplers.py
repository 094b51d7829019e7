"""The samples that a data-parallel rank reads, as a pure function of the samples consumed so far.

All ranks walk one global stream of samples. A micro-step takes the next `micro_batch_size * dp_size` of it and rank r
the r-th slice of that. So the samples of a global batch are the stream's next `global_batch_size`, whatever the number
of ranks, and neither a resume nor a batch-size rampup changes the order: only `consumed_samples` matters.
This is the order of Megatron-LM's pretraining sampler.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy

from helixpipe.common.errors import UserError

DATALOADER_TYPES = ("single", "cyclic")


@dataclass(frozen=True)
class MicrobatchSampler:
    """Iterable over this rank's microbatches, each a list of `micro_batch_size` sample indices.

    Every `iter()` begins at `consumed_samples` again.
    """

    total_samples: int
    """Length of the dataset."""
    consumed_samples: int
    """Samples of the global stream, over all ranks, that earlier steps have used."""
    micro_batch_size: int
    dp_rank: int = 0
    dp_size: int = 1
    dataloader_type: str = "single"
    """`single`: the dataset's own order, once. `cyclic`: epochs without end, each in a new order drawn from `seed`."""
    seed: int = 1234
    wrap: bool = False
    """Begin again at sample 0 after the last (validation, which must never run dry); only for `single`."""

    def __post_init__(self) -> None:
        if self.dataloader_type not in DATALOADER_TYPES:
            valid = ", ".join(DATALOADER_TYPES)
            raise UserError(f"--dataloader-type {self.dataloader_type} is unknown; valid are {valid}")
        if self.total_samples < 1:
            raise UserError("a dataset without samples cannot be read")
        if self.consumed_samples < 0:
            raise UserError(f"consumed samples {self.consumed_samples} must not be negative")
        if self.micro_batch_size < 1:
            raise UserError(f"--micro-batch-size {self.micro_batch_size} must be at least 1")
        if not 0 <= self.dp_rank < self.dp_size:
            raise UserError(f"data-parallel rank {self.dp_rank} must lie in 0 … {self.dp_size - 1}")

    def __iter__(self) -> Iterator[list[int]]:
        stride = self.micro_batch_size * self.dp_size
        endless = self.wrap or self.dataloader_type == "cyclic"
        order = _CyclicOrder(self.total_samples, self.seed) if self.dataloader_type == "cyclic" else None
        start = self.consumed_samples
        while endless or start + stride <= self.total_samples:
            first = start + self.dp_rank * self.micro_batch_size
            positions = range(first, first + self.micro_batch_size)
            yield [order[p] if order else p % self.total_samples for p in positions]
            start += stride


class _CyclicOrder:
    """Sample at each position of an endless stream of epochs; keeps the permutation of one epoch at a time."""

    def __init__(self, total_samples: int, seed: int) -> None:
        self._total = total_samples
        self._seed = seed
        self._epoch = -1
        self._permutation = numpy.empty(0, dtype=numpy.int64)

    def __getitem__(self, position: int) -> int:
        epoch, offset = divmod(position, self._total)
        if epoch != self._epoch:
            self._permutation = numpy.random.default_rng((self._seed, epoch)).permutation(self._total)
            self._epoch = epoch
        return int(self._permutation[offset])


def consumed_valid_samples(iteration: int, eval_interval: int, eval_iters: int, global_batch_size: int) -> int:
    """Validation samples used by the evaluations before `iteration` ended (Megatron-LM's rule), for a resume."""
    return (iteration // eval_interval) * eval_iters * global_batch_size if eval_interval > 0 else 0


def samples_needed(
    train_samples: int, train_iters: int, eval_interval: int, eval_iters: int, global_batch_size: int
) -> tuple[int, int, int]:
    """Return the samples that a whole run reads from the train, validation and test splits (Megatron-LM's rule).

    One evaluation every `eval_interval` iterations and one at the end, and one test at the end, each of `eval_iters`
    global batches.
    """
    evaluations = train_iters // eval_interval + 1 if eval_interval > 0 else 1
    return train_samples, evaluations * eval_iters * global_batch_size, eval_iters * global_batch_size
