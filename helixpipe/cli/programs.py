"""Makes programs and their simulations from the flags of the `helixpipe` command."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Collection, Iterable, Sequence

from helixpipe.cli.chunks import Chunking, Lengths
from helixpipe.cli.documents import Packer, check_flags, model_options, packer_of
from helixpipe.cli.model import ModelOnCluster, ModelOptions, make_plan
from helixpipe.cli.options import CostOptions, ShapeOptions
from helixpipe.common.errors import ScheduleError, UserError
from helixpipe.common.flags import dataclass_from_namespace
from helixpipe.costs.by_hand import PieceTimes, parse_piece_times
from helixpipe.costs.hardware import GIB
from helixpipe.costs.models import AUTO
from helixpipe.costs.profile_costs import ProfileCosts
from helixpipe.lowering.lower import lower
from helixpipe.planning.catalogue import Catalogue, Schedule, Shape, of_model
from helixpipe.planning.division import DivisionOptions
from helixpipe.planning.memory.offload import OffloadOptions
from helixpipe.planning.memory.recompute import RecomputeOptions
from helixpipe.planning.order.chunk_options import ChunkOptions
from helixpipe.planning.setup import Setup
from helixpipe.planning.vocabulary.choice import VocabularyOptions, check_heads
from helixpipe.program.costs import Costs
from helixpipe.program.files import is_file, load_program, naming, says_all
from helixpipe.program.program import Program, forward_only
from helixpipe.program.workload import Workload
from helixpipe.simulate.simulator import Simulation, simulate

MAX_UNITS = 5_000_000  # some minutes and gigabytes: more is a slip of the finger


def plan_of(names: Sequence[str], namespace: argparse.Namespace) -> ModelOnCluster | None:
    """Return the model and cluster of --model; a file's ranks, microbatches and, if it says them, layers are the
    plan's.
    """
    size = dataclass_from_namespace(ShapeOptions, namespace)
    documents = check_flags(namespace)
    options = model_options(dataclass_from_namespace(ModelOptions, namespace), documents)
    if options.named:
        _refuse_times(namespace)
        size = common_size(names, size)
    one_rank = all(not is_file(name) and namespace.catalogue.find(name).one_rank for name in names)
    limit = dataclass_from_namespace(CostOptions, namespace).memory_limit
    plan = make_plan(options, size.ranks, size.microbatches, size.layers, one_rank, limit)
    if plan is None:
        return None
    costs = dataclasses.replace(plan.costs, op_overhead=namespace.op_overhead)
    if costs.layout.overlap_tp_comm == AUTO:
        chunks = chunk_flags(namespace, names).count(size.chunks) or 1
        ways = costs.ways_to_hide(chunks)[: 2 if len(names) == 1 and documents is None else 1]
        plans = [dataclasses.replace(plan, costs=way, documents=documents) for way in ways]
        return plans[0] if len(plans) == 1 else min(plans, key=lambda each: _makespan(names, namespace, each))
    return dataclasses.replace(plan, costs=costs, documents=documents)


def common_size(names: Sequence[str], size: ShapeOptions) -> ShapeOptions:
    """Return the size with the ranks, microbatches and layers that the files among the names have.

    Raises:
        ScheduleError: Flags and a file, or two files, differ in one of them.
    """
    said: dict[str, tuple[str, int]] = {}
    for name in filter(is_file, names):
        program = program_of_file(name, dataclasses.replace(size, chunks=None, virtual_stages=None), None)
        own = {"ranks": program.num_ranks, "microbatches": program.num_microbatches}
        own |= {"layers": program.num_layers} if says_all(name) else {}
        for what, number in own.items():
            first, other = said.setdefault(what, (name, number))
            if other != number:
                raise ScheduleError(
                    f"{name} has {number} {what} and {first} {other}: programs are compared at one size; give files "
                    f"of equally many {what}."
                )
    return dataclasses.replace(size, **{what: number for what, (_, number) in said.items()})


def _makespan(names: Sequence[str], namespace: argparse.Namespace, plan: ModelOnCluster) -> float:
    (simulation,) = make_simulations(names, namespace, plan)
    return float(f"{simulation.makespan:.9g}")


def _refuse_times(namespace: argparse.Namespace) -> None:
    for name in ("piece_times", "backward_ratio", "message_time", "copy_time"):
        if getattr(namespace, name) != getattr(CostOptions, name):
            raise UserError(f"--{name.replace('_', '-')} cannot be given beside --model, which has costs of its own.")


def make_simulations(
    names: Sequence[str],
    namespace: argparse.Namespace,
    given: ModelOnCluster | ProfileCosts | None,
    one_queue: bool = False,
) -> list[Simulation]:
    """Simulate each schedule or file, all of one size. given: in place of times by hand. one_queue: see `simulate`."""
    size = dataclass_from_namespace(ShapeOptions, namespace)
    options = dataclass_from_namespace(CostOptions, namespace)
    pieces = parse_piece_times(options.piece_times)
    times = (options.backward_ratio, options.message_time, options.copy_time, options.op_overhead)
    costs: Costs = PieceTimes(pieces, *times)
    limit = options.memory_limit
    if isinstance(given, ModelOnCluster):
        size = dataclasses.replace(size, ranks=given.ranks, microbatches=given.microbatches, layers=given.layers)
        costs, limit = given.costs, None if options.ignore_memory_limit else given.limit
    elif given is not None:
        if not any(map(says_all, names)):
            size = dataclasses.replace(size, layers=size.layers or given.profile.model.layers)
        costs, limit = given, limit * GIB if limit is not None else None
    recompute = dataclass_from_namespace(RecomputeOptions, namespace)
    offload = dataclass_from_namespace(OffloadOptions, namespace)
    vocabulary = dataclass_from_namespace(VocabularyOptions, namespace)
    if offload.auto and limit is None:
        raise UserError("--offload-activations auto needs a limit: --memory-limit, or --model with its hardware.")
    plan = given if isinstance(given, ModelOnCluster) else None
    host_limit = math.inf if plan is None else plan.costs.host_memory
    programs = _programs(
        names,
        size,
        Setup(  # of how many ranks and layers follows for each schedule
            1,
            1,
            costs,
            recompute=recompute,
            memory_limit=limit,
            offload=offload,
            host_limit=host_limit,
            sharded=1 if plan is None else plan.costs.sharded,
            gathered_once=plan is not None and plan.costs.gathered_once,
            vocabulary=vocabulary,
        ),
        plan,
        namespace,
    )
    unit = "" if given is None else "s"
    blocking = options.p2p == "blocking"
    if blocking and one_queue:
        raise UserError("--p2p blocking sends beside no op; leave --device-queues one out.")
    simulations = [
        simulate(lower(program, costs), costs, unit, one_queue=one_queue, blocking=blocking) for program in programs
    ]
    if not all(math.isfinite(simulation.makespan + sum(simulation.busy)) for simulation in simulations):
        raise UserError(f"--piece-times {options.piece_times} are too large to add up.")
    return simulations


def _programs(
    names: Sequence[str],
    size: ShapeOptions,
    given: Setup,
    plan: ModelOnCluster | None,
    namespace: argparse.Namespace,
) -> list[Program]:
    """Return the program of each name; a file gives ranks, microbatches and, if it says them, layers to the schedules
    it is compared with.
    """
    schedules = {name: namespace.catalogue.find(name) for name in names if not is_file(name)}
    if (packer := packer_of(namespace, plan)) is not None:
        if foreign := namespace.catalogue.foreign_options(namespace.given, list(schedules.values())):
            raise ScheduleError(foreign[0])
        return [_packed(name, size, given, packer, namespace) for name in names]
    chunking = Chunking(dataclass_from_namespace(ChunkOptions, namespace), given.costs, plan)
    cutting = chunking.options.cutting_flag(size.chunks)
    size = dataclasses.replace(size, chunks=chunk_flags(namespace, names).count(size.chunks))
    # Beside schedules of the catalogue, chunks and virtual stages are for those.
    own = dataclasses.replace(size, chunks=None, virtual_stages=None) if schedules else size
    files = {name: program_of_file(name, own, None) for name in names if is_file(name)}
    namespace.catalogue.check_chunks(cutting, names)
    if foreign := namespace.catalogue.foreign_options(namespace.given, list(schedules.values())):
        raise ScheduleError(foreign[0])
    size = common_size(names, size)
    if size.ranks is None:
        size = dataclasses.replace(size, ranks=default_ranks(schedules.values()))
    interleaving = any(schedule.virtual_stages for schedule in schedules.values())
    shapes = {name: _shape(schedule, size, given, interleaving) for name, schedule in schedules.items()}
    layers = size.layers or common_layers([shape.layers for shape in shapes.values()], files)
    programs = []
    for name in names:
        if name in schedules:
            shape = _divided(dataclasses.replace(shapes[name], layers=layers), schedules[name], size, namespace)
            program = _scheduled(schedules[name], shape, chunking, namespace)
        else:
            program = files[name] if says_all(name) else program_of_file(name, own, layers)
            with naming(name):
                program = _of_file(name, program, given, chunking, namespace)
        programs.append(forward_only(program) if namespace.forward_only else program)
    return programs


def default_ranks(schedules: Collection[Schedule]) -> int:
    """Return the pipeline ranks of a comparison of these schedules, where nothing says how many."""
    return 1 if schedules and all(schedule.one_rank for schedule in schedules) else 4


def common_layers(layers: Sequence[int], files: Iterable[str]) -> int:
    """Return the fewest layers that all programs of a comparison can have: schedules of multiples of `layers`, and
    files with as many stages as they have."""
    return math.lcm(*layers, *(len(load_program(name, None).stages) for name in files))


def _of_file(name: str, program: Program, given: Setup, chunking: Chunking, namespace: argparse.Namespace) -> Program:
    """Return a file's program with the changes that the flags ask for."""
    program = of_model(program, given.costs)
    check_heads(name, program, given.vocabulary)
    program = chunking.of_file(name, program)
    shape = given.of(program.num_ranks, program.num_layers, None).shape(program.num_microbatches)
    catalogue: Catalogue = namespace.catalogue
    return catalogue.completed(name, program, shape)


def chunk_flags(namespace: argparse.Namespace, names: Sequence[str]) -> ChunkOptions:
    """Return the flags about chunks, for which a number is to be found where none is given and one of these schedules
    is made for chunks.
    """
    made_for_chunks = any(not is_file(name) and namespace.catalogue.find(name).chunks for name in names)
    return dataclass_from_namespace(ChunkOptions, namespace).finding(made_for_chunks, namespace.chunks)


def found_chunks(namespace: argparse.Namespace, simulations: Sequence[Simulation]) -> list[str]:
    """Return a line for each program whose number of chunks was found and not given."""
    programs = [each.lowered.program for each in simulations]
    return [
        f"{program.schedule}: {program.num_chunks} chunks"
        for program in programs
        if namespace.lengths is None and not program.source and chunk_flags(namespace, [program.schedule]).auto
    ]


def _packed(name: str, size: ShapeOptions, given: Setup, packer: Packer, namespace: argparse.Namespace) -> Program:
    """Return the program of a schedule of the catalogue on documents of all lengths."""
    if is_file(name):
        raise ScheduleError(f"{name} says itself what its microbatches are; leave --lengths out.")
    catalogue: Catalogue = namespace.catalogue
    schedule = catalogue.find(name)
    options = dataclass_from_namespace(schedule.options, namespace)
    shape = _shape(schedule, size, given, interleaving=False)

    def build(workload: Workload) -> Program:
        return catalogue.build(name, dataclasses.replace(shape, microbatches=len(workload), ragged=workload), options)

    program = packer.program(schedule, shape, build)
    return forward_only(program) if namespace.forward_only else program


def _scheduled(schedule: Schedule, shape: Shape, chunking: Chunking, namespace: argparse.Namespace) -> Program:
    """Return the program of a schedule of the catalogue."""
    catalogue: Catalogue = namespace.catalogue
    options = dataclass_from_namespace(schedule.options, namespace)

    def make(chunks: int, lengths: Lengths) -> Program:
        return catalogue.build(schedule.name, dataclasses.replace(shape, chunks=chunks, chunk_lengths=lengths), options)

    own = dataclasses.replace(chunking, options=chunk_flags(namespace, [schedule.name]))
    return own.program(make, None if own.options.auto else shape.chunks, shape.layers)


def _shape(schedule: Schedule, size: ShapeOptions, given: Setup, interleaving: bool) -> Shape:
    """Return the size for one schedule. Compared with others, it takes only flags it knows: the rest are for the
    others.

    interleaving: one of them takes virtual stages; where none does, `Catalogue.build` refuses them.
    """
    ranks = default_ranks([schedule]) if size.ranks is None else size.ranks
    microbatches = size.microbatches if size.microbatches is not None else 2 * max(ranks, 1)
    chunks = size.chunks if size.chunks is not None else 1
    virtual = size.virtual_stages if schedule.virtual_stages or not interleaving else None
    layers = size.layers if size.layers is not None else max(ranks, 1) * max(virtual or 2, 2)
    if ranks * microbatches * chunks * (virtual or 1) > MAX_UNITS:
        raise ScheduleError(
            f"{schedule.name} with {ranks} ranks, {microbatches} microbatches and {chunks} chunks is too large to "
            f"simulate; the product may be {MAX_UNITS} at most."
        )
    return given.of(ranks, layers, virtual).shape(microbatches, chunks)


def _divided(shape: Shape, schedule: Schedule, size: ShapeOptions, namespace: argparse.Namespace) -> Shape:
    """Return the shape with the layers that flags give its stages. Raises UserError for flags that do not fit it."""
    flags = dataclass_from_namespace(DivisionOptions, namespace)
    if not flags.given:
        return shape
    if size.layers is None:
        raise UserError("flags that divide the layers over stages need --layers, or a model that has them.")
    counts = flags.stage_layers(size.layers, shape.ranks, schedule.stages_of(shape.virtual_stages))
    return dataclasses.replace(shape, stage_layers=counts)


def program_of_file(path: str, size: ShapeOptions, layers: int | None) -> Program:
    """Load the program of a file. layers: used if the file does not say. Raises ScheduleError if given flags say
    otherwise.
    """
    program = load_program(path, layers)
    for flag, given, own in (
        ("--ranks", size.ranks, program.num_ranks),
        ("--microbatches", size.microbatches, program.num_microbatches),
        ("--layers", size.layers if says_all(path) else None, program.num_layers),
        ("--chunks", size.chunks, program.num_chunks),
        ("--virtual-stages", size.virtual_stages, len(program.stages) / program.num_ranks),
    ):
        if given is not None and given != own:
            raise ScheduleError(f"{flag} {given} does not fit {path}, whose {flag[2:].replace('-', ' ')} are {own:g}.")
    return program
