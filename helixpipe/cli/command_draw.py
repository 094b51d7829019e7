"""`helixpipe draw`: a picture of schedules and of measured runs. No torch here."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path

from helixpipe.cli.profile import profile_costs
from helixpipe.cli.programs import make_simulations, plan_of
from helixpipe.common.errors import UserError
from helixpipe.common.files import try_file
from helixpipe.draw.formats import check_suffix, draw
from helixpipe.program.files import is_file
from helixpipe.program.timeline import Timeline


def run(namespace: argparse.Namespace) -> None:
    names: list[str] = namespace.schedules
    output = namespace.output
    if output is None:
        output = "-".join(Path(name).stem if is_file(name) else name for name in names) + ".png"
    check_suffix(output)
    if any(is_file(name) and Path(name).resolve() == Path(output).resolve() for name in names):
        raise UserError(f"--output {output} is the program that is to be drawn.")
    try_file("--output", output)  # before minutes of planning
    measured = [_measured(path) for path in namespace.measured]
    measured_costs = profile_costs(namespace)
    simulations = make_simulations(names, namespace, plan_of(names, namespace) or measured_costs)
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
    copies = [(copy.rank, f"the copy of {copy.op}", copy.start, copy.end) for copy in timeline.copies]
    for rank, what, start, end in (*timeline.ops, *copies):
        if not 0 <= rank < timeline.num_ranks or not 0 <= start <= end < math.inf:
            raise UserError(
                f"the timeline {path} is damaged: {what} on rank {rank} from {start} to {end} cannot be drawn."
            )
    title = timeline.title if "measured" in timeline.title else f"{timeline.title} (measured)"
    return dataclasses.replace(timeline, title=title)
