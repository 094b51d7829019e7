"""From the flags to the schedule's program. No torch: a bad schedule is refused before anything starts."""

from __future__ import annotations

from dataclasses import replace

from helixpipe.common.errors import ProgramError
from helixpipe.costs.hardware import find_hardware
from helixpipe.lowering.validate import untrainable, validate
from helixpipe.planning.chunk_lengths import CHUNK_COUNTS, best_chunks, chunk_counts
from helixpipe.planning.recompute import peak_memory
from helixpipe.program.program import Program
from helixpipe.simulate.simulator import Simulation
from megatron.training.config import Config
from megatron.training.plan.costs import memory_limit, training_costs
from schedules import Shape, build


def make_program(config: Config, num_microbatches: int) -> Program:
    """The schedule's program for a training step. Raises ScheduleError, ProgramError or UserError, in the words of the
    flags."""
    name, costs = config.parallel.pipeline_schedule or "none", training_costs(config)
    limit = memory_limit(config)
    shape = Shape(
        ranks=config.parallel.pipeline_model_parallel_size,
        microbatches=num_microbatches,
        layers=config.model.num_layers or 0,
        virtual_stages=config.parallel.virtual_pipeline_model_parallel_size,
        costs=costs,
        recompute=config.recompute,
        memory_limit=limit,
    )

    def cut(chunks: int) -> Program:
        """The program with the sequence cut into so many chunks."""
        lengths = config.chunks.resolve(
            chunks, costs, shape.layers, config.model.seq_length, config.parallel.tensor_model_parallel_size
        )
        return build(name, replace(shape, chunks=chunks, chunk_lengths=lengths), config.schedule_options)

    def fits(simulation: Simulation) -> bool:
        program = simulation.lowered.program
        return limit is None or all(peak_memory(program, costs, r) <= limit for r in range(program.num_ranks))

    count = config.chunks.count()
    if not config.chunks.auto:
        return cut(count or 1)
    counts: tuple[int, ...] = CHUNK_COUNTS
    if config.parallel.hardware is not None:  # whose shortest worthwhile chunk is known
        hardware = find_hardware(config.parallel.hardware)
        counts = chunk_counts(config.model.seq_length or 1, config.training.micro_batch_size or 1, hardware)
    return best_chunks(cut, costs, fits, counts)


def check_program(config: Config) -> None:
    """Build and validate the program of a full batch, and that it can be run. Raises ScheduleError, ProgramError."""
    training = config.training
    samples = (training.micro_batch_size or 1) * config.parallel.data_parallel_size
    program = make_program(config, (training.global_batch_size or 1) // samples)
    validate(program)
    if (reason := untrainable(program)) is not None:
        raise ProgramError(reason)
