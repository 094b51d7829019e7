"""The catalogue of pipeline schedules: one file a family, pure functions, one line each in the registry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

from helixpipe.errors import ScheduleError
from helixpipe.flags import nearest_name
from helixpipe.program import Program, from_csv
from helixpipe.recompute import recomputed
from schedules.adapipe import adapipe
from schedules.base import NoOptions, Schedule, Shape
from schedules.gpipe import gpipe, no_pipeline
from schedules.helix import HelixOptions, helix
from schedules.one_f_one_b import interleaved, one_f_one_b
from schedules.seq1f1b import seq1f1b, seq1f1b_interleaved, seq1f1b_zero_bubble, terapipe
from schedules.weipipe import WeipipeOptions, weipipe, weipipe_naive, wzb1, wzb2
from schedules.zero_bubble import ZeroBubbleOptions, zb1p, zb2p, zb_interleaved, zbv

__all__ = ["SCHEDULES", "NoOptions", "Schedule", "Shape", "build", "find", "foreign_options"]

_REGISTRY = (
    Schedule("none", no_pipeline, "gradient accumulation, p = 1", bubble="0", memory="1", one_rank=True),
    Schedule("gpipe", gpipe, "Huang et al., GPipe, 2019", bubble="(p-1)(F+B)", memory="m"),
    Schedule("1f1b", one_f_one_b, "Fan et al., DAPPLE, 2021", bubble="(p-1)(F+B)", memory="min(p-r, m)"),
    Schedule("adapipe", adapipe, "Sun et al., ASPLOS 2024", bubble="at most 1f1b's", memory="the limit"),
    Schedule(
        "interleaved-1f1b",
        interleaved,
        "Narayanan et al., SC'21",
        bubble="(p-1)(F+B)/v",
        memory="(2(p-r-1) + (v-1)p + 1)/v",
        virtual_stages=True,
    ),
    Schedule(
        "zb1p", zb1p, "Qi et al., ICLR 2024 (ZB-H1)", bubble="(p-1)(F+I-W)", memory="p", options=ZeroBubbleOptions
    ),
    Schedule("zb2p", zb2p, "Qi et al., ICLR 2024 (ZB-H2)", bubble="(p-1)F", memory="2p", options=ZeroBubbleOptions),
    Schedule("zbv", zbv, "Qi et al., ICLR 2024 (ZB-V)", bubble="(p-1)F/2", memory="p", options=ZeroBubbleOptions),
    Schedule(
        "zb-interleaved",
        zb_interleaved,
        "Qi et al., ICLR 2024 (ZB-H1), interleaved",
        bubble="(p-1)(F+I-W)/v",
        memory="(2(p-1) + (v-1)p + 1)/v",
        options=ZeroBubbleOptions,
        virtual_stages=True,
    ),
    Schedule("terapipe", terapipe, "Li et al., ICML 2021", bubble="(p-1)(F+B)/k", memory="m", chunks=True),
    Schedule("seq1f1b", seq1f1b, "Sun et al., Seq1F1B, 2024", bubble="(p-1)(F+B)/k", memory="(p-r-1+k)/k", chunks=True),
    Schedule(
        "seq1f1b-interleaved",
        seq1f1b_interleaved,
        "Sun et al., Seq1F1B, 2024",
        bubble="(p-1)(F+B)/(kv)",
        memory="(2(p-r-1) + (v-1)kg + k)/(kv)",
        virtual_stages=True,
        chunks=True,
    ),
    Schedule(
        "seq1f1b-zb",
        seq1f1b_zero_bubble,
        "Sun et al., Seq1F1B, 2024",
        bubble="(p-1)(F+I-W)/k",
        memory="(p-1+k)/k",
        options=ZeroBubbleOptions,
        chunks=True,
    ),
    Schedule(
        "helix",
        helix,
        "Zhang et al., HelixPipe, 2025",
        bubble="3(p-1)(F-A)p/L",
        memory="m, or 3m/16 recomputed",
        options=HelixOptions,
    ),
    *(
        Schedule(
            name, make, f"Lin et al., PPoPP 2025 ({variant})", bubble=bubble, memory=memory, options=WeipipeOptions
        )
        for name, make, variant, bubble, memory in (
            ("weipipe-naive", weipipe_naive, "WeiPipe-Naive", "pt", "p"),
            ("weipipe", weipipe, "WeiPipe-Interleave", "pt", "p"),
            ("wzb1", wzb1, "WZB1", "pt", "3p/2"),
            ("wzb2", wzb2, "WZB2", "(p-1)t", "p"),
        )
    ),
)

SCHEDULES = MappingProxyType({schedule.name: schedule for schedule in _REGISTRY})
"""Every schedule by its flag value."""


def find(name: str) -> Schedule:
    """The schedule of that name. Raises ScheduleError that names the nearest one."""
    if name in SCHEDULES:
        return SCHEDULES[name]
    near = nearest_name(name, SCHEDULES)
    hint = f"did you mean {near}? " if near else ""
    raise ScheduleError(
        f"unknown pipeline schedule {name!r}: {hint}known are {', '.join(SCHEDULES)}, or the path of a .csv file."
    )


def foreign_options(given: Mapping[str, str], chosen: Sequence[Schedule]) -> list[str]:
    """A sentence for each flag that only other schedules than the `chosen` have. given: field -> flag as written."""
    own = {field.name for schedule in chosen for field in fields(schedule.options)}
    names = ", ".join(schedule.name for schedule in chosen) or "a file"
    sentences = []
    for name, flag in given.items():
        others = [each.name for each in SCHEDULES.values() if name in {field.name for field in fields(each.options)}]
        if others and name not in own:
            sentences.append(f"{flag} is an option of {', '.join(others)}, not of {names}.")
    return sentences


def build(name: str, shape: Shape, options: Any = None) -> Program:
    """The program of a schedule of the catalogue, or of a CSV file (a name that ends in `.csv`), for a shape.

    Raises ScheduleError for an unknown name or a shape the schedule cannot have; for a file, ProgramError when it
    cannot be read and ScheduleError when it was made for other ranks or microbatches. The program is not validated
    here (`lowering.lower` does).
    """
    return recomputed(_build(name, shape, options), shape.recompute, shape.costs, shape.memory_limit)


def _build(name: str, shape: Shape, options: Any) -> Program:
    if name.endswith(".csv"):
        program = from_csv(name, shape.layers)
        if (program.num_ranks, program.num_microbatches) != (shape.ranks, shape.microbatches):
            raise ScheduleError(
                f"{name} is a program for {program.num_ranks} ranks and {program.num_microbatches} microbatches, "
                f"but the run has {shape.ranks} and {shape.microbatches}."
            )
        if shape.virtual_stages is not None:
            raise ScheduleError(f"{name} says itself which stages a rank has; leave virtual stages out.")
        if shape.chunks not in (1, program.num_chunks):
            raise ScheduleError(f"{name} has {program.num_chunks} chunks a microbatch, but the run has {shape.chunks}.")
        if shape.chunks == program.num_chunks:  # a file does not say how long they are
            return replace(program, chunk_lengths=shape.chunk_lengths)
        return program
    schedule = find(name)
    if shape.virtual_stages not in (None, 1) and not schedule.virtual_stages:
        raise ScheduleError(
            f"schedule {name} has one stage a rank; virtual stages ({shape.virtual_stages}) need another."
        )
    if shape.chunks != 1 and not schedule.chunks:
        raise ScheduleError(f"schedule {name} does not cut the sequence; chunks ({shape.chunks}) need another.")
    return schedule.build(shape, options if options is not None else schedule.options())
