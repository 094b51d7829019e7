"""`helixpipe draw`: a picture of schedules and of measured runs."""

from __future__ import annotations

import argparse
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from helixpipe.cli.profile import profile_costs
from helixpipe.cli.programs import found_chunks, make_simulations, plan_of
from helixpipe.common.errors import UserError
from helixpipe.common.files import try_file
from helixpipe.common.flags import dataclass_from_namespace, option
from helixpipe.draw.formats import check_suffix, draw
from helixpipe.draw.page import draw_circle
from helixpipe.lowering.validate import CircleError
from helixpipe.program.files import is_file
from helixpipe.program.timeline import Timeline
from helixpipe.simulate.simulator import Simulation


@dataclass(frozen=True)
class DrawOptions:
    """Options that only `draw` has."""

    width: int | None = option(
        None,
        "Pixels that a picture has at most; numbers without room are left out (default: as many as they need).",
        at_least=600,
        at_most=24000,
    )


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
    try:
        simulations = make_simulations(names, namespace, plan_of(names, namespace) or measured_costs)
    except CircleError as error:
        if Path(output).suffix.lower() != ".html":
            raise
        draw_circle(error, output)
        raise UserError(f"{str(error).rstrip('.')}; {output} shows it.") from None
    simulated = [_titled(simulation, "simulated") if measured else simulation for simulation in simulations]
    blocking = namespace.p2p == "blocking"  # the page simulates ranks that compute while they send
    shown = [*(each.timeline if blocking else each for each in simulated), *measured]
    draw(shown, output, dataclass_from_namespace(DrawOptions, namespace).width)
    if namespace.json:
        print(json.dumps({"output": str(output), "simulations": [simulation.to_json() for simulation in simulations]}))
    else:
        print("\n".join([*found_chunks(namespace, simulations), f"wrote {output}"]))


def _titled(simulation: Simulation, how: str) -> Simulation:
    return dataclasses.replace(simulation, title=f"{simulation.timeline.title} ({how})")


def _measured(path: str) -> Timeline:
    timeline = Timeline.load(path)
    if not timeline.ops:
        raise UserError(f"the timeline {path} has no ops.")
    copies = [(copy.source, f"the copy of {copy.op}", copy.start, copy.end) for copy in timeline.copies]
    for rank, what, start, end in (*timeline.ops, *copies):
        if not 0 <= start <= end:
            raise UserError(
                f"the timeline {path} is damaged: {what} on rank {rank} from {start} to {end} cannot be drawn."
            )
    title = timeline.title if "measured" in timeline.title else f"{timeline.title} (measured)"
    return dataclasses.replace(timeline, title=title)
