"""Steps over samples that are all equally long, under the same plan each time."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from helixpipe.model import Microbatch
from helixpipe.planning.plan import Plans
from megatron.pretrain.checkpoint.state import TrainingProgress
from megatron.pretrain.data.datasets import Counts
from megatron.pretrain.data.samplers import samples_needed
from megatron.pretrain.feed.work import StepWork
from megatron.pretrain.step.microbatches import BatchSchedule, StepBatch, growth_of


def samples_asked_for(saved: Mapping[str, Any]) -> tuple[Counts, ...]:
    """Return the samples of train, validation and test that a run of these arguments read, as `index_counts` has them.

    Args:
        saved: arguments of a checkpoint that does not say for how many samples its data was shuffled: an older
            release's or Megatron-LM's.

    Returns:
        One entry; none where the arguments do not tell.
    """
    try:
        size, interval = int(saved["global_batch_size"]), int(saved["eval_interval"] or 0)
        quantum = int(saved.get("micro_batch_size") or 1) * int(saved.get("data_parallel_size") or 1)
        rampup, length = [int(each) for each in saved.get("rampup_batch_size") or ()], saved.get("seq_length")
        growth = growth_of(size, rampup, saved.get("step_batch_size_schedule"), length)
        batches = BatchSchedule(size, quantum, False, growth)
        iterations = int(saved["train_iters"] or 0)
        if saved.get("train_samples"):
            iterations = batches.iterations_within(int(saved["train_samples"]))
        samples = batches.samples_after(iterations)
        return (samples_needed(samples, iterations, interval, int(saved["eval_iters"]), batches.final().samples),)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return ()


@dataclass
class SampleFeed:
    """The feed of steps of samples. train_batches, valid_batches, test_batches: endless microbatches of each split;
    None if this rank reads no data, or the split has none. seq_length: tokens of a sample. flops: of forward and
    backward of a document, by its tokens. uneven: whether samples differ in documents or padding, so that the work of
    each is counted.
    """

    schedule: BatchSchedule
    plans: Plans[int]
    train_batches: Iterator[Microbatch] | None
    valid_batches: Iterator[Microbatch] | None = None
    test_batches: Iterator[Microbatch] | None = None
    has_valid: bool = False
    has_test: bool = False
    device: torch.device | None = None
    seq_length: int = 0
    flops: Callable[[int], float] = lambda tokens: 0.0
    uneven: bool = False

    def train(self, progress: TrainingProgress) -> StepWork:
        return self._work(self.train_batches, self.schedule.at(progress.consumed_train_samples), training=True)

    def evaluation(self, split: str) -> StepWork:
        batches = self.valid_batches if split == "valid" else self.test_batches
        return self._work(batches, self.schedule.final(), training=False)

    def close(self) -> None:
        """Close the loaders. Their processes ignore SIGTERM, so the interpreter would wait for them for ever if a
        reference cycle kept them until it exits.
        """
        for each in (self.train_batches, self.valid_batches, self.test_batches):
            if isinstance(each, Generator):
                each.close()

    def _work(self, iterator: Iterator[Microbatch] | None, batch: StepBatch, training: bool) -> StepWork:
        plan, count = self.plans.plan(batch.num_microbatches), batch.num_microbatches
        if iterator is None:
            nothing = torch.empty(0, device=self.device)
            microbatches = [Microbatch(nothing, nothing, nothing)] * count
        else:
            microbatches = [next(iterator) for _ in range(count)]
        return StepWork(
            microbatches,
            (plan if training else plan.evaluation).lowered,
            samples=batch.samples,
            scheduled_samples=batch.samples,
            tokens=0 if self.uneven else batch.samples * self.seq_length,
            flops=0.0 if self.uneven else batch.samples * self.flops(self.seq_length),
            counted_here=self._count(microbatches) if self.uneven else None,
        )

    def _count(self, microbatches: Sequence[Microbatch]) -> torch.Tensor:
        """Return tokens and FLOPs of each microbatch, [microbatches, 2] float64 on the device."""
        lengths = [_documents(each) for each in microbatches]
        counts = torch.tensor([(sum(each), sum(map(self.flops, each))) for each in lengths], dtype=torch.float64)
        on_cuda = self.device is not None and self.device.type == "cuda"
        return (counts.pin_memory() if on_cuda else counts).to(self.device, non_blocking=True)


def _documents(batch: Microbatch) -> Sequence[int]:
    """Return the real tokens of each document of a microbatch; nothing on a rank that reads no data."""
    if batch.real is not None:  # a padded sample is one document
        return batch.real.lengths
    return () if batch.documents is None else tuple(chain(*batch.documents.lengths))
