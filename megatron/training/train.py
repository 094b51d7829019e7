"""The training loop: everything a run does between its setup and its exit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging

from helixpipe.errors import UserError
from helixpipe.model import Microbatch
from helixpipe.runtime.recording import Record
from megatron.training.checkpointing import Checkpointer, Progress
from megatron.training.config import Config
from megatron.training.log import StepResult, TrainingLog
from megatron.training.microbatches import BatchSchedule, RunLength, StepBatch
from megatron.training.model import TrainingModel
from megatron.training.output import say
from megatron.training.parallel import Parallel
from megatron.training.pipeline import Pipeline
from megatron.training.profiling import Profiler
from megatron.training.signals import StopCheck
from megatron.training.timelines import write_timelines


@dataclass
class Batches:
    """Endless microbatches of each split; None where this rank reads no data, or there is none for the split."""

    train: Iterator[Microbatch] | None
    valid: Iterator[Microbatch] | None
    test: Iterator[Microbatch] | None
    has_valid: bool
    has_test: bool


@dataclass
class Trainer:
    """All that a run needs, made by `megatron.training.pretrain`; `run` is the whole of training and evaluation."""

    config: Config
    parallel: Parallel
    pipeline: Pipeline
    state: TrainingModel
    scheduler: Any
    schedule: BatchSchedule
    length: RunLength
    batches: Batches
    checkpointer: Checkpointer
    progress: Progress
    flops_per_sample: float
    log: TrainingLog
    timers: Any
    stop: StopCheck

    def run(self) -> None:
        """Train from `progress` to the end or to a reason to stop; evaluate and save when due and at the end."""
        stopped = False if self.config.training.skip_train else self._train()
        if stopped:
            return
        at_end = f"iteration {self.progress.iteration}"
        if self.batches.has_valid:
            self._evaluate(self.batches.valid, f"{at_end} on validation set")
        if self.batches.has_test:
            self._evaluate(self.batches.test, f"{at_end} on test set")

    # ------------------------------------------------------------------------------------------------------ the loop

    def _train(self) -> bool:
        """Returns whether training stopped before its end."""
        config, progress = self.config, self.progress
        interval = config.logging.eval_interval
        with Profiler(config, self.parallel.rank) as profiler:
            while progress.iteration < self.length.iterations:
                last = progress.iteration + 1 == self.length.iterations
                size = self.schedule.at(progress.consumed_train_samples).num_microbatches
                recorded = self._iteration(record=last and self._wants_timeline())
                profiler.after(progress.iteration)
                if interval and progress.iteration % interval == 0 and self.batches.has_valid and not last:
                    self._evaluate(self.batches.valid, f"iteration {progress.iteration}")
                reason = self.stop.after(progress.iteration)
                if self._save_is_due() or reason is not None or last:
                    self._save()
                if recorded is not None:  # only now: a picture that cannot be drawn must not cost the checkpoint
                    write_timelines(config, self.parallel, self.pipeline.timelines(recorded, size))
                if reason is not None and not last:
                    if self.parallel.is_last:
                        say(self.stop.message(reason, progress.iteration))
                    return True
        return False

    def _iteration(self, record: bool) -> Record | None:
        """One optimizer step. Returns what was recorded of it."""
        config, progress = self.config, self.progress
        batch = self.schedule.at(progress.consumed_train_samples)
        loss, times = self._forward_backward(progress.iteration + 1, batch, record)
        with self._timed("optimizer"):
            updated, grad_norm, num_zeros = self.state.optimizer.step()
            if updated:
                self.scheduler.step(increment=batch.samples)
            else:
                progress.skipped_train_samples += batch.samples
        progress.iteration += 1
        progress.consumed_train_samples += batch.samples
        progress.num_floating_point_operations_so_far += self.flops_per_sample * batch.samples
        result = StepResult(
            loss=loss,
            learning_rate=get_canonical_lr_for_logging(self.state.optimizer.param_groups) or 0.0,
            samples=batch.samples,
            loss_scale=float(self.state.optimizer.get_loss_scale()),
            grad_norm=grad_norm,
            num_zeros=num_zeros if config.logging.log_num_zeros_in_grad else None,
            params_norm=self._params_norm() if config.logging.log_params_norm else None,
            skipped=not updated,
        )
        self.log.step(progress.iteration, progress.consumed_train_samples, result)
        return times

    def _forward_backward(self, iteration: int, batch: StepBatch, record: bool) -> tuple[float, Record | None]:
        """Sum and reduce the gradients of one step. Returns the mean loss over the tokens of the whole batch."""
        training = self.config.training
        with self._timed("batch-generator"):
            microbatches = self._next(self.batches.train, batch.num_microbatches)
        tokens = self._tokens(microbatches)
        scale = self.state.optimizer.get_loss_scale().reshape(())
        per_microbatch = 1.0 if training.calculate_per_token_loss else 1.0 / batch.num_microbatches

        def root_gradient(microbatch: int) -> torch.Tensor:
            divisor = 1.0 if training.calculate_per_token_loss else tokens[microbatch].clamp(min=1.0)
            return (scale * per_microbatch / divisor).to(torch.float32)

        self.state.ddp.zero_grad_buffer()
        self.state.optimizer.zero_grad()
        with self._timed("forward-backward"):
            loss_sum, times = self.pipeline.run(iteration, microbatches, root_gradient, record=record)
        totals = self._totals(loss_sum, tokens)
        loss = float(totals[0] / totals[1].clamp(min=1.0))
        if not math.isfinite(loss) and training.check_for_nan_in_loss_and_grad and not training.fp16:
            raise UserError(
                f"the loss is {loss} at iteration {iteration}; lower --lr or lengthen the warm-up "
                "(--no-check-for-nan-in-loss-and-grad goes on regardless)."
            )
        with self._timed("grads-reduce"):
            self.state.reducer.reduce(totals[1])
        return loss, times if record else None

    # ---------------------------------------------------------------------------------------------------- evaluation

    def _evaluate(self, iterator: Iterator[Microbatch] | None, where: str) -> None:
        """Mean loss over the tokens of `--eval-iters` global batches, printed and logged."""
        with self.log.paused():
            totals = torch.zeros(2, dtype=torch.float64, device=self.parallel.device)
            batch = self.schedule.final()
            for _ in range(self.config.logging.eval_iters):
                microbatches = self._next(iterator, batch.num_microbatches)
                loss_sum, _ = self.pipeline.run(self.progress.iteration, microbatches, _no_gradient, training=False)
                totals += self._totals(loss_sum, self._tokens(microbatches))
                self.progress.consumed_valid_samples += batch.samples
            loss = float(totals[0] / totals[1].clamp(min=1.0))
            self.log.evaluation(where, loss, self.progress.iteration, self.progress.consumed_train_samples)

    # ------------------------------------------------------------------------------------------------------- details

    def _next(self, iterator: Iterator[Microbatch] | None, count: int) -> list[Microbatch]:
        """The next microbatches of a step; empty ones on a rank that needs no tokens."""
        if iterator is None:
            nothing = torch.empty(0, device=self.parallel.device)
            return [Microbatch(nothing, nothing, nothing)] * count
        return [next(iterator) for _ in range(count)]

    def _tokens(self, microbatches: list[Microbatch]) -> torch.Tensor:
        """Tokens that count in each microbatch, float64; zeros on ranks without a head, which do not know them."""
        if not self.pipeline.has_head:
            return torch.zeros(len(microbatches), dtype=torch.float64, device=self.parallel.device)
        return torch.stack([each.loss_mask.sum(dtype=torch.float64) for each in microbatches])

    def _totals(self, loss_sum: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """(loss sum, tokens) over all microbatches of all data-parallel ranks, on every rank."""
        own = tokens[self.pipeline.counted(len(tokens))].sum()
        return self.parallel.sum_over_pipeline_and_data(torch.stack([loss_sum, own]))

    def _params_norm(self) -> float:
        """L2 norm of the whole model's weights, each counted once."""
        parallel = self.parallel
        square = torch.zeros((), dtype=torch.float64, device=parallel.device)
        for parameter in self.state.model.parameters():
            split = getattr(parameter, "tensor_model_parallel", False)
            if not getattr(parameter, "shared", False) and (split or parallel.tp_rank == 0):
                square += parameter.detach().double().pow(2).sum()
        torch.distributed.all_reduce(square, group=parallel.tp_group)
        torch.distributed.all_reduce(square, group=parallel.pp_group)
        return math.sqrt(float(square))

    def _save_is_due(self) -> bool:
        interval = self.config.checkpoint.save_interval
        return bool(interval) and self.progress.iteration % (interval or 1) == 0

    def _save(self) -> None:
        if self.config.checkpoint.save:
            with self.log.paused(), self._timed("save-checkpoint"):
                self.checkpointer.save(
                    self.progress, self.state.ddp, self.state.optimizer, self.scheduler, self.config.flat()
                )

    def _wants_timeline(self) -> bool:
        return bool(self.config.logging.record_timeline or self.config.logging.timeline_png)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        timer = self.timers(name, log_level=1)
        timer.start(barrier=False)
        try:
            yield
        finally:
            timer.stop()


def _no_gradient(microbatch: int) -> torch.Tensor:
    raise RuntimeError("evaluation has no backward")
