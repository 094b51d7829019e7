"""From the flags to the schedule's program. No torch: a bad schedule is refused before anything starts."""

from __future__ import annotations

from helixpipe.errors import ProgramError
from helixpipe.program import Program
from helixpipe.validate import validate
from megatron.training.config import Config
from megatron.training.costs import memory_limit, training_costs
from schedules import Shape, build


def make_program(config: Config, num_microbatches: int) -> Program:
    """The schedule's program for a training step. Raises ScheduleError or ProgramError, in the words of the flags."""
    shape = Shape(
        ranks=config.parallel.pipeline_model_parallel_size,
        microbatches=num_microbatches,
        layers=config.model.num_layers or 0,
        virtual_stages=config.parallel.virtual_pipeline_model_parallel_size,
        costs=training_costs(config),
        recompute=config.recompute,
        memory_limit=memory_limit(config),
    )
    return build(config.parallel.pipeline_schedule or "none", shape, config.schedule_options)


def check_program(config: Config) -> None:
    """Build and validate the program of a full batch, and that it can be run. Raises ScheduleError, ProgramError."""
    training = config.training
    samples = (training.micro_batch_size or 1) * config.parallel.data_parallel_size
    program = make_program(config, (training.global_batch_size or 1) // samples)
    validate(program)
    if program.forward_only:
        raise ProgramError(f"schedule {program.schedule} has no backward: it is an evaluation program.")
    for stage in program.stages:
        if stage.placement != "resident":
            raise ProgramError(
                f"schedule {program.schedule} has {stage.placement} stages, which training cannot run yet."
            )
    for rank, ops in enumerate(program.ranks):
        if not ops:
            raise ProgramError(f"schedule {program.schedule} gives pipeline rank {rank} nothing to run.")
    if program.num_chunks > 1:
        raise ProgramError(f"schedule {program.schedule} cuts sequences into chunks, which training cannot run yet.")
