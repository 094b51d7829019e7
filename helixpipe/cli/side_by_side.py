"""Schedules side by side, for `helixpipe compare` and for `simulate` of several."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from helixpipe.cli.model import ModelOptions
from helixpipe.cli.model_report import report
from helixpipe.cli.options import ShapeOptions
from helixpipe.cli.profile import profile_costs
from helixpipe.cli.programs import common_layers, common_size, default_ranks, make_simulations, plan_of
from helixpipe.common.errors import ScheduleError, UserError
from helixpipe.common.flags import dataclass_from_namespace, option
from helixpipe.common.progress import ProgressLine
from helixpipe.costs.hardware import GIB
from helixpipe.draw.table import table
from helixpipe.draw.text import chunk_shares, chunk_times
from helixpipe.planning.catalogue import Schedule
from helixpipe.planning.order.chunk_options import ChunkOptions
from helixpipe.program.files import is_file
from helixpipe.simulate.simulator import Simulation

UNEVEN = 1.05
"""Time of the longest chunk over that of a chunk on average from which on a table says so."""


@dataclass(frozen=True)
class SizeOptions:
    """Sizes of which several may be given, with commas between; every schedule is tried with each that it knows."""

    microbatches: str | None = option(
        None,
        "Microbatches m a step, one or several (8,16) (default: 2p, or the file's).",
        flags=("--microbatches", "-m"),
        metavar="N,...",
    )
    chunks: str | None = option(
        None,
        "Chunks k of each sequence, one or several (1,2,4) (default: 1, or the file's).",
        flags=("--chunks", "-k"),
        metavar="N,...",
    )
    virtual_stages: str | None = option(
        None,
        "Stages v a rank, one or several (2,4) (default: the schedule's).",
        flags=("--virtual-stages", "-v"),
        metavar="N,...",
    )


@dataclass(frozen=True)
class ComparedSchedule:
    """One schedule at one size; refused: why it has no result. ranks, layers: of all rows alike. bubble: idle share of
    all ranks' time in the step; memory: of the rank that needs most, GiB, or microbatch-layers if no model is given.
    longest_chunk: its time over the time of a chunk on average, if sequences are cut.
    """

    schedule: str
    microbatches: int | None
    chunks: int | None
    virtual_stages: int | None
    ranks: int | None = None
    layers: int | None = None
    time: float = math.inf
    bubble: float = math.nan
    memory: float = math.nan
    fits: bool | None = None
    longest_chunk: float | None = None
    refused: str = ""

    @property
    def reason(self) -> str:
        """Why there is no result, with the name of the schedule or file."""
        named = is_file(self.schedule) and Path(self.schedule).name in self.refused
        return self.refused if named else f"{self.schedule}: {self.refused}"

    def to_json(self) -> dict[str, Any]:
        """Return the fields; None for figures that a refused row lacks."""
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(self).items()
        }


def one_size(namespace: argparse.Namespace) -> argparse.Namespace | None:
    """Return the flags with single numbers in place of lists; None if a list has several. Raises UserError."""
    lists = {field.name: numbers(namespace, field.name) for field in fields(SizeOptions)}
    if any(len(each) > 1 for each in lists.values()):
        return None
    return argparse.Namespace(**{**vars(namespace), **{name: each[0] for name, each in lists.items()}})


def numbers(namespace: argparse.Namespace, name: str) -> list[int | None]:
    """Return the checked numbers of a size; [None] if it is not given. Raises UserError."""
    text: str | None = getattr(namespace, name)
    if text is None:
        return [None]
    (limits,) = (item.metadata["range"] for item in fields(ShapeOptions) if item.name == name)
    flag = namespace.given.get(name, f"--{name.replace('_', '-')}")
    values: list[int | None] = []
    for word in text.split(","):
        try:
            number = int(word)
        except ValueError:
            raise UserError(
                f"{flag}: {word[:40]!r} is not a whole number, of which several have commas between (1,2,4)."
            ) from None
        limits.check(flag, number)
        values.append(number)
    return values


def compare(schedules: Mapping[str, Schedule | None], namespace: argparse.Namespace, one_queue: bool = False) -> None:
    """Print a table, or with --json a list, of schedules and files (None) at all sizes, the fastest that fits first for
    each number of microbatches.

    one_queue: see `simulate`. Raises UserError where nothing can be had.
    """
    lists = {field.name: numbers(namespace, field.name) for field in fields(SizeOptions)}
    named = [schedule for schedule in schedules.values() if schedule is not None]
    if foreign := namespace.catalogue.foreign_options(namespace.given, named):
        raise ScheduleError(foreign[0])
    chunk_options = dataclass_from_namespace(ChunkOptions, namespace)
    most_chunks = max((each for each in lists["chunks"] if each is not None), default=None)
    made_for_chunks = any(schedule.chunks for schedule in named)
    chunk_options.finding(made_for_chunks, most_chunks).count(most_chunks)  # refuses flags that no row can have
    namespace.catalogue.check_chunks(chunk_options.cutting_flag(most_chunks), list(schedules))
    namespace = _of_one_size(schedules, namespace, lists)
    lists["microbatches"] = numbers(namespace, "microbatches")
    asked = [(name, schedule, sizes) for name, schedule in schedules.items() for sizes in _sizes(lists, schedule)]
    rows = []
    with ProgressLine("simulating").parts(len(asked)) as simulated:
        for name, schedule, sizes in asked:
            rows.append(_row(name, schedule, namespace, sizes, one_queue))
            simulated()
    if all(row.refused for row in rows):
        raise UserError(rows[0].reason if rows else "there is nothing to compare.")
    rows.sort(key=lambda row: (bool(row.refused), row.microbatches or 0, row.fits is False, row.time, row.schedule))
    if namespace.json:
        print(json.dumps([row.to_json() for row in rows], allow_nan=False))
        return
    _print(rows, _in_bytes(namespace), not namespace.message_time)


def _of_one_size(
    schedules: Mapping[str, Schedule | None], namespace: argparse.Namespace, lists: Mapping[str, Sequence[int | None]]
) -> argparse.Namespace:
    """Return the flags with the ranks and layers of all rows and, unless several are asked for, their microbatches.

    Raises:
        ScheduleError: Flags and files differ in them.
    """
    first = {**vars(namespace), **dict.fromkeys(lists)}
    if len(lists["microbatches"]) == 1:
        (first["microbatches"],) = lists["microbatches"]
    asked = argparse.Namespace(**first)
    names, named = list(schedules), [schedule for schedule in schedules.values() if schedule is not None]
    size = common_size(names, dataclass_from_namespace(ShapeOptions, asked))
    if (plan := plan_of(names, asked)) is not None:
        size = replace(size, ranks=plan.ranks, layers=plan.layers)
    elif namespace.profile is None:
        ranks = size.ranks or default_ranks(named)
        stages = [each or 2 for each in lists["virtual_stages"]] if named else []
        files = [name for name, schedule in schedules.items() if schedule is None]
        layers = size.layers or common_layers([ranks * max(each, 2) for each in stages], files)
        size = replace(size, ranks=ranks, layers=layers)
    sizes: dict[str, Any] = {"ranks": size.ranks, "layers": size.layers}
    if len(lists["microbatches"]) == 1 and size.microbatches is not None:
        sizes["microbatches"] = str(size.microbatches)
    return argparse.Namespace(**{**vars(namespace), **sizes})


def _in_bytes(namespace: argparse.Namespace) -> bool:
    """Whether costs are those of a model or measured, in seconds and bytes."""
    return namespace.profile is not None or dataclass_from_namespace(ModelOptions, namespace).named


def _sizes(lists: Mapping[str, Sequence[int | None]], schedule: Schedule | None) -> Iterator[tuple[int | None, ...]]:
    """Yield (microbatches, chunks, virtual stages) to try: all combinations of those that the schedule has."""
    known = {
        "microbatches": True,
        "chunks": schedule is not None,
        "virtual_stages": schedule is not None and bool(schedule.virtual_stages),
    }
    return product(*(each if known[name] else [None] for name, each in lists.items()))


def _row(
    name: str,
    schedule: Schedule | None,
    namespace: argparse.Namespace,
    sizes: tuple[int | None, ...],
    one_queue: bool,
) -> ComparedSchedule:
    microbatches, chunks, virtual = sizes
    own = {field.name for field in fields(schedule.options)} if schedule is not None else set()
    others = {
        field.name for each in namespace.catalogue.values() for field in fields(each.options) if field.name not in own
    }
    values = {**vars(namespace), "microbatches": microbatches, "chunks": chunks, "virtual_stages": virtual}
    values |= _not_for(chunks, schedule, dataclass_from_namespace(ChunkOptions, namespace))
    values["given"] = {field: flag for field, flag in namespace.given.items() if field not in others}
    asked = argparse.Namespace(**values)
    try:
        measured = profile_costs(asked)
        plan = plan_of([name], asked)
        (simulation,) = make_simulations([name], asked, plan or measured, one_queue)
    except UserError as error:
        return ComparedSchedule(name, microbatches, chunks, virtual, refused=namespace.spelled(str(error)))
    program = simulation.lowered.program
    stages = len(program.stages) // program.num_ranks
    size = (program.num_microbatches, program.num_chunks, stages, program.num_ranks, program.num_layers)
    bubble, longest = simulation.bubble_ratio, _longest_chunk(simulation)
    if plan is not None:
        step = report(simulation, plan)
        return ComparedSchedule(name, *size, step.step_time, bubble, step.peak / GIB, step.fits, longest)
    unit = 1.0 if measured is None else GIB
    return ComparedSchedule(
        name, *size, simulation.makespan, bubble, max(simulation.peak_activation) / unit, None, longest
    )


def _not_for(chunks: int | None, schedule: Schedule | None, options: ChunkOptions) -> dict[str, None]:
    """Return the flags about chunks that a row of whole sequences does not use. chunks: of --chunks."""
    if schedule is None or options.finding(schedule.chunks, chunks).cutting_flag(chunks):
        return {}
    return {"pipe_sp_strategy": None, "chunk_alignment": None}


def _longest_chunk(simulation: Simulation) -> float | None:
    """Return the time of the longest chunk over that of a chunk on average; None where sequences are whole."""
    if chunk_shares(simulation) is None:
        return None
    times = chunk_times(simulation)
    return max(times) * len(times) / (sum(times) or 1.0)


def _print(rows: list[ComparedSchedule], in_bytes: bool, free_messages: bool) -> None:
    unit = "GiB" if in_bytes else "microbatch-layers"
    headers = ("schedule", "m", "k", "v", "time" + " (s)" * in_bytes, "bubble", f"memory ({unit})")
    fits = {True: "yes", False: "no", None: ""}
    judged = any(row.fits is not None for row in rows)
    cells = [
        (
            row.schedule, str(row.microbatches), str(row.chunks), str(row.virtual_stages), f"{row.time:.6g}",
            f"{100 * row.bubble:.1f} %", f"{row.memory:.4g}", *[fits[row.fits]] * judged,
        )
        for row in rows
        if not row.refused
    ]  # fmt: skip
    shown = next(row for row in rows if not row.refused)
    print(f"{shown.ranks} pipeline ranks, {shown.layers} layers; m microbatches, k chunks, v stages a rank:")
    if not in_bytes:
        print(f"Times are in the unit of --piece-times{', messages take none: give --message-time' * free_messages}.")
    print(table((*headers, *["fits"] * judged), cells))
    for row in rows:
        if row.refused:
            print(row.reason)
        elif row.longest_chunk is not None and row.longest_chunk > UNEVEN:
            longer = 100 * (row.longest_chunk - 1)
            print(
                f"{row.schedule}, k = {row.chunks}: its longest chunk takes {longer:.0f} % longer than the average one."
            )
