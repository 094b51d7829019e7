"""Schedules of this project in a training loop of one's own, in place of megatron-core's.

The catalogue meets the machinery here, as in `helixpipe.cli.main`: this file alone of the package knows it.
"""

from __future__ import annotations

from helixpipe.model.device import prepare

prepare()  # megatron-core must be imported quietly and, without CUDA, made to run on the CPU

from collections.abc import Callable  # noqa: E402
from typing import Any  # noqa: E402

from helixpipe.common.errors import ScheduleError  # noqa: E402
from helixpipe.drop_in.loop import ForwardBackward, MakeProgram  # noqa: E402
from helixpipe.planning.memory.offload import OffloadOptions  # noqa: E402
from helixpipe.planning.memory.recompute import RecomputeOptions  # noqa: E402
from helixpipe.program.costs import Costs  # noqa: E402
from helixpipe.program.files import is_file, load_program  # noqa: E402
from helixpipe.program.program import Program  # noqa: E402
from schedules import CATALOGUE, Shape, build  # noqa: E402

__all__ = ["ForwardBackward", "OffloadOptions", "RecomputeOptions", "get_forward_backward_func"]


def get_forward_backward_func(
    schedule: str | Program | Callable[[int], Program],
    costs: Costs | None = None,
    *,
    chunks: int | None = None,
    chunk_lengths: tuple[int, ...] | None = None,
    virtual_stages: int | None = None,
    recompute: RecomputeOptions | None = None,
    memory_limit: float | None = None,
    offload: OffloadOptions | None = None,
    kv_grad_fp32: bool = False,
    **options: Any,
) -> ForwardBackward:
    """Return a `forward_backward_func` as megatron-core's function of this name returns, but of any schedule.

    schedule: a name of the catalogue or the path of a .json or .csv file; or a program; or a function from the number
        of microbatches to a program. The model's chunks on a rank are the schedule's stages on it, in model order; or
        the model is one PipelineModel of `ForwardBackward.pieces`, and can be cut in any way.
    costs: what ops take, for schedules that are found from costs. Of the pieces only proportions count: where the model
        is not a PipelineModel, a stage is taken to be as long as any other, whatever layers the chunks have. None:
        backward twice forward.
    chunks, chunk_lengths: of a sequence; the number of equal ones, or the tokens of each. virtual_stages: stages a
        rank. recompute: what every stage recomputes. memory_limit: what a rank may use, in the costs' unit. offload:
        what waits in the host's memory. All these, as `schedules.Shape` has them, need a PipelineModel and a schedule
        given by name or file.
    kv_grad_fp32: sum the gradients of keys and values over the chunks of a sequence in float32.
    options: the schedule's own, such as `zb_max_inflight`, for names of the catalogue.

    Raises ScheduleError for an unknown name or option; what the schedule asks of the model is checked when it is first
    called.
    """
    given: dict[str, Any] = {
        "chunks": len(chunk_lengths) if chunks is None and chunk_lengths is not None else chunks,
        "chunk_lengths": None if chunk_lengths is None else tuple(chunk_lengths),
        "virtual_stages": virtual_stages,
        "recompute": recompute,
        "memory_limit": memory_limit,
        "offload": offload,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if options and not (isinstance(schedule, str) and schedule in CATALOGUE):
        raise ScheduleError(f"options ({', '.join(options)}) belong to a schedule of the catalogue given by its name.")
    if isinstance(schedule, str):
        return ForwardBackward(_from_catalogue(schedule, costs, given, options), kv_grad_fp32)
    if given:
        raise ScheduleError(f"{', '.join(given)} belong to a schedule given by its name or file, not to a program.")
    if isinstance(schedule, Program):
        return ForwardBackward(_always(schedule), kv_grad_fp32)
    make = schedule
    return ForwardBackward(lambda ranks, microbatches, chunks, layers=None: make(microbatches), kv_grad_fp32)


def _always(program: Program) -> MakeProgram:
    def make(ranks: int, microbatches: int, chunks: int, layers: int | None = None) -> Program:
        if program.num_microbatches != microbatches:
            raise ScheduleError(
                f"program {program.schedule} is for {program.num_microbatches} microbatches, but "
                f"num_microbatches is {microbatches}; give a function from that number to a program."
            )
        return program

    return make


def _from_catalogue(name: str, costs: Costs | None, given: dict[str, Any], options: dict[str, Any]) -> MakeProgram:
    """Return a function that makes the program. given: the shape's fields for a PipelineModel. options: the schedule's
    own.
    """
    own_options = None if is_file(name) else CATALOGUE.own_options(name, options)

    def make(ranks: int, microbatches: int, chunks: int, layers: int | None = None) -> Program:
        if layers is not None:
            return build(name, Shape(ranks, microbatches, layers, costs=costs, **given), own_options)
        _check_without_own_model(name, given)
        if own_options is None:
            return load_program(name)
        # A number of layers that every schedule can divide: a stage stands for the user's chunk, whatever is in it.
        virtual_stages = chunks if CATALOGUE[name].virtual_stages else None
        shape = Shape(ranks, microbatches, 2 * ranks * chunks, virtual_stages=virtual_stages, costs=costs)
        return build(name, shape, own_options)

    return make


def _check_without_own_model(name: str, given: dict[str, Any]) -> None:
    if name in CATALOGUE and CATALOGUE[name].chunks:
        raise ScheduleError(
            f"schedule {name} cuts sequences into chunks, which needs a helixpipe.model.PipelineModel; with chunks of "
            f"a GPTModel of one's own, choose one of {', '.join(s for s in CATALOGUE if not CATALOGUE[s].chunks)}."
        )
    if given:
        raise ScheduleError(
            f"{', '.join(given)} need a helixpipe.model.PipelineModel; with chunks of a GPTModel of one's own, leave "
            "them out: the model says how many stages a rank has, and its configuration what is recomputed."
        )
