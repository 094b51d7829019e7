"""A recorded step beside its simulation: what of the copies' time was hidden, told and as it would be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from helixpipe.costs.by_hand import PieceTimes
from helixpipe.lowering.lower import lower
from helixpipe.lowering.project import LoweredProgram
from helixpipe.program.workload import Slice, Workload
from helixpipe.runtime.recording import Record
from helixpipe.simulate.simulator import Simulation, simulate
from megatron.pretrain.log.recorded import recorded_step
from megatron.pretrain.log.timelines import write_timelines
from megatron.pretrain.process.parallel import Parallel
from schedules import Shape, build
from tests.simulate.test_copying import leaving
from tests.training.helpers import config

COSTS = PieceTimes({"qkv": 1, "attn": 3, "mlp": 2}, copy=8.0)


def stepped(copies: bool = True) -> tuple[LoweredProgram, Simulation, list[Record]]:
    """A step that took exactly what is simulated with `COSTS`, of two ranks, and what its ranks recorded."""
    program = build("1f1b", Shape(2, 4, 4))
    lowered = lower(leaving(program, ahead=1) if copies else program, COSTS)
    simulation = simulate(lowered, COSTS)
    records = [Record(held_up=held_up) for held_up in simulation.held_up]
    for event in simulation.timeline.ops:
        records[event.rank].ops.append((event.op, event.start, event.end))
    for transfer, copy in zip(lowered.graph.copies, simulation.timeline.copies, strict=True):
        records[copy.source].copies[lowered.graph.task(transfer)] = copy.start, copy.end
    return lowered, simulation, records


def test_a_step_as_predicted_hides_what_is_predicted() -> None:
    lowered, simulation, records = stepped()
    step = recorded_step(lowered, records)
    assert 0 < simulation.hidden < 1
    assert step.hidden == pytest.approx(simulation.hidden) and step.simulated_hidden == pytest.approx(simulation.hidden)
    assert step.simulated.makespan == pytest.approx(step.measured.makespan) == simulation.makespan
    assert sum(step.simulated.copy_time()) == pytest.approx(sum(step.measured.copy_time()))
    records[1] = replace(records[1], held_up=records[1].held_up + sum(simulation.copy_time) / 10)
    late = recorded_step(lowered, records)
    assert late.hidden == pytest.approx(simulation.hidden - 0.1) and late.simulated_hidden == step.simulated_hidden


def test_a_step_of_unlike_documents_is_simulated_with_the_times_of_each() -> None:
    rows = Workload((((Slice(0, 0, 9),),), ((Slice(1, 0, 1),),), ((Slice(2, 0, 4),), (Slice(2, 4, 2), Slice(3, 0, 1)))))
    lowered = lower(build("seq1f1b", Shape(2, 3, 4, ragged=rows)), COSTS)
    simulation = simulate(lowered, COSTS)
    records = [Record(held_up=held_up) for held_up in simulation.held_up]
    for event in simulation.timeline.ops:
        records[event.rank].ops.append((event.op, event.start, event.end))
    step = recorded_step(lowered, records)
    took, found = (
        {event.op: event.end - event.start for event in timeline.ops}
        for timeline in (simulation.timeline, step.simulated)
    )
    assert found == pytest.approx(took)


@pytest.mark.parametrize("copies", [True, False])
def test_the_run_says_it_where_something_is_copied(
    copies: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lowered, simulation, records = stepped(copies)
    parallel = cast(Parallel, SimpleNamespace(pp_rank=0, tp_rank=0, cp_rank=0, dp_rank=0))
    flags = f"--record-timeline {tmp_path / 'x.json'} --micro-batch-size 1 --global-batch-size 1"
    write_timelines(config(flags), parallel, recorded_step(lowered, records))
    hidden = f"{simulation.hidden:.1%}"
    line = (
        f"copies to the host and back: {hidden} of their time hidden behind ops "
        f"(simulated from the step's own times: {hidden})\n"
    )
    assert capsys.readouterr().out == (line if copies else "")
    saved: dict[str, Any] = json.loads((tmp_path / "x.json").read_text())
    assert sum(kind in ("offload", "fetch") for kind, *_ in saved["transfers"]) == len(lowered.graph.copies)
