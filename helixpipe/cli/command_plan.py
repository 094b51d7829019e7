"""`helixpipe plan`: tensor-parallel size, pipeline size, chunks and recomputation for a model on so many GPUs.

    helixpipe plan --schedule sppo --model sppo-7b --hardware a100-80 --gpus 32 --seq-length 524288 \\
        --global-batch-size 1

No torch here.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from helixpipe.cli.model import MAX_GPUS, ModelOptions, make_plan
from helixpipe.cli.torchrun import torchrun_command
from helixpipe.common.errors import ScheduleError, UserError
from helixpipe.common.flags import dataclass_from_namespace, option
from helixpipe.common.ranges import MOST_MICROBATCHES
from helixpipe.costs.hardware import GIB
from helixpipe.planning.catalogue import Catalogue, Schedule
from helixpipe.planning.solver import Problem, Solution, solve


@dataclass(frozen=True)
class PlanOptions:
    """What `plan` is asked for."""

    schedule: str = option("sppo", "The schedule, a name from `helixpipe list`.", metavar="NAME")
    gpus: int | None = option(None, "GPUs of all nodes together.", at_least=1, at_most=MAX_GPUS)
    top: int = option(3, "So many plans are printed, the fastest first.", at_least=1)


def run(namespace: argparse.Namespace) -> None:
    options = dataclass_from_namespace(PlanOptions, namespace)
    catalogue: Catalogue = namespace.catalogue
    schedule = catalogue.find(options.schedule)
    if foreign := catalogue.foreign_options(namespace.given, [schedule]):
        raise ScheduleError(foreign[0])
    problem = _problem(options, schedule, namespace)
    solutions = solve(problem, options.top)
    commands = [
        torchrun_command(each, schedule.name, _own(schedule, namespace), problem.sequences, schedule.offloads)
        for each in solutions
    ]
    if namespace.json:
        figures = [_json(each, command) for each, command in zip(solutions, commands, strict=True)]
        print(json.dumps({"unit": "s", "memory_limit": round(problem.limit), "plans": figures}))
        return
    print(
        f"{problem.model.name} on {problem.gpus} x {problem.hardware.name}: {problem.seq_length} tokens a sequence, "
        f"{problem.sequences} a step, {problem.limit / GIB:.1f} GiB a GPU usable"
    )
    print(f"\n{schedule.name}, simulated, not measured:")
    print("\n".join(_table(solutions, problem)))
    for number, command in enumerate(commands, start=1):
        print(f"\n{number}. {command}")


def _problem(options: PlanOptions, schedule: Schedule, namespace: argparse.Namespace) -> Problem:
    """What the flags give. Raises UserError for flags that are missing or are what is searched for."""
    model = dataclass_from_namespace(ModelOptions, namespace)
    for flag, value in (("--model", model.model), ("--gpus", options.gpus)):
        if value is None:
            raise UserError(f"plan needs {flag}.")
    context = ("--context-parallel", model.context_parallel), ("--cp-comm-type", model.cp_comm_type)
    for flag, value in (("--nodes", model.nodes), ("--tensor-parallel", model.tensor_parallel), *context):
        if value is not None:
            raise UserError(f"{flag} {value} has no place in plan, which is given --gpus and finds the sizes.")
    one = make_plan(dataclasses.replace(model, global_batch_size=None), 1, 1, None)
    assert one is not None
    gpus, hardware = options.gpus or 1, one.costs.hardware
    hardware = dataclasses.replace(hardware, gpus_per_node=min(hardware.gpus_per_node, gpus))
    if gpus % hardware.gpus_per_node:
        raise UserError(f"--gpus {gpus} must be a multiple of the {hardware.gpus_per_node} GPUs of a node.")
    if (model.global_batch_size or 1) > MOST_MICROBATCHES * gpus * (model.micro_batch_size or 1):
        raise UserError(
            f"--global-batch-size {model.global_batch_size} means more than {MOST_MICROBATCHES} microbatches a step on "
            f"--gpus {gpus}."
        )
    own = dataclass_from_namespace(schedule.options, namespace)
    catalogue: Catalogue = namespace.catalogue
    return Problem(
        schedule,
        lambda shape: catalogue.build(schedule.name, shape, own),
        one.costs.model,
        hardware,
        gpus,
        model.global_batch_size or 1,
        dataclasses.replace(one.costs.layout, sequence_parallel=model.sequence_parallel),
        one.limit,
        model.distributed_optimizer,
        one.costs.adam_on_host,
    )


def _own(schedule: Schedule, namespace: argparse.Namespace) -> list[str]:
    """The schedule's own flags as they were given."""
    names = {field.name for field in dataclasses.fields(schedule.options)}
    given = ((flag, getattr(namespace, name)) for name, flag in namespace.given.items() if name in names)
    return [flag if isinstance(value, bool) else f"{flag} {value}" for flag, value in given]


def _table(solutions: list[Solution], problem: Problem) -> list[str]:
    headers = ("", "TP", "PP", "DP", "chunks", "recompute", "offload", "step, s", "tokens/s/GPU", "bubble", "GiB")
    rows = [headers]
    for number, each in enumerate(solutions, start=1):
        tokens = problem.sequences * problem.seq_length / (each.step * problem.gpus)
        rows.append(
            (
                f"{number}.",
                str(each.tensor_parallel),
                str(each.ranks),
                str(each.costs.data_parallel),
                str(each.chunks),
                each.choice.recompute.granularity or "-",
                "auto" if each.choice.offload.auto else "-",
                f"{each.step:.4g}",
                f"{tokens:.1f}",
                f"{100 * each.bubble:.1f} %",
                f"{each.peak / GIB:.1f}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(headers))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _json(solution: Solution, command: str) -> dict[str, Any]:
    return {
        "tensor_parallel": solution.tensor_parallel,
        "pipeline_parallel": solution.ranks,
        "data_parallel": solution.costs.data_parallel,
        "microbatches": solution.microbatches,
        "chunks": solution.chunks,
        "recompute": solution.choice.recompute.granularity,
        "offload": solution.choice.offload.offload_activations,
        "step_time": solution.step,
        "bubble_ratio": solution.bubble,
        "memory": round(solution.peak),
        "command": command,
    }
