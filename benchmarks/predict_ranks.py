"""Runs on each rank of predict.py: every way of a case in turn, predicted and measured."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from benchmarks.kept import peak_kept
from benchmarks.predict_cases import CASES, LEAST_ELEMENTS, WAYS, Case
from benchmarks.profiled import ProfiledSteps, every_rank
from helixpipe.costs.profile_costs import Profile, ProfileCosts
from helixpipe.lowering.lower import lower
from helixpipe.model.device import device
from helixpipe.planning.memory.offload import OffloadOptions
from helixpipe.planning.vocabulary.choice import VocabularyOptions
from helixpipe.profile.subject import initialize_parallel_state
from helixpipe.program.program import Program
from helixpipe.program.timeline import Timeline
from helixpipe.runtime.recording import merge_records
from helixpipe.runtime.transport import SingleRankTransport, Transport, make_transport
from helixpipe.simulate.simulator import simulate
from schedules import Shape, build

WARM_UP = 2

RECORDED = 3
"""Steps whose ops are timed, after those that count: marks take time as well."""


class Engine:
    """One way on this rank: its program, simulated, and what runs it."""

    def __init__(self, name: str, case: Case, costs: ProfileCosts, transport: Transport, recording: bool):
        self.recording = recording
        self.program = program_of(name, case, costs)
        self.lowered = lower(self.program, costs)
        self.simulation = simulate(self.lowered, costs)
        self.steps = ProfiledSteps(costs.profile, self.program, transport, case.micro, dist.get_rank())
        computing = min(torch.cuda.device_count() or os.cpu_count() or 1, case.ranks)
        self.row: dict[str, Any] = {
            "predicted": max(self.simulation.makespan, sum(self.simulation.busy) / computing),
            "predicted_busy": self.simulation.busy,
            "predicted_bytes": self.simulation.peak_activation,
            "seconds": [],
            "busy": [],
            "processor": [],
            "others": [],
        }

    def timed(self) -> None:
        """A step: its seconds over all ranks, from a common start to the last end; of each rank the processor time of
        its computing thread and of all its threads; and the share of all processors' time that others took."""
        own, _ = self.steps.run(self.lowered, (time.perf_counter, time.thread_time, time.process_time, processors_used))
        seconds, *busy, used = gathered(own)
        self.row["seconds"].append(max(seconds))
        for key, times in zip(("busy", "processor"), busy, strict=True):
            self.row[key].append(times)
        self.row["others"].append(max(used[0] - sum(busy[1]), 0.0) / max(seconds) / (os.cpu_count() or 1))

    def recorded(self) -> Timeline:
        """A step, op by op."""
        _, record = self.steps.run(self.lowered, record=True)
        return merge_records(self.lowered, every_rank(record), self.program.schedule)

    def finish(self) -> None:
        """After the steps that count: memory, and what became of each kind of op."""
        executor = self.steps.executor
        run = partial(executor.run, self.lowered, self.steps.step)
        kept = peak_kept(run, executor.model.parameters(), partial(getattr, executor.borrowed, "copies"))  # type: ignore[attr-defined]
        self.row["bytes"] = every_rank(kept)
        if self.recording:
            recorded = [self.recorded() for _ in range(RECORDED)]
            self.row["ops"] = compared(self.simulation.timeline, recorded)
            self.row["delays"] = [delays([self.simulation.timeline]), delays(recorded)]


def processors_used() -> float:
    """Seconds for which the processors of this machine have not been idle, since it started, where the system says."""
    try:
        words = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()
    except OSError:
        return 0.0
    user, nice, system, _, _, *others = (float(word) for word in words[1:9])
    return (user + nice + system + sum(others)) / os.sysconf("SC_CLK_TCK")


class Pace:
    """The pace of the machine, by what a rank computes alone, of whole sequences through the whole model, while the
    others do: how long it takes, over what the profile says, is the machine's pace. That changes, by 10 % within
    minutes where others use it too. On the CPU processor time, as in the profile."""

    def __init__(self, case: Case, costs: ProfileCosts):
        microbatches = max(case.microbatches // case.ranks, 1)
        program = build("none", Shape(1, microbatches, case.layers, costs=costs))
        self._lowered = lower(program, costs)
        self._predicted = simulate(self._lowered, costs).makespan
        self._steps = ProfiledSteps(costs.profile, program, SingleRankTransport(), case.micro, 0)

    def timed(self) -> float:
        clock = time.perf_counter if torch.cuda.is_available() else time.process_time
        own, _ = self._steps.run(self._lowered, (clock,))
        (seconds,) = gathered(own)
        return statistics.mean(seconds) / self._predicted


def gathered(values: Sequence[float]) -> list[list[float]]:
    """Of each value, those of all ranks."""
    return [list(each) for each in zip(*every_rank(list(values)), strict=True)]


def compared(simulated: Timeline, measured: Sequence[Timeline]) -> dict[str, Any]:
    """By rank, stage, kind and chunk of an op (`0: 1F c2`): how many there are, and their seconds predicted and
    measured (medians). A predicted op has its messages' share of the rank's time; a measured one has not."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for which, timeline in enumerate([simulated, *measured]):
        for rank, op, start, end in timeline.ops:
            key = f"{rank}: {op.stage}{op.kind} c{op.chunk}"
            found.setdefault(key, ([], []))[which > 0].append(end - start)
    return {
        key: {"count": len(own), "predicted": statistics.median(own), "measured": statistics.median(real)}
        for key, (own, real) in sorted(found.items())
    }


def delays(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """By kind of message, of those that a rank was idle for: how many a step, and the median of the seconds from the
    end of the op that made it to the start of the one that waited. Measured, that is also what sending and receiving
    takes of the ranks, which is part of simulated ops."""
    late: dict[str, list[float]] = {}
    for timeline in timelines:
        ends, before, starts = {}, {}, {}
        for rank in range(timeline.num_ranks):
            free = 0.0
            for event in sorted((each for each in timeline.ops if each.rank == rank), key=lambda each: each.start):
                before[event.op], starts[event.op], ends[event.op] = free, event.start, event.end
                free = event.end
        for message in timeline.messages:
            producer, consumer = message.producer, message.consumer
            if producer is not None and consumer is not None and before[consumer] < ends[producer]:
                late.setdefault(message.kind, []).append(starts[consumer] - ends[producer])
    return {
        kind: {"count": len(each) / len(timelines), "seconds": statistics.median(each), "most": max(each)}
        for kind, each in sorted(late.items())
    }


def program_of(name: str, case: Case, costs: ProfileCosts) -> Program:
    way = WAYS[name]
    offload = OffloadOptions(way.offload, min_offloaded_tensor_size=LEAST_ELEMENTS)
    shape = Shape(
        case.ranks,
        case.microbatches,
        case.layers,
        way.chunks,
        way.virtual_stages,
        costs=costs,
        offload=offload,
        vocabulary=VocabularyOptions(cast(Any, way.vocabulary)),
    )
    return build(way.schedule, shape)


def measure(name: str, path: str, steps: int, recording: bool, ways: Sequence[str]) -> dict[str, Any]:
    """On each rank: for each way seconds and bytes, predicted and measured."""
    case, gpus = CASES[name], torch.cuda.device_count()
    if gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % gpus)
    dist.init_process_group("nccl" if gpus >= case.ranks else "gloo")
    initialize_parallel_state(case.ranks)
    assert dist.group.WORLD is not None
    transport = make_transport(dist.group.WORLD, device())
    costs = ProfileCosts(Profile.load(path))
    engines = {way: Engine(way, case, costs, transport, recording) for way in ways}
    pace, paces = Pace(case, costs), []
    for number in range(WARM_UP + steps):
        for way in engines if number % 2 == 0 else reversed(engines):
            engines[way].timed()
        paces.append(pace.timed())
    for engine in engines.values():
        for key in ("seconds", "busy", "processor", "others"):
            del engine.row[key][:WARM_UP]
        engine.finish()
    transport.close()
    return {way: {**engine.row, "pace": paces[WARM_UP:]} for way, engine in engines.items()}
