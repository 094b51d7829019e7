"""Makes the schedule's plans from the flags. An invalid schedule is refused before anything starts."""

from __future__ import annotations

from collections.abc import Collection
from math import inf

from helixpipe.common.errors import ProgramError, UserError
from helixpipe.costs.hardware import GIB, find_hardware
from helixpipe.costs.models import AUTO, PAIRS, shared_unit
from helixpipe.costs.verdict import MemoryVerdict
from helixpipe.lowering.validate import untrainable
from helixpipe.planning.order.chunk_lengths import best_chunks, chunk_counts
from helixpipe.planning.plan import Plan, Plans
from helixpipe.planning.vocabulary.choice import head_place
from helixpipe.program.costs import Costs
from helixpipe.program.files import naming
from helixpipe.program.program import Program
from helixpipe.program.workload import uniform
from helixpipe.simulate.simulator import Simulation
from helixpipe.simulate.verdict import memory_verdict
from megatron.pretrain.config import Config
from megatron.pretrain.plan.costs import (
    divisible_head,
    explicit_limit,
    gpu_memory,
    host_limit,
    memory_limit,
    setup_of,
    training_costs,
    with_overlap_chosen,
)
from megatron.pretrain.plan.documents import DocumentPlanner
from schedules import build


def make_planner(config: Config) -> Plans[int]:
    """Return the plans of training steps, by their number of microbatches on each data-parallel rank; for steps of
    documents one plan stands for them all, of the longest documents allowed.
    """
    costs = training_costs(config)
    if config.data.variable_seq_lengths:
        return Plans(lambda _: DocumentPlanner(config).nominal(), costs)
    return Plans(lambda num_microbatches: make_program(config, num_microbatches, costs), costs)


def make_program(config: Config, num_microbatches: int, costs: Costs | None = None) -> Program:
    """Return the schedule's program for a training step. costs: the configured ones, if already known. Raises
    ScheduleError, ProgramError or UserError, in the words of the flags.
    """
    name, costs = config.parallel.schedule, costs or training_costs(config)
    setup = setup_of(config, costs)
    limit = setup.memory_limit
    if config.offload.auto and limit is None:
        raise UserError("--offload-activations auto needs --memory-limit or --hardware, which say what there is.")

    parallel = config.parallel
    unit = shared_unit(parallel.tensor_model_parallel_size, parallel.context_parallel_size, parallel.parts)

    def cut(chunks: int) -> Program:
        """Return the program with the sequence cut into `chunks` chunks."""
        lengths = config.chunks.resolve(
            chunks,
            costs,
            setup.layers,
            config.model.seq_length,
            config.parallel.tensor_model_parallel_size,
            unit,
        )
        return build(name, setup.shape(num_microbatches, chunks, lengths), config.schedule_options)

    def fits(simulation: Simulation) -> bool:
        return limit is None or max(simulation.device_needs) <= limit

    if not config.chunks.auto:
        program = cut(config.chunks.count() or 1)
        if program.num_chunks > 1 and program.workload == uniform(len(program.workload), program.num_chunks):
            return cut(program.num_chunks)  # a file that does not say how long its chunks are
        return program
    hardware = find_hardware(config.parallel.hardware) if config.parallel.hardware is not None else None
    length, samples = config.model.seq_length or 1, config.training.micro_batch_size or 1
    return best_chunks(cut, costs, fits, chunk_counts(length, samples, hardware, unit))


def with_overlap(config: Config) -> Config:
    """Return the configuration with an --overlap-tp-comm of auto settled: between off and halves by what layers take,
    and pairs where the step of the full batch is faster so on paper.
    """
    chosen = with_overlap_chosen(config)
    parallel = config.parallel
    layout_known = parallel.overlap_tp_comm == AUTO and parallel.cost_profile is None
    sizes = parallel.tensor_model_parallel_size, parallel.context_parallel_size, parallel.expert_model_parallel_size
    if not layout_known or max(sizes) == 1 or config.data.variable_seq_lengths:
        return chosen
    ways = chosen, config.replace("parallel", overlap_tp_comm=PAIRS)
    return min(ways, key=lambda way: float(f"{make_planner(way).plan(full_batch(way)).simulation.makespan:.9g}"))


def with_one_head(config: Config, plans: Plans[int]) -> tuple[Config, Plans[int]]:
    """Return the configuration with `--pipeline-vocab-parallel auto` decided, and its plans: what is best for a step of
    the full batch is what every step of the run has, since it says where weights are.
    """
    if config.vocabulary.pipeline_vocab_parallel != "auto":
        return config, plans
    place = head_place(plans.program(full_batch(config)))
    config = config.replace("vocabulary", pipeline_vocab_parallel=place)
    return config, make_planner(config)


def full_batch(config: Config) -> int:
    """Return the microbatches on each data-parallel rank of a step of the full batch."""
    samples = (config.training.micro_batch_size or 1) * config.parallel.data_parallel_size
    return (config.training.global_batch_size or 1) // samples


def check_program(config: Config, plans: Plans[int]) -> None:
    """Plan a step of a full batch, and see that it can be run. Raises ScheduleError, ProgramError."""
    program = plans.plan(full_batch(config)).program
    with naming(program.source):
        if (reason := untrainable(program)) is not None:
            raise ProgramError(reason)
        if program.kv_blocks:
            _check_blocks(config)
        if program.chain < len(program.stages):
            _check_divided_head(config)
        if not config.data.variable_seq_lengths:
            workload = program.workload.of_sequences(config.model.seq_length or 1)
            _check_lengths(config, {length for number in range(len(workload)) for length in workload.tokens(number)})
    _check_host(config, plans.plan(full_batch(config)))


def _check_blocks(config: Config) -> None:
    """Raise UserError for what attention to keys and values in blocks cannot do."""
    flag = "--kv-blocks" if config.offload.kv_blocks else "--sppo-multiplex"
    for other, value, valid in (
        ("--context-parallel-size", config.parallel.context_parallel_size, 1),
        ("--attention-dropout", config.model.attention_dropout, 0),
    ):
        if value != valid:
            raise UserError(f"{flag} cannot be had with {other} {value:g}; give {valid}, or leave {flag} out.")


def _check_divided_head(config: Config) -> None:
    """Raise UserError where gradients of the embedding's rows and of the parts of a head cannot be summed:
    data-parallel ranks cut the two at other elements."""
    if not divisible_head(config):
        raise UserError(
            "--pipeline-vocab-parallel split cannot be had with --data-parallel-sharding-strategy "
            f"{config.parallel.data_parallel_sharding_strategy} where the output layer is tied to the embedding; give "
            "spread, or --untie-embeddings-and-output-weights."
        )


def _check_lengths(config: Config, lengths: Collection[float]) -> None:
    """Raise UserError where the ranks that share a chunk cannot do so evenly."""
    parallel = config.parallel
    odd = [length for length in lengths if length % parallel.unit]
    if odd:
        raise UserError(
            f"chunks must be multiples of {parallel.unit} tokens with --context-parallel-size "
            f"{parallel.context_parallel_size} and --tensor-model-parallel-size "
            f"{parallel.tensor_model_parallel_size}, not {min(odd):g}."
        )


def _check_host(config: Config, plan: Plan) -> None:
    """Raise UserError where what is offloaded does not fit into the host's memory."""
    limit = host_limit(config)
    if not plan.graph.copies or limit == inf:
        return
    need = max(plan.simulation.host_needs)
    if need > limit:
        raise UserError(
            f"a GPU would need {need / GIB:.3g} GiB of its host's memory, and {limit / GIB:.3g} are its own: offload "
            f"about {limit / need:.2f} of it (--offload-activations), or raise --host-memory."
        )


def step_verdict(config: Config, plans: Plans[int]) -> MemoryVerdict | None:
    """Return whether a step of the full batch fits; None if neither --hardware nor --memory-limit is given."""
    if memory_limit(config) is None:
        return None
    simulation = plans.plan(full_batch(config)).simulation
    return memory_verdict(simulation, gpu_memory(config), explicit_limit(config), host_limit(config))


def predicted_step(config: Config, plans: Plans[int]) -> float | None:
    """Return the simulated seconds of a step of a full batch; None if nothing is known of the GPUs, since the default
    costs only give ratios of times.
    """
    parallel = config.parallel
    if parallel.hardware is None and parallel.cost_profile is None:
        return None
    return plans.plan(full_batch(config)).simulation.makespan
