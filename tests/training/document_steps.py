"""Runs on the ranks of test_document_steps.py: steps over whole documents, each under a plan of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch

from helixpipe.common.errors import UserError
from helixpipe.planning.background import BackgroundPlanner
from megatron.pretrain import pretrain
from megatron.pretrain.checkpoint.state import TrainingProgress
from megatron.pretrain.config import core
from megatron.pretrain.data.tokenizer import build_tokenizer
from megatron.pretrain.plan import plan_stream
from megatron.pretrain.plan.documents import DocumentPlanner, StepPlan, StepRequest
from megatron.pretrain.plan.plan_stream import PlanStream
from megatron.pretrain.process.parallel import Parallel
from megatron.pretrain.step.microbatches import BatchSchedule, run_length
from tests.model.common import set_parallel
from tests.training.steps import Figures, Run, make_trainer, of_runs

STEPS = 3


class Here:
    """Plans made in this process when they are asked for."""

    def __init__(self, make: Callable[[StepRequest], StepPlan], say: Callable[[str], None]):
        self.make = make

    def announce(self, size: StepRequest) -> None:
        """Nothing is made ahead."""

    def plan(self, size: StepRequest, give_up: Callable[[], bool], instead: StepRequest) -> StepPlan:
        return self.make(size)

    def close(self) -> None:
        """There is no process."""


def losses_of_runs(rank: int, world_size: int, runs: list[Run]) -> list[tuple[list[float], list[Any]]]:
    """The losses of every run, and what this rank's steps were: (rows, chunks, documents) each."""
    return of_runs(runs, lambda run: losses_of(run, rank, world_size))


def losses_of(run: Run, rank: int, world_size: int) -> tuple[list[float], list[Any]]:
    config = run.config(rank, world_size)
    trainer = make_trainer(config)
    trainer.log = figures = Figures(0)  # type: ignore[assignment]
    trainer.feed = make_feed(trainer, TrainingProgress())
    steps = []
    train = trainer.feed.train

    def noted(progress: TrainingProgress) -> Any:
        work = train(progress)
        workload = work.lowered.program.workload
        steps.append((len(workload), workload.most_chunks, work.samples))
        return work

    trainer.feed.train = noted  # type: ignore[method-assign]
    for _ in range(STEPS):
        trainer._iteration(record=False)
    trainer.feed.close()
    trainer.pipeline.close()
    return figures.losses, steps


def make_feed(trainer: Any, progress: TrainingProgress, beside: Any = Here) -> Any:
    config, parallel = trainer.config, trainer.parallel
    schedule = BatchSchedule.from_config(config)
    tokenizer = build_tokenizer(tokenizer_type="NullTokenizer", vocab_size=config.data.vocab_size)

    def plans(planner: Any, parallel: Any, arrived: Any, say: Any, together: bool) -> PlanStream:
        return PlanStream(planner, parallel, arrived, say, beside=beside, together=together)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_stream, "PlanStream", plans)
        return pretrain._document_feed(
            config, parallel, trainer.pipeline, tokenizer, schedule, run_length(config, schedule), progress
        )


def resumed(rank: int, world_size: int, run: Run) -> bool:
    """Whether a feed that begins in the middle gives what the one that came from the start gives."""
    set_parallel(tp=run.tp, pp=run.pp)
    trainer = make_trainer(run.config(rank, world_size))
    progress, works = TrainingProgress(), []
    feed = make_feed(trainer, progress)
    for _ in range(STEPS):
        works.append(feed.train(progress))
        progress = replace(
            progress,
            iteration=progress.iteration + 1,
            consumed_train_samples=progress.consumed_train_samples + works[-1].samples,
        )
    feed.close()
    done = sum(work.samples for work in works[:-1])
    again = make_feed(trainer, TrainingProgress(STEPS - 1, done))
    work = again.train(TrainingProgress(STEPS - 1, done))
    again.close()
    trainer.pipeline.close()
    ours, theirs = (
        [each for batch in rows for each in batch.tensors()] for rows in (work.microbatches, works[-1].microbatches)
    )
    same = all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    return same and work.lowered.program == works[-1].lowered.program and len(ours) > 0


# ----------------------------------------------------------------------------------------------------- plans in trouble


class Slow(Here):
    """Is never done before it is given up."""

    def plan(self, size: StepRequest, give_up: Callable[[], bool], instead: StepRequest) -> StepPlan:
        if size.step == 0:
            return self.make(size)
        while not give_up():
            pass
        return self.make(instead)


class Failing:
    """Of one pipeline of two nothing can be planned."""

    def __init__(self, planner: DocumentPlanner):
        self.planner = planner

    def __call__(self, request: StepRequest) -> StepPlan:
        if request.dp_rank == 1:
            raise UserError("nothing fits.")
        return self.planner(request)


class Deviating(Failing):
    """One pipeline of two deals documents in a way of its own."""

    def __call__(self, request: StepRequest) -> StepPlan:
        plan = self.planner(request)
        return replace(plan, deal="another") if request.dp_rank == 1 else plan


def troubled(rank: int, world_size: int, run: Run) -> dict[str, Any]:
    set_parallel(tp=run.tp, pp=run.pp)
    config, parallel = run.config(rank, world_size), Parallel.current()
    planner = DocumentPlanner(config)
    requests = [StepRequest("train", step, (9, 16, 3, 5, 16, 1), parallel.dp_rank) for step in range(3)]
    found: dict[str, Any] = {}

    def take(make: Any, beside: Any, before: Callable[[PlanStream], None] = lambda stream: None) -> list[Any]:
        said: list[str] = []
        arrived: list[int] = []
        stream = PlanStream(make, parallel, lambda plan: arrived.append(plan.request.step), said.append, 0.05, beside)
        before(stream)
        taken: list[Any] = []
        for request in requests:
            stream.announce(request)
        for request in requests:
            try:
                taken.append(stream.take(request))
            except Exception as error:
                taken.append(f"{type(error).__name__}: {error}")
        stream.close()
        return [taken, said, arrived]

    taken, said, arrived = take(planner, Slow)
    found["late"] = [each.late for each in taken], said, arrived
    found["failing"] = take(Failing(planner), Here)[0]
    found["deviating"] = take(Deviating(planner), Here)[0]

    def kill(stream: PlanStream) -> None:
        if isinstance(stream._planner, BackgroundPlanner):
            os.kill(stream._planner.process.pid, signal.SIGKILL)
            stream._planner.process.wait()

    whole_or_quick = [planner(requests[0]._replace(quick=quick)).lowered.program for quick in (False, True)]
    taken, said, _ = take(planner, BackgroundPlanner, kill)
    found["killed"] = [each.plan.lowered.program in whole_or_quick for each in taken], said
    return found


# --------------------------------------------------------------------------------------------------- double precision


Gradients = dict[str, numpy.ndarray]
"""Of each weight."""


def gradients_of_runs(rank: int, world_size: int, runs: list[Run]) -> list[list[Gradients]]:
    """Of every run, all in double precision, the whole gradients of this rank's weights in its first two steps."""
    return of_runs(runs, lambda run: gradients_of(run.config(rank, world_size)))


def gradients_of(config: Any) -> list[Gradients]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "params_dtype", lambda config: torch.float64)
        trainer = make_trainer(config)
    trainer.log = Figures(0)  # type: ignore[assignment]
    trainer.feed = make_feed(trainer, TrainingProgress())
    found: list[Gradients] = []
    weights, model, sharded = trainer.state.weights, trainer.state.model, trainer.state.sharded
    reduce = weights.reduce

    def noted(tokens: torch.Tensor | None) -> None:
        reduce(tokens)
        if sharded is None:
            found.append({name: weight.main_grad.numpy().copy() for name, weight in model.named_parameters()})
        else:
            whole = (zip(unit.weights, unit.views(unit.all_parts(unit.total)), strict=True) for unit in sharded.units)
            found.append({name: gradient.numpy() for unit in whole for name, gradient in unit})

    weights.reduce = noted  # type: ignore[method-assign]
    for _ in range(2):
        trainer._iteration(record=False)
    trainer.feed.close()
    trainer.pipeline.close()
    return found
