"""Microbatches and samples of each step, with or without batch-size rampup."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from helixpipe.common.errors import UserError
from megatron.pretrain.config import Config


class StepBatch(NamedTuple):
    """One optimizer step: microbatches of a data-parallel rank, and samples over all ranks."""

    num_microbatches: int
    samples: int


@dataclass(frozen=True)
class BatchSchedule:
    """The number of microbatches of a step, as a function of the samples consumed before it.

    Megatron-LM's arithmetic, stated here because its calculators differ between releases of megatron-core (that of
    --rampup-batch-size is gone since 0.18). Build it with `from_config`. With steps of documents
    (--variable-seq-lengths) `samples` are documents and `num_microbatches` the most that a data-parallel rank needs if
    each is a row of its own; under --max-tokens, where steps have different numbers of documents
    (`megatron.pretrain.data.documents`), `samples` is only the unit in which the learning rate's schedule counts steps.

    size: samples a step, after any rampup. quantum: samples that all data-parallel ranks together take as one
    microbatch; what does not fill one is left out of a step, unless its last may be `partial`. start, increment:
    samples of the first step, and the samples added at a time so that a step has `size` after `rampup_samples` samples.
    """

    size: int
    quantum: int
    partial: bool = False
    start: int = 0
    increment: int = 0
    rampup_samples: int = 0

    @classmethod
    def from_config(cls, config: Config) -> BatchSchedule:
        """Return the batches of a validated configuration."""
        training, dp_size = config.training, config.parallel.data_parallel_size
        size, micro = training.global_batch_size, training.micro_batch_size
        if size is None or micro is None:
            raise ValueError("the configuration was not validated")
        if config.data.variable_seq_lengths:
            return cls(size, dp_size, partial=True)
        if training.rampup_batch_size is None:
            return cls(size, micro * dp_size)
        return cls(size, micro * dp_size, False, *training.rampup_batch_size)

    def at(self, consumed_samples: int) -> StepBatch:
        """Return the step that comes after `consumed_samples` samples."""
        samples = self.size
        if self.rampup_samples and consumed_samples <= self.rampup_samples:
            samples_each = self.rampup_samples / ((self.size - self.start) // self.increment)
            samples = self.start + int(consumed_samples / samples_each) * self.increment
        if self.partial:
            return StepBatch(-(-samples // self.quantum), samples)
        return StepBatch(samples // self.quantum, samples - samples % self.quantum)

    def final(self) -> StepBatch:
        """Return the step after any rampup."""
        return self.at(self.rampup_samples + 1)

    def step_sizes(self) -> list[int]:
        """Return every number of microbatches that a step will have, ascending."""
        sizes, consumed = {self.final().num_microbatches}, 0
        while consumed <= self.rampup_samples:
            batch = self.at(consumed)
            sizes.add(batch.num_microbatches)
            consumed += batch.samples
        return sorted(sizes)

    def samples_after(self, iterations: int, consumed: int = 0) -> int:
        """Return the samples that are consumed after `iterations` further steps."""
        samples, done = consumed, 0
        while done < iterations and samples <= self.rampup_samples:
            samples += self.at(samples).samples
            done += 1
        return samples + (iterations - done) * self.at(samples).samples

    def iterations_within(self, samples: int, consumed: int = 0) -> int:
        """Whole steps that fit into `samples` samples after those that are consumed."""
        done = 0
        while consumed <= self.rampup_samples:
            batch = self.at(consumed).samples
            if consumed + batch > samples:
                return done
            consumed += batch
            done += 1
        return done + max(0, samples - consumed) // self.at(consumed).samples


class RunLength(NamedTuple):
    """The whole training, of which a resumed run does the rest."""

    iterations: int
    samples: int


def run_length(config: Config, batches: BatchSchedule, done: int = 0, consumed: int = 0) -> RunLength:
    """Return the iterations and samples of the whole training, whichever of the two flags gave it.

    done, consumed: iterations and samples of it that are done, whose batches may have been of other sizes.

    Raises UserError when the samples are not enough for one step.
    """
    training = config.training
    if training.train_iters is not None:
        return RunLength(training.train_iters, batches.samples_after(max(0, training.train_iters - done), consumed))
    if training.train_samples is None:
        return RunLength(0, 0)  # --skip-train
    rest = batches.iterations_within(training.train_samples, consumed)
    if done + rest == 0:
        raise UserError(
            f"--train-samples {training.train_samples} is less than the first step's {batches.at(0).samples} samples."
        )
    return RunLength(done + rest, batches.samples_after(rest, consumed))
