"""What each of offload.py's two ranks runs.

python offload_ranks.py PROFILE OUTPUT ROUNDS BANDWIDTH PART SCHEDULES   (under torch.distributed.run)
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.offload import SCHEDULES
from helixpipe.costs.profile_costs import CopyTimes, Profile, ProfileCosts
from helixpipe.model import Microbatch
from helixpipe.model.device import device
from helixpipe.planning.memory.offload import OffloadOptions
from helixpipe.planning.memory.offload_choice import MemoryLimits, OffloadedProgram, choose
from helixpipe.planning.memory.recompute import RecomputeOptions
from helixpipe.profile.subject import Task, build_model, initialize_parallel_state
from helixpipe.runtime.copies import ThreadEngine
from helixpipe.runtime.executor import Executor, Step
from helixpipe.runtime.offload import Offloader
from helixpipe.runtime.transport import make_transport
from schedules import Shape, build

RANKS = 2


class Ways:
    """The three programs of a schedule, and what runs them."""

    def __init__(self, schedule: str, costs: ProfileCosts, bandwidth: float, part: float):
        microbatches, chunks = SCHEDULES[schedule]
        layers = costs.profile.model.layers
        shape = Shape(RANKS, microbatches, layers, chunks, costs=costs, offload=OffloadOptions("off"))
        kept = build(schedule, shape)
        recomputed = build(schedule, replace(shape, recompute=RecomputeOptions("full")))
        static = max(costs.static_memory(kept.pieces_of_rank(rank)) for rank in range(RANKS))
        most = max(OffloadedProgram(kept, costs, MemoryLimits(0.0), {}).needs)
        limits = MemoryLimits(static + part * (most - static))
        options = OffloadOptions("auto", min_offloaded_tensor_size=4096)
        programs = {"kept": kept, "recomputed": recomputed, "offloaded": choose(kept, options, costs, limits)}
        self.choices = {name: OffloadedProgram(program, costs, limits, {}) for name, program in programs.items()}
        self.microbatches = microbatches
        self.bandwidth = bandwidth

    def row(self, name: str) -> dict[str, Any]:
        choice = self.choices[name]
        simulation, program = choice.simulation, choice.program
        return {
            "predicted": simulation.makespan,
            "predicted_hidden": simulation.hidden,
            "bytes": max(peak.total for peak in simulation.peaks),
            "moved": sum(simulation.offloaded),
            "recomputed": len({run[0].layer for stage in program.stages for run in stage.recompute}),
            "layers": program.num_layers,
            "units": sum(bool(each.offload) for each in program.activations.values()),
            "seconds": [],
            "hidden": [],
        }


def main() -> None:
    path, output, rounds, bandwidth, part, schedules = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    initialize_parallel_state(RANKS)
    rank = dist.get_rank()
    speed = (float(bandwidth), float(bandwidth))
    profile = replace(Profile.load(path), copies=CopyTimes(0.0, speed, speed))
    costs = ProfileCosts(profile)
    assert dist.group.WORLD is not None
    transport = make_transport(dist.group.WORLD, device())
    task = Task(profile.model, profile.seq_length, 1, profile.dtype, processes=RANKS, threads=1, repeats=1)
    result: dict[str, Any] = {}
    for schedule in schedules.split(","):
        ways = Ways(schedule, costs, float(bandwidth), float(part))
        rows = result[schedule] = {name: ways.row(name) for name in ways.choices}
        pieces = ways.choices["kept"].program.pieces_of_rank(rank)
        model, ddp = build_model(task, profile.model.layers, pieces)
        executor = Executor(rank, model, transport, offloader=Offloader(ThreadEngine(float(bandwidth))))
        step = make_step(profile, ways.microbatches)
        for number in range(-1, int(rounds)):  # the first warms up
            names = list(rows) if number % 2 else list(reversed(rows))
            for name in names:
                ddp.zero_grad_buffer()
                seconds, hidden = timed(executor, ways.choices[name], step)
                if number >= 0:
                    rows[name]["seconds"].append(seconds)
                    rows[name]["hidden"] += [hidden] if hidden is not None else []
    if rank == 0:
        Path(output).write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()
    transport.close()
    dist.destroy_process_group()


def timed(executor: Executor, choice: OffloadedProgram, step: Step) -> tuple[float, float | None]:
    """Seconds of a step over both ranks, and the share of its copies' time that ops did not wait for."""
    dist.barrier()
    start = time.perf_counter()
    _, record = executor.run(choice.simulation.lowered, step, record=True)
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    copying = sum(end - begin for begin, end in record.copies.values())
    totals = torch.tensor([copying, record.held_up], dtype=torch.float64)
    dist.all_reduce(totals)
    return float(seconds), max(0.0, 1 - float(totals[1] / totals[0])) if totals[0] else None


def make_step(profile: Profile, microbatches: int) -> Step:
    shape = (microbatches, 1, profile.seq_length)
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(0, profile.model.vocab, shape, generator=generator) for _ in range(2))
    mask = torch.ones(shape[1:])
    scale = torch.tensor(1.0 / (profile.seq_length * microbatches))
    return Step(
        iteration=0,
        microbatch_number=lambda index: index,
        batch=lambda index: Microbatch(tokens[index], labels[index], mask),
        root_gradient=lambda index: scale,
        micro_batch_size=1,
        seq_length=profile.seq_length,
    )


if __name__ == "__main__":
    main()
