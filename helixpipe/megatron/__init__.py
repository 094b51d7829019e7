"""Schedules of this project in a training loop of one's own, in place of megatron-core's.

The catalogue meets the machinery here, as in `helixpipe.cli`: this file alone of the package knows it.
"""

from __future__ import annotations

from helixpipe.runtime.device import prepare

prepare()  # megatron-core must be imported quietly and, without CUDA, made to run on the CPU

from collections.abc import Callable  # noqa: E402
from dataclasses import fields  # noqa: E402
from typing import Any  # noqa: E402

from helixpipe.costs import Costs  # noqa: E402
from helixpipe.errors import ScheduleError  # noqa: E402
from helixpipe.megatron.loop import ForwardBackward, MakeProgram  # noqa: E402
from helixpipe.program import Program, from_csv  # noqa: E402
from schedules import SCHEDULES, Shape, build, find  # noqa: E402

__all__ = ["ForwardBackward", "get_forward_backward_func"]


def get_forward_backward_func(
    schedule: str | Program | Callable[[int], Program], costs: Costs | None = None, **options: Any
) -> ForwardBackward:
    """A `forward_backward_func` as megatron-core's function of this name returns, but of any schedule.

    schedule: a name of the catalogue or the path of a .csv file; or a program; or a function from the number of
        microbatches to a program. The model's chunks on a rank are the schedule's stages on it, in model order.
    costs: what ops take, for schedules that are found from costs. Of the pieces only proportions count: a stage is
        taken to be as long as any other, whatever layers the chunks have. None: backward twice forward.
    options: the schedule's own, such as `zb_max_inflight`, for names of the catalogue.

    Raises ScheduleError for an unknown name or option; what the schedule asks of the model is checked when it is
    first called.
    """
    if options and not (isinstance(schedule, str) and schedule in SCHEDULES):
        raise ScheduleError(f"options ({', '.join(options)}) belong to a schedule of the catalogue given by its name.")
    if isinstance(schedule, Program):
        return ForwardBackward(_always(schedule))
    if not isinstance(schedule, str):
        make = schedule
        return ForwardBackward(lambda ranks, microbatches, chunks: make(microbatches))
    return ForwardBackward(_from_catalogue(schedule, costs, options))


def _always(program: Program) -> MakeProgram:
    def make(ranks: int, microbatches: int, chunks: int) -> Program:
        if program.num_microbatches != microbatches:
            raise ScheduleError(
                f"program {program.schedule} is for {program.num_microbatches} microbatches, but "
                f"num_microbatches is {microbatches}; give a function from that number to a program."
            )
        return program

    return make


def _from_catalogue(name: str, costs: Costs | None, options: dict[str, Any]) -> MakeProgram:
    if name.endswith(".csv"):
        return lambda ranks, microbatches, chunks: from_csv(name)
    schedule = find(name)
    if schedule.chunks:
        raise ScheduleError(
            f"schedule {name} cuts sequences into chunks, which needs the model of pretrain_gpt.py; with chunks of a "
            f"GPTModel of one's own, choose one of {', '.join(s for s in SCHEDULES if not SCHEDULES[s].chunks)}."
        )
    known = [field.name for field in fields(schedule.options)]
    for option in options:
        if option not in known:
            valid = f"known are {', '.join(known)}" if known else "it has none"
            raise ScheduleError(f"schedule {name} has no option {option}: {valid}.")

    def make(ranks: int, microbatches: int, chunks: int) -> Program:
        # A number of layers that every schedule can divide: a stage stands for the user's chunk, whatever is in it.
        layers = 2 * ranks * chunks
        virtual_stages = chunks if schedule.virtual_stages else None
        shape = Shape(ranks, microbatches, layers, virtual_stages=virtual_stages, costs=costs)
        return build(name, shape, schedule.options(**options))

    return make
