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
from helixpipe.drop_in.programs import for_own_chunks  # noqa: E402
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
    chunks, chunk_lengths: of a sequence; the number of equal ones, or the tokens of each. offload: what waits in the
        host's memory; of a model that is not a PipelineModel, a share of all that is saved. virtual_stages: stages a
        rank. recompute: what every stage recomputes. memory_limit: what a rank may use, in the costs' unit; these
        three need a PipelineModel. All, as `schedules.Shape` has them, need a schedule given by name or file.
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
        if not is_file(schedule) and CATALOGUE.find(schedule).chunks and "chunks" not in given:
            raise ScheduleError(f"schedule {schedule} runs sequences in chunks; give their number, such as chunks=4.")
        return ForwardBackward(_from_catalogue(schedule, costs, given, options), kv_grad_fp32)
    if given:
        raise ScheduleError(f"{', '.join(given)} belong to a schedule given by its name or file, not to a program.")
    if isinstance(schedule, Program):
        return ForwardBackward(_always(schedule), kv_grad_fp32)
    make = schedule
    return ForwardBackward(lambda ranks, microbatches, chunks, layers=None, head="": make(microbatches), kv_grad_fp32)


def _always(program: Program) -> MakeProgram:
    def make(ranks: int, microbatches: int, chunks: int, layers: int | None = None, head: str = "head") -> Program:
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

    def make(ranks: int, microbatches: int, chunks: int, layers: int | None = None, head: str = "head") -> Program:
        if layers is not None:
            return build(name, Shape(ranks, microbatches, layers, costs=costs, head=head, **given), own_options)
        _check_without_own_model(given)
        cut = {field: given[field] for field in ("chunks", "chunk_lengths", "offload") if field in given}
        if own_options is None:
            own = load_program(name)
            shape = Shape(ranks, microbatches, own.num_layers, costs=costs, **cut)
        else:
            # A number of layers that every schedule can divide: a stage stands for the user's chunk, whatever is in it.
            virtual_stages = chunks if CATALOGUE[name].virtual_stages else None
            shape = Shape(ranks, microbatches, 2 * ranks * chunks, virtual_stages=virtual_stages, costs=costs, **cut)
        return for_own_chunks(build(name, shape, own_options), shape.offload.min_offloaded_tensor_size)

    return make


def _check_without_own_model(given: dict[str, Any]) -> None:
    """Raise ScheduleError for what only a PipelineModel can."""
    others = [name for name in given if name not in ("chunks", "chunk_lengths", "offload")]
    if others:
        raise ScheduleError(
            f"{', '.join(others)} need a helixpipe.model.PipelineModel; with chunks of a GPTModel of one's own, leave "
            "them out: the model says how many stages a rank has, and its configuration what is recomputed."
        )
    offload: OffloadOptions = given.get("offload", OffloadOptions())
    if offload.auto or offload.offload_modules or offload.kv_blocks:
        raise ScheduleError(
            "of a GPTModel of one's own a unit offloads a share of all that it saves: give offload_activations a "
            "number from 0 to 1, without offload_modules and kv_blocks, which need a helixpipe.model.PipelineModel."
        )
