"""A recorded step beside a simulation of it with its own times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from helixpipe.costs.by_hand import OpTimes, chunk_numbers
from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.project import LoweredProgram
from helixpipe.program.timeline import Timeline
from helixpipe.runtime.recording import Record, merge_records
from helixpipe.simulate.simulator import simulate
from helixpipe.simulate.transfer_costs import hidden_share, leaving


class RecordedStep(NamedTuple):
    """A recorded step and its simulation. hidden, simulated_hidden: the share of the copies' time for which no op
    waited; None when nothing is copied.
    """

    simulated: Timeline
    measured: Timeline
    hidden: float | None = None
    simulated_hidden: float | None = None


def recorded_step(lowered: LoweredProgram, records: Sequence[Record]) -> RecordedStep:
    """Return the merged records of all ranks for a step, and its simulation.

    The simulation uses the median time of each kind of op in each stage over equal chunks, the rate at which the step
    copied, and messages that take no time.
    """
    name = lowered.program.schedule
    measured = merge_records(lowered, records, f"{name}, measured")
    samples: dict[tuple[str, int, int], list[float]] = {}
    numbers = chunk_numbers(lowered.program.workload)
    for event in measured.ops:
        kind, stage, microbatch, chunk = event.op
        samples.setdefault((kind, stage, numbers[microbatch][chunk]), []).append(event.end - event.start)
    costs = OpTimes(lowered.program, {key: median(times) for key, times in samples.items()})
    copied = sum(measured.copy_time())
    if copied:
        moved = 2 * sum(leaving(lowered.graph, BoundCosts(lowered.program, costs)))  # out, and in again
        costs = replace(costs, copy=copied / moved if moved else 0.0)
    simulation = simulate(lowered, costs, unit="s")
    simulated = replace(simulation.timeline, title=f"{name}, simulated from the median op times")
    if not copied:
        return RecordedStep(simulated, measured)
    hidden = hidden_share(measured.copy_time(), [record.held_up for record in records])
    return RecordedStep(simulated, measured, hidden, simulation.hidden)
