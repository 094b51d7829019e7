"""Published figures as cells of a JSON file: what was run, where, and what was measured.

The file is a list of objects; `Cell` has their fields. `flags` are the training program's own, without the two dashes;
true gives a flag without a value, false and null leave it out. A field that is null is one that is left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.data import checked, read
from benchmarks.report import progress
from helixpipe.common.errors import UserError
from helixpipe.costs.attention_kernels import ATTENTION_KERNELS

RUNTIMES = ("ours", "megatron")

FIT = "fit"
"""Value of `op_overhead` that asks for it to be found from the cells that say so."""


@dataclass(frozen=True)
class Published:
    """Figures as a paper says them; None and 0: not said. memory_gib: of the fullest GPU. over_best: throughput over
    that of the fastest other schedule of the same row. oom: whether it ran out of memory."""

    tokens_per_second_per_gpu: float | None = None
    memory_gib: float | None = None
    oom: bool = False
    over_best: float | None = None

    @property
    def says_whether_it_ran(self) -> bool:
        return self.oom or self.tokens_per_second_per_gpu is not None or self.memory_gib is not None


@dataclass(frozen=True)
class Cell:
    """One figure of a table, or one line of it under one schedule.

    Ratios are formed within (table, row) against the schedule `1f1b`. hardware: a preset's name.
    network_gbits_per_node: in one direction; None: the preset's. pcie: GPUs of a node are joined by PCIe alone.
    runtime: whose engine: `megatron` does not compute while it sends or receives. calibrate: whether the table's speed
    is found from this cell, with --calibrate. attention_kernel: see --attention-kernel; None: what its engine had, as
    far as is known (`predicted_cells.kernel_of`). op_overhead: seconds that an op takes beside its kernels, or `fit`;
    None: the runtime's (`predicted_cells.overhead_of`).
    """

    id: str
    table: str
    row: str
    schedule: str
    hardware: str
    gpus: int
    flags: Mapping[str, Any]
    published: Published
    gpus_per_node: int = 8
    network_gbits_per_node: float | None = None
    pcie: bool = False
    runtime: str = "ours"
    calibrate: bool = False
    attention_kernel: str | None = None
    op_overhead: float | str | None = None


def load(path: str | Path) -> list[Cell]:
    """The cells of a file; those that are not of the form are left out, with a line each on standard error that names
    the cell and the field. Raises UserError where none is left."""
    content = read(path, "CELLS=")
    if not isinstance(content, list) or not content:
        raise UserError(f"CELLS={path} must be a list of cells, not {json.dumps(content)[:40]}.")
    cells, refused = [], []
    for number, each in enumerate(content, start=1):
        try:
            cells.append(_cell(f"{path}, cell {number}", each))
        except UserError as error:
            refused.append(str(error))
    if not cells:
        raise UserError(refused[0])
    for sentence in refused:
        progress(f"left out: {sentence}")
    return cells


def _cell(place: str, content: Any) -> Cell:
    if isinstance(content, dict) and content.get("id"):
        place = f"{place} ({content['id']})"
    values = checked(place, content, Cell, _tell)
    published = checked(f"{place}, published", values["published"], Published, _tell)
    for name in ("tokens_per_second_per_gpu", "memory_gib", "over_best"):
        if not _is_number(published.get(name, 0), 0):
            raise UserError(f"{place}: published {name} must be a number, not {published[name]!r}.")
        published[name] = published.get(name) or None
    values["published"] = Published(**published)
    for name in ("id", "table", "row", "schedule", "hardware"):
        values[name] = str(values[name])
    values["schedule"] = values["schedule"].lower()
    if not isinstance(values["flags"], dict):
        raise UserError(f"{place}: flags must be an object of flags and values, not {values['flags']!r}.")
    for name in ("gpus", "gpus_per_node"):
        value = values.get(name, 1)
        if not _is_number(value, 1) or value != int(value):
            raise UserError(f"{place}: {name} must be a whole number from 1 on, not {value!r}.")
        values[name] = int(values.get(name, Cell.gpus_per_node))
    if values.get("runtime", "ours") not in RUNTIMES:
        raise UserError(f"{place}: runtime {values['runtime']!r} is unknown; known are {' and '.join(RUNTIMES)}.")
    kernel, overhead = values.get("attention_kernel"), values.get("op_overhead")
    if kernel is not None and kernel not in ATTENTION_KERNELS:
        raise UserError(f"{place}: attention_kernel {kernel!r} is unknown; known are {', '.join(ATTENTION_KERNELS)}.")
    if overhead is not None and overhead != FIT and not _is_number(overhead, 0):
        raise UserError(f"{place}: op_overhead must be seconds, from 0 on, or {FIT}, not {overhead!r}.")
    network = values.get("network_gbits_per_node")
    if network is not None and (not _is_number(network, 0) or not network):
        raise UserError(f"{place}: network_gbits_per_node must be a number above 0, not {network!r}.")
    return Cell(**values)


def _is_number(value: Any, least: float) -> bool:
    """Whether it is one of at least so much, and not beyond all that is measured."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= 1e30


def _tell(place: str, unknown: list[str], known: list[str]) -> None:
    progress(f"{place}: {', '.join(unknown)} has no effect; fields are {', '.join(known)}.")
