"""Schedules of the catalogue in torch.distributed.pipelining's own runtime, over PipelineStages of one's own.

    from helixpipe.torch_pipelining import relower, schedule, stages_of_rank

    stages = [PipelineStage(build(index), index, 2 * p, device) for index in stages_of_rank("zbv", rank, p, m)]
    runtime = schedule("zbv", stages, m, loss_fn)
    runtime.step(tokens, target=labels, losses=losses)

torch's runtime is used as it is; what it is given are the ops of each rank and, in place of its own, the order of sends
and receives that `lowering` proves free of deadlock. This file alone knows torch's names that are not public.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    _Action,
    _PipelineSchedule,
    _PipelineScheduleRuntime,
)

from helixpipe.common.errors import ScheduleError, UserError
from helixpipe.lowering.torch_actions import EQUAL_STAGES, ComputeRow, OpGroup, action_rows, compute_rows
from helixpipe.program.costs import Costs
from helixpipe.program.files import is_file, load_program
from helixpipe.program.program import Program
from helixpipe.program.text import from_rows, parse_cell
from schedules import CATALOGUE, Shape, build

__all__ = ["relower", "schedule", "stages_of_rank"]


def schedule(
    name: str | Program,
    stages: Sequence[PipelineStage],
    n_microbatches: int,
    loss_fn: Callable[..., Any],
    *,
    costs: Costs = EQUAL_STAGES,
    scale_grads: bool = True,
    args_chunk_spec: tuple[Any, ...] | None = None,
    kwargs_chunk_spec: dict[str, Any] | None = None,
    output_merge_spec: Any = None,
    **options: Any,
) -> PipelineScheduleMulti:
    """Return a runtime schedule of torch's, ready for `step`, that runs a schedule of the catalogue.

    name: of `helixpipe list`, or the path of a .json or .csv file, or a program. stages: this rank's, in model order,
    those of `stages_of_rank`; how many there are is the number of virtual stages. costs: decide the order of messages,
    and schedules that are found from costs. scale_grads and what follows: as of torch's schedules. options: the
    schedule's own, such as `zb_max_inflight`.

    Raises ScheduleError for stages that are not the schedule's, ProgramError for what torch's runtime cannot run.
    """
    group, local = stages[0].group_size, len(stages)
    program = _program(name, group, n_microbatches, local, costs, options)
    if program.num_microbatches != n_microbatches:
        raise ScheduleError(
            f"{program.schedule} is for {program.num_microbatches} microbatches, but n_microbatches is "
            f"{n_microbatches}."
        )
    rows = action_rows(program, compute_rows(program), costs)
    _check_stages(program, stages)
    runtime = _PipelineScheduleRuntime(
        list(stages),
        n_microbatches,
        loss_fn=loss_fn,
        args_chunk_spec=args_chunk_spec,
        kwargs_chunk_spec=kwargs_chunk_spec,
        output_merge_spec=output_merge_spec,
        scale_grads=scale_grads,
    )
    runtime.pipeline_order = {rank: [_Action.from_str(str(op)) for op in ops] for rank, ops in enumerate(program.ranks)}
    _set_actions(runtime, rows)
    return runtime


def stages_of_rank(
    name: str | Program,
    rank: int,
    num_ranks: int,
    n_microbatches: int,
    *,
    virtual_stages: int | None = None,
    costs: Costs = EQUAL_STAGES,
    **options: Any,
) -> list[int]:
    """Return the indices of the stages that a rank is to build, in model order. Raises ScheduleError."""
    program = _program(name, num_ranks, n_microbatches, virtual_stages, costs, options)
    return sorted({op.stage for op in program.ranks[rank]})


def relower(schedule: _PipelineSchedule, costs: Costs = EQUAL_STAGES) -> PipelineScheduleMulti:
    """Replace the order of sends and receives of a schedule that torch has made, and return the schedule.

    Ops, OVERLAP_F_B pairs and FSDP's actions stay as they are, in their order on each rank; sends and receives get the
    places of one linear order of all ranks, so that no order of the queues they share can stop them. All ranks must do
    this. costs: what ops and messages are taken to need.

    Raises UserError for a schedule of one stage a rank (`ScheduleGPipe`, `Schedule1F1B`), whose order is not data.
    """
    if not isinstance(schedule, _PipelineScheduleRuntime):
        raise UserError(
            f"{type(schedule).__name__} has no actions to be put into another order; relower takes what is built on "
            "torch's runtime (ScheduleInterleaved1F1B, ScheduleZBVZeroBubble and so on), and "
            "helixpipe.torch_pipelining.schedule gives 1f1b and gpipe as such."
        )
    actions: Mapping[int, Sequence[_Action | None]] = schedule.pipeline_order_with_comms
    rows = [_compute_row(actions[rank]) for rank in range(len(actions))]
    program = from_rows(type(schedule).__name__, tuple(row.ops for row in rows))
    _set_actions(schedule, action_rows(program, rows, costs))
    return schedule


def _program(
    name: str | Program, ranks: int, microbatches: int, virtual: int | None, costs: Costs, options: dict[str, Any]
) -> Program:
    if isinstance(name, Program):
        return name
    if is_file(name):
        return load_program(name)
    own = CATALOGUE.own_options(name, options)
    if CATALOGUE[name].chunks:
        raise ScheduleError(f"schedule {name} runs sequences in chunks, which torch's runtime cannot; take another.")
    interleaved = virtual if CATALOGUE[name].virtual_stages else None
    shape = Shape(ranks, microbatches, ranks * (virtual or 2), virtual_stages=interleaved, costs=costs)
    return build(name, shape, own)


def _check_stages(program: Program, stages: Sequence[PipelineStage]) -> None:
    rank, given = stages[0].group_rank, [stage.stage_index for stage in stages]
    if (program.num_ranks, len(program.stages)) != (stages[0].group_size, stages[0].num_stages):
        raise ScheduleError(
            f"schedule {program.schedule} has {program.num_ranks} ranks and {len(program.stages)} stages, but the "
            f"PipelineStages were built for {stages[0].group_size} and {stages[0].num_stages}."
        )
    wanted = sorted({op.stage for op in program.ranks[rank]})
    if given != wanted:
        raise ScheduleError(
            f"schedule {program.schedule} has stages {', '.join(map(str, wanted))} on rank {rank}, but the "
            f"PipelineStages given are {', '.join(map(str, given))}: build those of stages_of_rank, in this order."
        )


_COMMUNICATION = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")


def _compute_row(actions: Sequence[_Action | None]) -> ComputeRow:
    """All actions of a rank but sends and receives."""
    groups: list[OpGroup] = []
    between: list[list[str]] = [[]]
    for action in actions:
        if action is None or action.computation_type.value in _COMMUNICATION:
            continue
        if ops := tuple(parse_cell(str(action))):
            groups.append(ops)
            between.append([])
        else:
            between[-1].append(str(action))
    return ComputeRow(tuple(groups), tuple(map(tuple, between)))


def _set_actions(runtime: _PipelineScheduleRuntime, rows: Sequence[Sequence[str]]) -> None:
    actions = {rank: [_Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
    runtime._prepare_schedule_with_comms(actions, format="compute_comms")
