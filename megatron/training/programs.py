"""From the flags to the schedule's program. Imports no torch, so that a bad schedule is refused before anything starts."""

from __future__ import annotations

from helixpipe.program import Program
from helixpipe.validate import validate
from megatron.training.config import Config
from schedules import Shape, build


def make_program(config: Config, num_microbatches: int) -> Program:
    """The schedule's program for a training step. Raises ScheduleError or ProgramError, in the words of the flags."""
    shape = Shape(
        ranks=config.parallel.pipeline_model_parallel_size,
        microbatches=num_microbatches,
        layers=config.model.num_layers or 0,
        virtual_stages=config.parallel.virtual_pipeline_model_parallel_size,
    )
    return build(config.parallel.pipeline_schedule or "none", shape, config.schedule_options)


def check_program(config: Config) -> None:
    """Build and validate the program of a full batch. Raises ScheduleError or ProgramError."""
    training = config.training
    samples = (training.micro_batch_size or 1) * config.parallel.data_parallel_size
    validate(make_program(config, (training.global_batch_size or 1) // samples))
