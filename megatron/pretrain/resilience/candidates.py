"""The plans that a run's flags leave to choose from, when its speeds have changed; no torch, to be quick to start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from helixpipe.adapt.replan import Candidate, PlannerAnswer, Situation, replan
from helixpipe.program.costs import Costs
from helixpipe.program.program import Program
from megatron.pretrain.config import Config
from megatron.pretrain.plan.programs import full_batch, make_program
from schedules import CATALOGUE, Schedule

CHUNKS = (1, 2, 4, 8)
"""Numbers of chunks that are tried where others than the run's are wanted."""

MOST_EFFORT = 3
"""The largest `Schedule.effort` of schedules that are tried."""


@dataclass(frozen=True)
class Replanner:
    """Makes proposals for steps of the full batch; it is sent to a process beside the leading rank."""

    config: Config

    def __call__(self, situation: Situation) -> PlannerAnswer:
        return PlannerAnswer(replan(situation, partial(self.candidates, situation.own)))

    def candidates(self, own: Program, costs: Costs) -> Iterator[Candidate]:
        """Yield programs of the schedules that may place the stages as the run's own program does."""
        stages = len(own.stages) // own.num_ranks
        for chunks in CHUNKS if self.config.adapt.replan_chunks else (own.num_chunks,):
            config = self.config if chunks == own.num_chunks else _cut(self.config, chunks)
            for schedule in CATALOGUE.values():
                if _may_suit(schedule, stages, chunks):
                    named = config.replace("parallel", pipeline_schedule=schedule.name)
                    name = schedule.name if chunks == own.num_chunks else f"{schedule.name} in {chunks} chunks"
                    make = partial(make_program, replace(named, schedule_options=None), full_batch(config), costs)
                    yield name, make


def _may_suit(schedule: Schedule, stages: int, chunks: int) -> bool:
    """Whether a schedule may have so many stages a rank, and is not another one's where sequences are whole."""
    divides = schedule.own_stages or schedule.spread or schedule.one_rank
    same = schedule.virtual_stages == (stages > 1) if schedule.virtual_stages else schedule.stages == stages
    return same and not divides and schedule.effort <= MOST_EFFORT and (chunks > 1 or not schedule.chunks)


def _cut(config: Config, chunks: int) -> Config:
    options = {"pipe_sp_splits": str(chunks), "chunk_lengths": None, "pipe_sp_strategy": None, "chunk_alignment": None}
    return config.replace("chunks", **options)
