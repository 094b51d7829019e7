"""Microbatches and samples of each step, with or without batch-size rampup."""

from __future__ import annotations

from typing import NamedTuple

from megatron.core.num_microbatches_calculator import (
    ConstantNumMicroBatchesCalculator,
    NumMicroBatchesCalculator,
    RampupBatchsizeNumMicroBatchesCalculator,
)

from helixpipe.common.errors import UserError
from megatron.pretrain.config import Config


class StepBatch(NamedTuple):
    """One optimizer step: microbatches a data-parallel rank runs, samples over all of them."""

    num_microbatches: int
    samples: int


class _DocumentsAStep:
    """A calculator as megatron-core's for steps of documents: as many in each, of which a data-parallel rank gets about
    its share."""

    def __init__(self, documents: int, dp_size: int) -> None:
        self._documents, self._dp_size = documents, dp_size

    def update(self, consumed_samples: int, consistency_check: bool) -> None:
        pass

    def get(self) -> int:
        return -(-self._documents // self._dp_size)

    def get_current_running_global_batch_size(self) -> int:
        return self._documents


class BatchSchedule:
    """How many microbatches a step has, as a function of the samples consumed before it.

    Wraps megatron-core's calculators without their global state. Build it with `from_config`. With steps of documents
    (--variable-seq-lengths) `samples` are documents and `num_microbatches` the most that a data-parallel rank needs if
    each is a row of its own; under --max-tokens, where steps have different numbers of documents
    (`megatron.pretrain.data.documents`), `samples` is only the unit in which the learning rate's schedule counts steps.
    """

    def __init__(self, calculator: NumMicroBatchesCalculator | _DocumentsAStep, rampup_samples: int = 0) -> None:
        self._calculator = calculator
        self._rampup_samples = rampup_samples

    @classmethod
    def from_config(cls, config: Config) -> BatchSchedule:
        """The batches of a validated configuration."""
        training = config.training
        size, micro = training.global_batch_size, training.micro_batch_size
        if size is None or micro is None:
            raise ValueError("the configuration was not validated")
        if config.data.variable_seq_lengths:
            return cls(_DocumentsAStep(size, config.parallel.data_parallel_size))
        common = (
            size,
            micro,
            config.parallel.data_parallel_size,
            training.decrease_batch_size_if_needed,
            config.launch.rank,
        )
        if training.rampup_batch_size is None:
            return cls(ConstantNumMicroBatchesCalculator(*common))
        start, increment, samples = training.rampup_batch_size
        return cls(RampupBatchsizeNumMicroBatchesCalculator(*common, start, increment, samples), samples)

    def at(self, consumed_samples: int) -> StepBatch:
        """The step that comes after `consumed_samples` samples."""
        self._calculator.update(consumed_samples, consistency_check=False)
        return StepBatch(self._calculator.get(), self._calculator.get_current_running_global_batch_size())

    def final(self) -> StepBatch:
        """The step after any rampup."""
        return self.at(self._rampup_samples + 1)

    def step_sizes(self) -> list[int]:
        """Every number of microbatches that a step will have, ascending."""
        sizes, consumed = {self.final().num_microbatches}, 0
        while consumed <= self._rampup_samples:
            batch = self.at(consumed)
            sizes.add(batch.num_microbatches)
            consumed += batch.samples
        return sorted(sizes)

    def samples_after(self, iterations: int) -> int:
        """Samples that the first `iterations` steps consume."""
        samples, done = 0, 0
        while done < iterations and samples <= self._rampup_samples:
            samples += self.at(samples).samples
            done += 1
        return samples + (iterations - done) * self.at(samples).samples

    def iterations_within(self, samples: int) -> int:
        """Whole steps that fit into `samples` samples."""
        consumed, done = 0, 0
        while consumed <= self._rampup_samples:
            batch = self.at(consumed).samples
            if consumed + batch > samples:
                return done
            consumed += batch
            done += 1
        return done + (samples - consumed) // self.at(consumed).samples


class RunLength(NamedTuple):
    """The whole training, of which a resumed run does the rest."""

    iterations: int
    samples: int


def run_length(config: Config, batches: BatchSchedule) -> RunLength:
    """Iterations and samples of the whole training, whichever of the two flags gave it.

    Raises UserError when the samples are not enough for one step.
    """
    training = config.training
    if training.train_iters is not None:
        return RunLength(training.train_iters, batches.samples_after(training.train_iters))
    if training.train_samples is None:
        return RunLength(0, 0)  # --skip-train
    iterations = batches.iterations_within(training.train_samples)
    if iterations == 0:
        raise UserError(
            f"--train-samples {training.train_samples} is less than the first step's {batches.at(0).samples} samples."
        )
    return RunLength(iterations, batches.samples_after(iterations))
