"""The training loop: everything a run does between its setup and its exit."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging

from helixpipe.common.errors import CheckpointError, LostSaveError, UserError
from helixpipe.common.output import complain, say
from helixpipe.model import Microbatch
from helixpipe.runtime.recording import Record
from helixpipe.watch.position import Patience, Position
from megatron.pretrain.checkpoint.checkpointing import Checkpointer
from megatron.pretrain.checkpoint.state import TrainingProgress
from megatron.pretrain.config import Config
from megatron.pretrain.extension import StepAhead, StepOutcome, TrainerExtension
from megatron.pretrain.feed.work import Feed, StepWork
from megatron.pretrain.log.log import StepResult, TrainingLog
from megatron.pretrain.log.profiling import Profiler
from megatron.pretrain.log.timelines import write_timelines
from megatron.pretrain.plan.pipeline import Pipeline
from megatron.pretrain.process.parallel import Parallel
from megatron.pretrain.process.signals import StopCheck, all_ranks_max
from megatron.pretrain.step.microbatches import RunLength
from megatron.pretrain.step.model import TrainingModel
from megatron.pretrain.step.update import ImmediateUpdate, UnconfirmedUpdate


@dataclass(frozen=True)
class _Unfinished:
    """A step whose outcome is not known yet. consumed_samples: with this step's."""

    update: ImmediateUpdate | UnconfirmedUpdate
    iteration: int
    work: StepWork
    consumed_samples: int


@dataclass
class Trainer:
    """The state of a run, built by `megatron.pretrain.pretrain`; `run` does all training and evaluation."""

    config: Config
    parallel: Parallel
    pipeline: Pipeline
    state: TrainingModel
    scheduler: Any
    length: RunLength
    feed: Feed
    checkpointer: Checkpointer
    progress: TrainingProgress
    log: TrainingLog
    timers: Any
    stop: StopCheck
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Kept in checkpoints: the flags, and what identifies the data."""
    position: Position = field(default_factory=Position)
    extensions: Sequence[TrainerExtension] = ()
    """Follow the run."""
    build: Callable[[], tuple[TrainingModel, Any]] | None = None
    """Makes model and scheduler of the pieces that the pipeline has now."""

    def __post_init__(self) -> None:
        self._make_updates()
        self._unfinished: _Unfinished | None = None
        self._wait = True  # the first norm is unlike any other
        self._asked_to_stop = False
        self.not_saved: CheckpointError | None = None
        for each in self.extensions:
            each.begin(self)

    def _make_updates(self) -> None:
        self._immediate = ImmediateUpdate(self.state.weights)
        self._unconfirmed = UnconfirmedUpdate(self.state.weights, self.config.training.clip_grad)

    def run(self) -> None:
        """Train from `progress` to the end or to a reason to stop; evaluate and save when due and at the end. Once.

        Raises LostSaveError when the last checkpoint that was due could not be written.
        """
        try:
            stopped = False if self.config.training.skip_train else self._train()
            if not stopped:
                self._evaluate_at_end()
        except UserError:  # what was saved before it is worth keeping
            self.finish_saving()
            raise
        self.finish_saving()
        if self.not_saved is not None:
            raise LostSaveError(f"the last checkpoint was not saved: {self.not_saved}")

    def _evaluate_at_end(self) -> None:
        at_end = f"iteration {self.progress.iteration}"
        if self.feed.has_valid:
            self._evaluate("valid", f"{at_end} on validation set")
        if self.feed.has_test:
            self._evaluate("test", f"{at_end} on test set")

    # ------------------------------------------------------------------------------------------------------ the loop

    def _train(self) -> bool:
        """Train; return whether training stopped before its end."""
        config, progress = self.config, self.progress
        interval = config.logging.eval_interval
        if progress.iteration >= self.length.iterations and self.parallel.is_last:
            say(f" > already at iteration {progress.iteration} of {self.length.iterations}: nothing is left to train")
        with Profiler(config, self.parallel.rank, progress.iteration) as profiler:
            while progress.iteration < self.length.iterations:
                for each in self.extensions:
                    each.before_step(progress.iteration + 1)
                last = progress.iteration + 1 == self.length.iterations
                work, recorded = self._iteration(record=last and self._wants_timeline())
                profiler.after(progress.iteration)
                self._settle(wait=False)
                if interval and progress.iteration % interval == 0 and self.feed.has_valid:
                    self._evaluate("valid", f"iteration {progress.iteration}")
                reason = self.stop.after(progress.iteration) if self._unfinished is None else None
                if self._save_is_due() or reason is not None or last:
                    self._save()
                if self._closes_with_more():
                    self._complete()
                if recorded is not None:  # only now: a picture that cannot be drawn must not cost the checkpoint
                    write_timelines(config, self.parallel, self.pipeline.recorded(recorded, work.lowered))
                if reason is not None and not last:
                    if self.parallel.is_last:
                        say(self.stop.message(reason, progress.iteration))
                    return True
        return False

    def rebuild(self) -> None:
        """Free the model and what trains it, and build them of the pieces that the pipeline has now. Collective."""
        self.state.release()
        del self.state, self.scheduler, self._immediate, self._unconfirmed
        gc.collect()
        if self.parallel.device.type == "cuda":
            torch.cuda.empty_cache()
        assert self.build is not None
        self.state, self.scheduler = self.build()
        self._make_updates()

    def _iteration(self, record: bool) -> tuple[StepWork, Record | None]:
        """Run one optimizer step and finish the one before. Returns its work, and its record."""
        progress = self.progress
        self.position.iteration = progress.iteration + 1
        with self.timed("batch-generator", Patience.LONG, together=False):
            work = self.feed.train(progress)
        timing = [each for each in self.extensions if each.wants_times(progress.iteration + 1, work.lowered)]
        numbers, times = self._forward_backward(progress.iteration + 1, work, record, timed=bool(timing))
        progress.iteration += 1
        progress.consumed_train_samples += work.samples
        wait = self._wait or self._outcome_is_due()
        update = self._immediate if wait else self._unconfirmed
        with self.timed("optimizer"):
            update.start(numbers)
        self._unfinished = _Unfinished(update, progress.iteration, work, progress.consumed_train_samples)
        if wait:
            self._finish_step()
        for each in timing:
            each.times(progress.iteration, times)
        return work, times if record else None

    def _forward_backward(
        self, iteration: int, work: StepWork, record: bool, timed: bool
    ) -> tuple[torch.Tensor, Record]:
        """Sum and reduce the gradients of one step.

        Returns:
            Numbers still to be summed over all ranks, and the times of the step. The numbers are: loss sum, tokens in
            the loss, whether to stop, tokens and FLOPs of `StepWork.counted_here`, those of the extensions, loads of
            experts, and losses of further tokens.
        """
        per_token = self.config.training.calculate_per_token_loss
        tokens, indices = self._tokens(work.microbatches), self.pipeline.counted(work.lowered)
        counted, done = tokens[indices].sum(), tokens.new_zeros(2)
        if work.counted_here is not None and self.parallel.counts_tokens:
            done = work.counted_here[indices].sum(dim=0)
        # Tensor-parallel ranks hold equal values; the sum needs one of them. Context-parallel ranks have a part each of
        # a loss, and all tokens of it.
        part = 1.0 if self.parallel.tp_rank == 0 else 0.0
        counted = counted if self.parallel.counts_tokens else torch.zeros_like(counted)
        all_tokens, summing = counted.reshape(1).clone(), None
        if per_token:
            summing = torch.distributed.all_reduce(all_tokens, async_op=True)

        def root_of(its_tokens: torch.Tensor) -> torch.Tensor:
            scale = self.state.optimizer.get_loss_scale().reshape(())
            # DDP takes the mean over all ranks that hold the weights; over context-parallel ranks it should be the sum.
            count = len(work.microbatches) / self.parallel.cp_size
            divisor = 1.0 if per_token else its_tokens.clamp(min=1.0) * count
            return (scale / divisor).to(torch.float32)

        def root_gradient(microbatch: int) -> torch.Tensor:
            return root_of(tokens[microbatch])

        def auxiliary_gradient(microbatch: int) -> torch.Tensor:
            scale, factor = self.state.optimizer.get_loss_scale().reshape(()), self.parallel.cp_size / len(tokens)
            if per_token:  # gradients are divided by the tokens of all
                factor = self.pipeline.tokens(work.lowered, microbatch, work.microbatches[microbatch])
            return (scale * factor).to(torch.float32)

        late = self._unfinished is not None
        ahead = StepAhead(
            iteration, work.lowered, work.microbatches, lambda batch: root_of(self._tokens([batch]).reshape(()))
        )
        for each in self.extensions:
            each.ahead(ahead)
        if not late:
            self._begin_gradients()
        with self.timed("forward-backward"):
            loss_sum, times = self.pipeline.run(
                iteration,
                work.lowered,
                work.microbatches,
                root_gradient,
                auxiliary_gradient=auxiliary_gradient if self.config.model.num_experts else None,
                record=record or timed,
                together=record,
                confirm=self._confirm if late else None,
                observers=[seen for each in self.extensions if (seen := each.observer(work.lowered)) is not None],
            )
        with self.timed("grads-reduce"):
            if summing is not None:
                summing.wait()
            self.state.weights.reduce(all_tokens)
        asked = torch.full_like(loss_sum, float(self.stop.wish(iteration) is not None))
        loads = self.state.model.routing.loads(iteration)
        further = self.state.model.further_losses.sums(iteration) * part
        further[1] *= float(self.parallel.cp_rank == 0)  # every context-parallel rank counts all tokens
        figures = [numbers for each in self.extensions if (numbers := each.figures()) is not None]
        sums = torch.stack([each.double() for each in (loss_sum * part, counted, asked, *done)])
        return torch.cat([sums, *figures, loads.flatten(), further.flatten()]), times

    def _begin_gradients(self) -> None:
        """Begin to sum gradients, with the weights of the step."""
        self.state.weights.zero_gradients()
        for each in self.extensions:
            each.weights_ready()

    def _confirm(self) -> bool:
        """Finish the step before, between the start of this step and its first backward."""
        with self.timed("confirmation"):
            right = self._finish_step()
            self._begin_gradients()
        self.position.enter("forward-backward")
        return right

    def _finish_step(self) -> bool:
        """Wait for a step's outcome. Returns whether its weights were right from the start; they are now. All ranks
        return the same.
        """
        step, self._unfinished = self._unfinished, None
        assert step is not None
        outcome = step.update.finish()
        if outcome.updated:
            self.scheduler.step(increment=step.work.scheduled_samples)
        else:
            self.progress.skipped_train_samples += step.work.samples
        end = 5 + sum(each.numbers for each in self.extensions)
        # The host waits for the device here, once.
        loss_sum, tokens, asked_to_stop, done, flops, *figures = outcome.sums[:end].tolist()
        flops += step.work.flops
        self.progress.num_floating_point_operations_so_far += flops
        loss = loss_sum / tokens if tokens else math.nan
        for each in self.extensions:
            own, figures = figures[: each.numbers], figures[each.numbers :]
            each.outcome(StepOutcome(step.iteration, own, loss, outcome.grad_norm))
        routing = self.state.model.routing
        rest = end + math.prod(routing.shape)
        loads, further = outcome.sums[end:rest].view(routing.shape), outcome.sums[rest:].view(2, -1)
        routing.change_biases(loads)  # also after an overflow, as in megatron-core
        if not tokens:
            raise UserError(
                f"no token of iteration {step.iteration} counts in the loss, so it trains nothing: the loss masks of "
                "its samples are 0; check the data, and --eod-mask-loss if it is given."
            )
        training, logging = self.config.training, self.config.logging
        for name, number in (("the loss", loss), ("the norm of the gradients", outcome.grad_norm or 0.0)):
            if not math.isfinite(number) and training.check_for_nan_in_loss_and_grad and not training.fp16:
                raise UserError(
                    f"{name} is {number} at iteration {step.iteration}; lower --lr or lengthen the warm-up "
                    "(--no-check-for-nan-in-loss-and-grad goes on regardless)."
                )
        self._asked_to_stop = asked_to_stop > 0
        if training.enable_optimizer_post_validation:
            clipped = outcome.grad_norm is None or 0 < training.clip_grad < outcome.grad_norm
            if step.update is self._immediate:  # data-parallel ranks may have summed their norms in another order
                clipped = all_ranks_max(self.parallel.device)(int(clipped)) > 0
            self._wait = clipped
        if not self._closes_with_more():  # before its line: a step whose line is printed is not lost
            self._complete()
        result = StepResult(
            loss=loss,
            learning_rate=get_canonical_lr_for_logging(self.state.optimizer.param_groups) or 0.0,
            samples=step.work.samples,
            tokens=step.work.tokens + int(done),
            flops=flops,
            figures=step.work.figures,
            loss_scale=float(self.state.optimizer.get_loss_scale()),
            grad_norm=outcome.grad_norm,
            num_zeros=outcome.num_zeros if logging.log_num_zeros_in_grad else None,
            params_norm=self.state.weights.norm() if logging.log_params_norm else None,
            skipped=not outcome.updated,
            loads=loads if loads.numel() else None,
            further=tuple(further[0] / further[1].clamp(min=1.0)),
        )
        self.log.step(step.iteration, step.consumed_samples, result)
        return outcome.confirmed

    def _outcome_is_due(self) -> bool:
        """Whether something that follows this iteration depends on its outcome."""
        config, iteration = self.config, self.progress.iteration
        return (
            iteration == self.length.iterations
            or self._asked_to_stop
            or self._closes_with_more()
            or any(each.needs_outcome(iteration) for each in self.extensions)
            or bool(config.training.exit_interval and iteration % config.training.exit_interval == 0)
            or (self._wants_timeline() and iteration + 1 == self.length.iterations)  # the last is recorded as it is
            or config.logging.log_num_zeros_in_grad
            or config.logging.log_params_norm
        )

    # ---------------------------------------------------------------------------------------------------- evaluation

    def _evaluate(self, split: str, where: str) -> None:
        """Mean loss over the tokens of `--eval-iters` global batches, printed and logged."""
        with self.log.paused():
            totals = torch.zeros(2, dtype=torch.float64, device=self.parallel.device)
            for _ in range(self.config.logging.eval_iters):
                self.position.enter("evaluation", Patience.LONG, together=False)
                work = self.feed.evaluation(split)
                loss_sum, _ = self.pipeline.run(
                    self.progress.iteration, work.lowered, work.microbatches, _no_gradient, training=False
                )
                totals += self._totals(loss_sum, work)
                self.progress.consumed_valid_samples += work.samples
            if not totals[1]:
                if self.parallel.is_last:
                    complain(f"WARNING: no validation loss at {where}: no token of its samples counts in the loss")
                return
            loss = float(totals[0] / totals[1])
            self.log.evaluation(where, loss, self.progress.iteration, self.progress.consumed_train_samples)

    # ------------------------------------------------------------------------------------------------------- details

    def _tokens(self, microbatches: Sequence[Microbatch]) -> torch.Tensor:
        """Return the tokens that count in each microbatch, float64; zeros on ranks without a head, which do not know
        them.
        """
        if not self.pipeline.has_head:
            return torch.zeros(len(microbatches), dtype=torch.float64, device=self.parallel.device)
        return torch.stack([each.loss_mask.sum(dtype=torch.float64) for each in microbatches])

    def _totals(self, loss_sum: torch.Tensor, work: StepWork) -> torch.Tensor:
        """Return (loss sum, tokens) over all microbatches of all data-parallel ranks, on every rank."""
        own = self._tokens(work.microbatches)[self.pipeline.counted(work.lowered)].sum()
        own = own * float(self.parallel.cp_rank == 0)
        return self.parallel.sum_over_pipeline_and_data(torch.stack([loss_sum, own]))

    def _save_is_due(self) -> bool:
        interval = self.config.checkpoint.save_interval
        return bool(interval) and self.progress.iteration % (interval or 1) == 0

    def _save(self) -> None:
        if not self.config.checkpoint.save:
            return
        with self.log.paused(), self.timed("save-checkpoint", Patience.ENDLESS):
            self._settle(wait=True)
            self.not_saved = None
            with self._told_if_lost(self.progress.iteration):
                self.checkpointer.save(
                    self.progress, self.state.model, self.state.optimizer, self.scheduler, dict(self.arguments)
                )

    def _closes_with_more(self) -> bool:
        """Whether an evaluation or a checkpoint belongs to this iteration, without which it has not ended."""
        interval = self.config.logging.eval_interval
        return self._save_is_due() or bool(interval and self.progress.iteration % interval == 0)

    def _complete(self) -> None:
        for each in self.extensions:
            each.complete(self.progress.iteration)

    def _settle(self, wait: bool) -> None:
        """Handle the outcome of a checkpoint written beside training; wait: until it is complete."""
        with self._told_if_lost(self.checkpointer.writing):
            self.checkpointer.settle(wait)

    def finish_saving(self) -> None:
        """Wait until the last checkpoint is complete, or known not to be (`not_saved`)."""
        if self.checkpointer.writing is not None:
            with self.timed("save-checkpoint", Patience.ENDLESS):
                self._settle(wait=True)

    @contextmanager
    def _told_if_lost(self, iteration: int | None) -> Iterator[None]:
        """Report a checkpoint that cannot be written, on a full disk for example, and go on: the next may succeed."""
        try:
            yield
        except CheckpointError as error:
            self.not_saved = error
            if self.parallel.is_first:
                complain(f"WARNING: iteration {iteration} was not saved: {error}")

    def _wants_timeline(self) -> bool:
        return bool(self.config.logging.record_timeline or self.config.logging.timeline_png)

    @contextmanager
    def timed(self, name: str, patience: Patience = Patience.STEP, together: bool = True) -> Iterator[None]:
        """Run a part of a step under a timer, announced to the watchdog."""
        self.position.enter(name, patience, together)
        timer = self.timers(name, log_level=1)
        timer.start(barrier=False)
        try:
            yield
        finally:
            timer.stop()
        self.position.enter(f"after {name}")


def _no_gradient(microbatch: int) -> torch.Tensor:
    raise RuntimeError("evaluation has no backward")
