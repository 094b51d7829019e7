"""`helixpipe export`: a schedule as files that another runtime reads."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from helixpipe.cli.model import ModelOnCluster
from helixpipe.cli.profile import profile_costs
from helixpipe.cli.programs import make_simulations, plan_of
from helixpipe.common.files import whole_file
from helixpipe.common.flags import dataclass_from_namespace, option
from helixpipe.costs.profile_costs import ProfileCosts
from helixpipe.lowering.torch_actions import action_rows, compute_rows
from helixpipe.program.text import format_rows


@dataclass(frozen=True)
class ExportOptions:
    """Options that only `export` has."""

    to: Literal["torch"] = option(
        "torch",
        "What reads the files: torch, the runtime of torch.distributed.pipelining (its _load_csv; torchtitan's "
        "pipeline_parallel_schedule_csv).",
    )
    output: str | None = option(
        None,
        "Write FILE.compute_only.csv, the ops of each rank, and FILE.compute_comms.csv, with sends, receives and "
        "FSDP's actions among them (default: the schedule's name).",
        metavar="FILE",
        flags=("--output", "-o"),
    )


def run(namespace: argparse.Namespace) -> None:
    options = dataclass_from_namespace(ExportOptions, namespace)
    given: ModelOnCluster | ProfileCosts | None = plan_of([namespace.schedule], namespace) or profile_costs(namespace)
    (simulation,) = make_simulations([namespace.schedule], namespace, given)
    program = simulation.lowered.program
    rows = action_rows(program, compute_rows(program), simulation.costs)
    stem = options.output or program.schedule.removesuffix(".json").removesuffix(".csv")
    for form, cells in (("compute_only", format_rows(program)), ("compute_comms", rows)):
        _write(f"{stem}.{form}.csv", cells)
        print(f"{stem}.{form}.csv: {len(cells)} ranks, {sum(map(len, cells))} actions.")


def _write(path: str, rows: Iterable[Sequence[str]]) -> None:
    with whole_file(path) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)
