"""The `helixpipe` command: look at pipeline schedules without running them.

    helixpipe list
    helixpipe simulate 1f1b -p 4 -m 8
    helixpipe draw 1f1b interleaved-1f1b -o compare.png
    helixpipe check my_schedule.csv
    helixpipe memory 1f1b --model llama2-7b --seq-length 131072 --hardware h20 --nodes 8 --tensor-parallel 8
    helixpipe profile --model llama2-7b --seq-length 4096 --output profile.json

It is handed the catalogue (see `schedules.command`). It never imports torch (`profile` leaves that to the processes it
starts), and what is slow to import (matplotlib, rich) only where it is used.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType

from helixpipe.cli.chunks import Chunking, Lengths, chunk_warning
from helixpipe.cli.model import ModelOptions, Plan, make_plan
from helixpipe.cli.model_report import memory_text, report, step_text
from helixpipe.cli.options import CostOptions, ShapeOptions, SimulateOptions
from helixpipe.cli.parser import parsers
from helixpipe.cli.profile import (
    ProfileOptions,
    efficiency_table,
    hardware_measured,
    measure,
    profile_costs,
    profile_table,
    simulation_json,
    simulation_text,
)
from helixpipe.common.errors import ScheduleError, UserError
from helixpipe.common.files import whole_file
from helixpipe.common.flags import (
    dataclass_from_namespace,
    nearest_name,
    unknown_argument,
)
from helixpipe.costs.by_hand import PieceTimes, parse_piece_times
from helixpipe.costs.hardware import GIB
from helixpipe.costs.profile_costs import ProfileCosts
from helixpipe.draw.formats import check_suffix, draw
from helixpipe.draw.style import count
from helixpipe.draw.text import chunk_times, chunks_text, summary, table, text_timeline
from helixpipe.lowering.graph import collector_paused
from helixpipe.lowering.lower import lower
from helixpipe.lowering.validate import untrainable
from helixpipe.planning.catalogue import Catalogue, Schedule, Shape
from helixpipe.planning.chunk_options import ChunkOptions
from helixpipe.planning.recompute import RecomputeOptions, recomputed
from helixpipe.program.costs import Costs
from helixpipe.program.program import Program, format_rows, forward_only, from_csv, to_csv
from helixpipe.program.timeline import Timeline
from helixpipe.simulate.simulator import Simulation, simulate

MAX_UNITS = 5_000_000  # some minutes and gigabytes: more is a slip of the finger
USER_ERROR, INTERRUPTED, PIPE_CLOSED = 2, 130, 141  # exit codes; the last two as a shell gives them


def main(catalogue: Catalogue, argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code. Errors of the user's are one sentence on standard error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(arguments, catalogue)
        sys.stdout.flush()
    except UserError as error:
        print(f"helixpipe: {error}", file=sys.stderr)
        return USER_ERROR
    except BrokenPipeError:  # the reader (`| head`) has seen enough
        _give_up_stdout()
        return PIPE_CLOSED
    except OSError as error:  # a full disk behind standard output
        _give_up_stdout()
        print(f"helixpipe: cannot write the output: {error.strerror or error}.", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


def _give_up_stdout() -> None:
    """Keep the interpreter from flushing what nobody reads when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@collector_paused()  # one command makes its objects and ends
def _run(arguments: list[str], catalogue: Catalogue) -> int:
    parser, commands = parsers({schedule.name: schedule.options for schedule in catalogue.values()})
    name = arguments[0] if arguments else ""
    if not arguments:
        parser.print_help(sys.stderr)
        return USER_ERROR
    if not name.startswith("-") and name not in commands:
        near = nearest_name(name, commands)
        hint = f"did you mean {near}?" if near else f"known are {', '.join(commands)}."
        raise UserError(f"unknown command {name!r}; {hint}")
    if name not in commands and name not in ("-h", "--help", "--version"):
        raise UserError(f"a command must come before {name}: one of {', '.join(commands)}.")
    namespace, unknown = parser.parse_known_args(arguments)
    if unknown and unknown[0].startswith("-"):
        raise UserError(unknown_argument(unknown[0], commands[name].option_strings()))
    if unknown:
        raise UserError(f"{name} takes one schedule or file; {unknown[0]!r} is one too many.")
    namespace.catalogue = catalogue
    namespace.given = commands[name].given(arguments)
    _COMMANDS[name](namespace)
    return 0


# ----------------------------------------------------------------------------------------------------------- commands


def _list(namespace: argparse.Namespace) -> None:
    schedules: list[Schedule] = list(namespace.catalogue.values())
    if namespace.json:
        keys = ("name", "paper", "bubble", "memory")
        rows = [{**{key: getattr(s, key) for key in keys}, "options": _option_names(s)} for s in schedules]
        print(json.dumps(rows))
        return
    headers = ("name", "options", "paper", "bubble", "memory")
    print(
        table(
            headers,
            [(s.name, " ".join(_option_names(s)), s.paper, s.bubble, s.memory) for s in schedules],
        )
    )
    print(
        "\nbubble: idle time of a rank; F, B = I + W: time of a rank for one microbatch\n"
        "        forward, backward (gradients of inputs, of weights); A: attention's part of F.\n"
        "memory: activations that rank r keeps, in microbatches x the rank's layers.\n"
        "p ranks, m microbatches, L layers, v virtual stages, k chunks, g = p/k rounded up;\n"
        "t: time of a message with a rank's weights."
    )


def _simulate(namespace: argparse.Namespace) -> None:
    options = dataclass_from_namespace(SimulateOptions, namespace)
    measured = profile_costs(namespace)
    plan = _plan([namespace.schedule], namespace)
    (simulation,) = _simulations([namespace.schedule], namespace, plan or measured)
    program = simulation.lowered.program
    late = _without_early_recomputation(namespace, plan or measured, program)
    if options.csv is not None:
        with whole_file(options.csv) as temporary:
            to_csv(program, temporary)
    step = None if plan is None else report(simulation, plan)
    if namespace.json:
        result = simulation.to_json(order=options.order)
        if late is not None:
            result["makespan_recomputing_late"] = late
        if program.chunk_lengths is not None:
            result |= {"chunk_lengths": program.chunk_lengths, "chunk_times": chunk_times(simulation)}
        if step is not None:
            result |= {"unit": "s", "step": step.to_json()}
        if measured is not None:
            result |= simulation_json(measured, namespace.profile)
        print(json.dumps(result))
        return
    if measured is not None:
        print(simulation_text(simulation, measured))
    else:
        print(summary(simulation) if step is None else step_text(step))
    if (lengths := chunks_text(simulation)) is not None:
        print(f"\n{lengths}")
    if plan is not None and (warning := chunk_warning(plan, program)) is not None:
        print(warning)
    if late is not None:
        saved = 1 - simulation.makespan / late if late else 0.0
        print(f"Recomputing in idle time saves {100 * saved:.1f} % (--no-recompute-early: {late:.6g}).")
    drawing = text_timeline(simulation.timeline, shutil.get_terminal_size((100, 24)).columns)
    if drawing is not None:
        print(f"\n{drawing}")
    if options.order:
        print()
        for row in format_rows(program):
            print(",".join(row))


def _without_early_recomputation(
    namespace: argparse.Namespace, given: Plan | ProfileCosts | None, program: Program
) -> float | None:
    """The makespan if everything were recomputed inside the backwards; None where that is so, or nothing is."""
    if not any(op.kind == "R" for ops in program.ranks for op in ops) or namespace.schedule.endswith(".csv"):
        return None
    late = argparse.Namespace(**{**vars(namespace), "recompute_early": False})
    (simulation,) = _simulations([namespace.schedule], late, given)
    return simulation.makespan


def _memory(namespace: argparse.Namespace) -> None:
    if namespace.profile is not None:
        raise UserError("memory takes --model and not --profile; simulate --profile prints the bytes of each rank.")
    plan = _plan([namespace.schedule], namespace)
    if plan is None:
        raise UserError("memory needs --model, and counts the bytes of that model.")
    (simulation,) = _simulations([namespace.schedule], namespace, plan)
    step = report(simulation, plan)
    print(json.dumps(step.memory_json()) if namespace.json else memory_text(step))


def _draw(namespace: argparse.Namespace) -> None:
    names: list[str] = namespace.schedules
    output = namespace.output
    if output is None:
        output = "-".join(Path(name).stem if name.endswith(".csv") else name for name in names) + ".png"
    check_suffix(output)
    measured = [_measured(path) for path in namespace.measured]
    measured_costs = profile_costs(namespace)
    simulations = _simulations(names, namespace, _plan(names, namespace) or measured_costs)
    simulated = [simulation.timeline for simulation in simulations]
    if measured:
        simulated = [dataclasses.replace(timeline, title=f"{timeline.title} (simulated)") for timeline in simulated]
    draw([*simulated, *measured], output)
    if namespace.json:
        print(json.dumps({"output": str(output), "simulations": [simulation.to_json() for simulation in simulations]}))
    else:
        print(f"wrote {output}")


def _measured(path: str) -> Timeline:
    timeline = Timeline.load(path)
    if not timeline.ops:
        raise UserError(f"the timeline {path} has no ops.")
    for rank, op, start, end in timeline.ops:
        if not 0 <= rank < timeline.num_ranks or not 0 <= start <= end < math.inf:
            raise UserError(
                f"the timeline {path} is damaged: {op} on rank {rank} from {start} to {end} cannot be drawn."
            )
    title = timeline.title if "measured" in timeline.title else f"{timeline.title} (measured)"
    return dataclasses.replace(timeline, title=title)


def _check(namespace: argparse.Namespace) -> None:
    size = dataclass_from_namespace(ShapeOptions, namespace)
    lowered = lower(_from_file(namespace.file, size, size.layers))
    program = lowered.program
    counts = {
        "ranks": program.num_ranks,
        "microbatches": program.num_microbatches,
        "stages": len(program.stages),
        "chunks": program.num_chunks,
        "ops": len(lowered.graph.ops),
        "messages": len(lowered.messages),
    }
    if namespace.json:
        facts = {"forward_only": program.forward_only, "trainable": untrainable(program) is None}
        print(json.dumps({"schedule": program.schedule, **counts, **facts}))
        return
    one = {"microbatches": "microbatch"}  # the others lose their s
    parts = [count(number, one.get(many, many[:-1]), many) for many, number in counts.items()]
    print(f"{namespace.file} can run: {', '.join(parts)}{', forward only' if program.forward_only else ''}.")
    if (reason := untrainable(program)) is not None:
        print(f"Training refuses it: {reason}")


def _profile(namespace: argparse.Namespace) -> None:
    options = dataclass_from_namespace(ProfileOptions, namespace)
    measured = measure(options)
    if namespace.json:
        print(json.dumps(measured.to_json()))
        return
    print(profile_table(measured))
    hardware = hardware_measured(options, measured)
    if hardware is not None:
        print(f"\n{efficiency_table(measured, hardware)}")
    print(f"\nwrote {options.output}; next: helixpipe simulate 1f1b -p 2 -m 8 --profile {options.output}")


_COMMANDS: MappingProxyType[str, Callable[[argparse.Namespace], None]] = MappingProxyType(
    {"list": _list, "simulate": _simulate, "memory": _memory, "draw": _draw, "check": _check, "profile": _profile}
)


# ----------------------------------------------------------------------------------------- from flags to simulations


def _plan(names: Sequence[str], namespace: argparse.Namespace) -> Plan | None:
    """The model and cluster of --model; a file's ranks and microbatches are the plan's."""
    size = dataclass_from_namespace(ShapeOptions, namespace)
    options = dataclass_from_namespace(ModelOptions, namespace)
    if options.model is not None:
        _refuse_times(namespace)
        for name in names:
            if name.endswith(".csv"):
                program = _from_file(name, dataclasses.replace(size, chunks=None, virtual_stages=None), None)
                size = dataclasses.replace(size, ranks=program.num_ranks, microbatches=program.num_microbatches)
    one_rank = all(not name.endswith(".csv") and namespace.catalogue.find(name).one_rank for name in names)
    return make_plan(options, size.ranks, size.microbatches, size.layers, one_rank)


def _refuse_times(namespace: argparse.Namespace) -> None:
    for name in ("piece_times", "backward_ratio", "message_time"):
        if getattr(namespace, name) != getattr(CostOptions, name):
            raise UserError(f"--{name.replace('_', '-')} cannot be given beside --model, which has costs of its own.")


def _simulations(
    names: Sequence[str], namespace: argparse.Namespace, given: Plan | ProfileCosts | None
) -> list[Simulation]:
    """Simulate each schedule or file, all of one size. given: in place of times by hand."""
    size = dataclass_from_namespace(ShapeOptions, namespace)
    options = dataclass_from_namespace(CostOptions, namespace)
    if options.backward_ratio < 1:
        raise UserError(
            f"--backward-ratio {options.backward_ratio:g} must be at least 1: "
            "the input gradient alone takes as long as the forward."
        )
    costs: Costs = PieceTimes(parse_piece_times(options.piece_times), options.backward_ratio, options.message_time)
    limit = options.memory_limit
    if isinstance(given, Plan):
        if limit is not None:
            raise UserError("--memory-limit is for times given by hand; with --model the limit is the GPU's memory.")
        size = dataclasses.replace(size, ranks=given.ranks, microbatches=given.microbatches, layers=given.layers)
        costs, limit = given.costs, given.limit
    elif given is not None:
        size = dataclasses.replace(size, layers=size.layers or given.profile.model.layers)
        costs, limit = given, limit * GIB if limit is not None else None
    recompute = dataclass_from_namespace(RecomputeOptions, namespace)
    plan = given if isinstance(given, Plan) else None
    programs = _programs(names, size, _Given(costs, limit, recompute), plan, namespace)
    simulations = [simulate(lower(program, costs), costs, "" if given is None else "s") for program in programs]
    if not all(math.isfinite(simulation.makespan + sum(simulation.busy)) for simulation in simulations):
        raise UserError(f"--piece-times {options.piece_times} are too large to add up.")
    return simulations


@dataclasses.dataclass(frozen=True)
class _Given:
    """What a schedule is given beside its size; see `schedules.Shape`."""

    costs: Costs
    memory_limit: float | None
    recompute: RecomputeOptions


def _programs(
    names: Sequence[str], size: ShapeOptions, given: _Given, plan: Plan | None, namespace: argparse.Namespace
) -> list[Program]:
    """The program of each name; a file gives ranks and microbatches to the schedules it is compared with."""
    catalogue: Catalogue = namespace.catalogue
    schedules = {name: catalogue.find(name) for name in names if not name.endswith(".csv")}
    chunking = Chunking(dataclass_from_namespace(ChunkOptions, namespace), given.costs, plan)
    cutting = chunking.options.cutting_flag(size.chunks)
    size = dataclasses.replace(size, chunks=chunking.options.count(size.chunks))
    # Beside schedules of the catalogue, chunks and virtual stages are for those.
    own = dataclasses.replace(size, chunks=None, virtual_stages=None) if schedules else size
    files = {name: _from_file(name, own, None) for name in names if name.endswith(".csv")}
    if chunking.options.auto or all(program.num_chunks == 1 for program in files.values()):
        catalogue.check_chunks(cutting, names)
    if foreign := catalogue.foreign_options(namespace.given, list(schedules.values())):
        raise ScheduleError(foreign[0])
    if files:
        first = next(iter(files.values()))
        size = dataclasses.replace(size, ranks=first.num_ranks, microbatches=first.num_microbatches)
    interleaving = any(schedule.virtual_stages for schedule in schedules.values())
    shapes = {name: _shape(schedule, size, given, interleaving) for name, schedule in schedules.items()}
    layers = size.layers
    if layers is None:
        layers = math.lcm(*(shape.layers for shape in shapes.values()), *(len(f.stages) for f in files.values()))
    programs = []
    for name in names:
        if name in files:
            program = chunking.of_file(_from_file(name, own, layers))
            program = recomputed(program, given.recompute, given.costs, given.memory_limit)
        else:
            shape = dataclasses.replace(shapes[name], layers=layers)
            own_options = dataclass_from_namespace(schedules[name].options, namespace)

            def make(
                chunks: int, lengths: Lengths, name: str = name, shape: Shape = shape, options: object = own_options
            ) -> Program:
                cut = dataclasses.replace(shape, chunks=chunks, chunk_lengths=lengths)
                return catalogue.build(name, cut, options)

            auto = chunking.options.auto and schedules[name].chunks
            program = chunking.program(make, None if auto else shape.chunks, layers)
        programs.append(forward_only(program) if namespace.forward_only else program)
    return programs


def _shape(schedule: Schedule, size: ShapeOptions, given: _Given, interleaving: bool) -> Shape:
    """The size for one schedule. Compared with others, it takes only flags it knows: the rest are for the others.

    interleaving: one of them takes virtual stages; where none does, `Catalogue.build` refuses them.
    """
    ranks = size.ranks if size.ranks is not None else 1 if schedule.one_rank else 4
    microbatches = size.microbatches if size.microbatches is not None else 2 * max(ranks, 1)
    chunks = size.chunks if size.chunks is not None and (schedule.chunks or size.chunks < 1) else 1
    virtual = size.virtual_stages if schedule.virtual_stages or not interleaving else None
    layers = size.layers if size.layers is not None else max(ranks, 1) * max(virtual or 2, 2)
    if ranks * microbatches * chunks * (virtual or 1) > MAX_UNITS:
        raise ScheduleError(
            f"{schedule.name} with {ranks} ranks, {microbatches} microbatches and {chunks} chunks is too large to "
            f"simulate; the product may be {MAX_UNITS} at most."
        )
    return Shape(ranks, microbatches, layers, chunks, virtual, **vars(given))


def _from_file(path: str, size: ShapeOptions, layers: int | None) -> Program:
    """The program of a file. Raises ScheduleError when flags that were given say otherwise."""
    program = from_csv(path, layers)
    for flag, given, own in (
        ("--ranks", size.ranks, program.num_ranks),
        ("--microbatches", size.microbatches, program.num_microbatches),
        ("--chunks", size.chunks, program.num_chunks),
        ("--virtual-stages", size.virtual_stages, len(program.stages) / program.num_ranks),
    ):
        if given is not None and given != own:
            raise ScheduleError(f"{flag} {given} does not fit {path}, whose {flag[2:].replace('-', ' ')} are {own:g}.")
    return program


def _option_names(schedule: Schedule) -> list[str]:
    names = ["--" + field.name.replace("_", "-") for field in dataclasses.fields(schedule.options)]
    return ["-v"] * schedule.virtual_stages + ["-k"] * schedule.chunks + names
