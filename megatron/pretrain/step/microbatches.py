"""Microbatches and samples of each step, of batches that may grow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from helixpipe.common.errors import UserError
from megatron.pretrain.config import Config

Growth = tuple[tuple[int, int], ...]
"""Pairs of samples consumed and samples a step from there on."""

_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def growth_of(size: int, rampup: Sequence[int] | None, schedule: str | None, seq_length: int | None) -> Growth:
    """Return how the batch grows.

    Args:
        size: Samples a step in the end.
        rampup: Value of --rampup-batch-size.
        schedule: Value of --step-batch-size-schedule.
        seq_length: Tokens of a sample.

    Raises:
        UserError: If the schedule is no list of tokens and samples.
    """
    if schedule is not None:
        try:
            pairs = [entry.split(":") for entry in schedule.replace(",", " ").split()]
            return tuple(sorted((_number(tokens) // (seq_length or 1), _number(samples)) for tokens, samples in pairs))
        except (ValueError, OverflowError):
            raise UserError(
                f"--step-batch-size-schedule {schedule!r} is not a list of TOKENS:SAMPLES, such as '0:768 250B:1536'."
            ) from None
    start, increment, samples = rampup or (0, 0, 0)
    if not samples:
        return ()
    steps = (size - start) // increment
    return tuple((_rampup_begin(number, samples / steps), start + number * increment) for number in range(steps + 1))


def _rampup_begin(number: int, samples_each: float) -> int:
    """Return how many samples are consumed when a rampup has made so many increments, in Megatron-LM's arithmetic."""
    begin = int(number * samples_each)
    while int(begin / samples_each) < number:
        begin += 1
    return begin


def _number(text: str) -> int:
    """Return the number of a text such as 250B."""
    factor = _SUFFIXES.get(text[-1:].upper(), 1)
    return int(float(text[: -1 if factor > 1 else None]) * factor)


class StepBatch(NamedTuple):
    """One optimizer step: microbatches of a data-parallel rank, and samples over all ranks."""

    num_microbatches: int
    samples: int


@dataclass(frozen=True)
class BatchSchedule:
    """The number of microbatches of a step, as a function of the samples consumed before it.

    Megatron-LM's arithmetic, stated here because its calculators differ between releases of megatron-core: 0.18 no
    longer has --rampup-batch-size, and 0.20 has --step-batch-size-schedule. Build it with `from_config`. With steps of
    documents (--variable-seq-lengths) `samples` are documents and `num_microbatches` the most that a data-parallel rank
    needs if each is a row of its own; under --max-tokens, where steps have different numbers of documents
    (`megatron.pretrain.data.documents`), `samples` is only the unit in which the learning rate's schedule counts steps.

    size: samples a step, once it grows no more. quantum: samples that all data-parallel ranks together take as one
    microbatch; what does not fill one is left out of a step, unless its last may be `partial`. growth: pairs of samples
    consumed and samples a step from there on, ascending, from 0 consumed up to `size` a step; none if all are alike.
    """

    size: int
    quantum: int
    partial: bool = False
    growth: Growth = ()

    @classmethod
    def from_config(cls, config: Config) -> BatchSchedule:
        """Return the batches of a validated configuration."""
        training, dp_size = config.training, config.parallel.data_parallel_size
        size, micro = training.global_batch_size, training.micro_batch_size
        if size is None or micro is None:
            raise ValueError("the configuration was not validated")
        if config.data.variable_seq_lengths:
            return cls(size, dp_size, partial=True)
        growth = growth_of(size, training.rampup_batch_size, training.step_batch_size_schedule, config.model.seq_length)
        return cls(size, micro * dp_size, False, growth)

    def at(self, consumed_samples: int) -> StepBatch:
        """Return the step that comes after `consumed_samples` samples."""
        samples = next((size for since, size in reversed(self.growth) if consumed_samples >= since), self.size)
        if self.partial:
            return StepBatch(-(-samples // self.quantum), samples)
        return StepBatch(samples // self.quantum, samples - samples % self.quantum)

    def final(self) -> StepBatch:
        """Return the step that grows no more."""
        return self.at(self._grown)

    @property
    def _grown(self) -> int:
        """Samples consumed when steps grow no more."""
        return self.growth[-1][0] if self.growth else 0

    def step_sizes(self) -> list[int]:
        """Return every number of microbatches that a step will have, ascending."""
        sizes, consumed = {self.final().num_microbatches}, 0
        while consumed < self._grown:
            batch = self.at(consumed)
            sizes.add(batch.num_microbatches)
            consumed += batch.samples
        return sorted(sizes)

    def samples_after(self, iterations: int, consumed: int = 0) -> int:
        """Return the samples that are consumed after `iterations` further steps."""
        samples, done = consumed, 0
        while done < iterations and samples < self._grown:
            samples += self.at(samples).samples
            done += 1
        return samples + (iterations - done) * self.at(samples).samples

    def iterations_within(self, samples: int, consumed: int = 0) -> int:
        """Whole steps that fit into `samples` samples after those that are consumed."""
        done = 0
        while consumed < self._grown:
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
