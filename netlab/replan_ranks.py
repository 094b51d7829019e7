"""Runs on replan.py's ranks: emulated steps that are watched, and planned anew as in training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from helixpipe.adapt.reports import Link
from helixpipe.lowering.project import LoweredProgram
from helixpipe.planning.background import BackgroundPlanner
from helixpipe.planning.plan import Plan, make_plan
from helixpipe.program.program import Program
from helixpipe.runtime.executor import Step
from helixpipe.runtime.meter import report_of
from helixpipe.watch.adaptation import Adaptation
from helixpipe.watch.lead import Options, Place
from netlab.emulated_costs import EmulatedCosts, Size
from netlab.emulated_ranks import TwoWays, timed_step
from netlab.replan_costs import EmulatedReplanner
from netlab.waiting_model import WaitingExecutor, WaitingModel


@dataclass(frozen=True)
class Cause:
    """What is slow from step `first` on, before step `end`: ops of ranks and messages of links take so many times as
    long."""

    ranks: Mapping[int, float] = field(default_factory=dict)
    links: Mapping[Link, float] = field(default_factory=dict)
    first: int = 20
    end: int = 60


class Watched(NamedTuple):
    """Seconds of each step from step 1, the number of the plan that it ran, and what the leading rank said."""

    seconds: list[float]
    plans: list[int]
    lines: list[str]


SetLinks = Callable[[bool], None]
"""Makes the links of a cause slow, or as fast as they were."""


def watched_steps(
    rank: int, own: Program, size: Size, costs: EmulatedCosts, cause: Cause, steps: int, set_links: SetLinks
) -> Watched:
    """Steps of the run's own program and of what it is planned anew to."""
    run = _Run(rank, size, costs)
    plan, lines = make_plan(own, costs), list[str]()
    place, options = Place(rank, size.ranks, 0, 1), Options(mode="auto")
    store = dist.distributed_c10d._get_default_store()
    running: list[Plan] = [plan]
    adaptation = Adaptation(
        plan, place, options, store, lambda: BackgroundPlanner(EmulatedReplanner(size)), running.append, lines.append
    )
    seconds, plans = [], []
    for step in range(1, steps + 1):
        if step in (cause.first, cause.end) and rank == 0:
            set_links(step == cause.first)
        slow = cause.first <= step < cause.end
        number, lowered = adaptation.number, running[-1].lowered
        due = adaptation.due(step, lowered)
        taken, record = run.step(lowered, cause.ranks.get(rank, 1.0) if slow else 1.0)
        seconds.append(taken)
        plans.append(number)
        if due:
            adaptation.report(report_of(record, step, rank, plan=number))
        ready = torch.tensor([adaptation.ready])
        dist.all_reduce(ready)
        adaptation.settle(ready.item(), step)
    adaptation.close()
    run.close()
    return Watched(seconds, plans, lines)


def steps_of(
    rank: int,
    programs: Sequence[LoweredProgram],
    size: Size,
    costs: EmulatedCosts,
    cause: Cause,
    steps: int,
    set_links: SetLinks,
) -> list[list[float]]:
    """Seconds of steps of each program while the cause lasts, the programs in turn, after one that does not count."""
    run = _Run(rank, size, costs)
    if rank == 0:
        set_links(True)
    seconds: list[list[float]] = [[] for _ in programs]
    for step in range(1 + steps):
        for own, lowered in zip(seconds, programs, strict=True):
            taken, _ = run.step(lowered, cause.ranks.get(rank, 1.0))
            if step:
                own.append(taken)
    if rank == 0:
        set_links(False)
    run.close()
    return seconds


class _Run:
    """An engine whose ops wait. times: how many times as long they take."""

    def __init__(self, rank: int, size: Size, costs: EmulatedCosts):
        self._transport = TwoWays(rank)
        model = WaitingModel(size.model, size.micro_batch_size)
        self._engine = WaitingExecutor(costs, rank, model, self._transport)
        self._step = Step(
            iteration=0,
            microbatch_number=lambda index: index,
            batch=lambda index: None,  # type: ignore[arg-type,return-value]
            root_gradient=lambda index: torch.ones(()),
            micro_batch_size=size.micro_batch_size,
            seq_length=size.tokens,
        )

    def step(self, lowered: LoweredProgram, times: float) -> tuple[float, Any]:
        self._engine.time_scale = times
        return timed_step(self._engine, lowered, self._step)

    def close(self) -> None:
        self._transport.close()
