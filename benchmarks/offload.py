"""Steps whose activations wait in the host's memory, beside recomputation and beside no limit.

    make bench-offload ARGS="[--rounds 7] [--bandwidth 1.5] [--part 0.6] [--json out.json]"

`helixpipe profile` measures the model on this machine. Under each schedule two ranks run a step in three ways: all
activations are kept; every layer is recomputed; and what `--offload-activations auto` chooses under a memory limit that
lies --part of the way from what weights and optimizer take to what the first way needs. Copies are made by the CPU's
engine, no faster than --bandwidth (GB/s in each direction): a link that is emulated, and copies that take the time of
the cores which compute. Steps of all ways follow each other in turn; ratios are medians of steps of one round. A step
is forward and backward, no optimizer.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch.distributed as dist

from benchmarks.profiled import ProfiledSteps, every_rank
from benchmarks.ranks import on_ranks, run_module
from benchmarks.report import Figures, Outcome
from benchmarks.rounds import quartiles, ratios, turns
from helixpipe.common.flags import option
from helixpipe.costs.profile_costs import CopyTimes, Profile, ProfileCosts
from helixpipe.draw.table import right_aligned
from helixpipe.model.device import device
from helixpipe.planning.memory.offload import OffloadOptions
from helixpipe.planning.memory.offload_choice import MemoryLimits, OffloadedProgram, choose
from helixpipe.planning.memory.recompute import RecomputeOptions
from helixpipe.profile.subject import initialize_parallel_state
from helixpipe.runtime.copies import ThreadEngine
from helixpipe.runtime.offload import Offloader
from helixpipe.runtime.transport import make_transport
from schedules import Shape, build

RANKS = 2
MODEL = "--num-layers 4 --hidden-size 192 --num-attention-heads 4 --ffn-hidden-size 512 --vocab-size 512 --swiglu"
MODEL += " --normalization RMSNorm --disable-bias-linear --position-embedding-type rope"
MODEL += " --untie-embeddings-and-output-weights --seq-length 2304 --micro-batch-size 1"
SCHEDULES = MappingProxyType({"gpipe": (8, 1), "1f1b": (4, 1), "seq1f1b": (4, 4), "sppo": (1, 8)})
"""With their microbatches and chunks of a sequence."""


@dataclass(frozen=True)
class Options(Figures):
    rounds: int = option(7, "Rounds that count.", at_least=2)
    bandwidth: float = option(1.5, "GB/s that a copy takes at most.", more_than=0)
    part: float = option(0.6, "Of what is kept without a limit, that may be.", more_than=0, at_most=1)
    schedules: tuple[str, ...] = option(tuple(SCHEDULES), "Which schedules.", choices=tuple(SCHEDULES))


def run(options: Options) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        profile = str(Path(folder, "profile.json"))
        run_module("schedules.command", "profile", "--output", profile, *MODEL.split())
        call = (profile, options.rounds, options.bandwidth * 1e9, options.part, options.schedules)
        result = on_ranks("benchmarks.offload:measure", *call, ranks=RANKS)
    return Outcome(report(result, options), figures=result)


def report(result: Mapping[str, Any], options: Options) -> str:
    """Times over the step that keeps all, memory of activations and messages of the fullest rank."""
    title = f"{MODEL}; p = {RANKS}, copies at {options.bandwidth} GB/s, limit at {options.part} of what is kept"
    heads = ["schedule", "way", "predicted", "measured", "quartiles", "MB", "moved MB", "hidden, predicted", "measured"]
    lines = [
        (schedule, way, *_cells(way, row, rows["kept"]))
        for schedule, rows in result.items()
        for way, row in rows.items()
    ]
    heads.append("recomputed, offloaded")
    return "\n".join([title, *right_aligned(heads, lines, [0] * len(heads))])


def _cells(way: str, row: Mapping[str, Any], kept: Mapping[str, Any]) -> list[str]:
    over = ratios(row["seconds"], kept["seconds"])
    low, high = quartiles(over)
    times = [f"{row['predicted'] / kept['predicted']:.3f}", f"{statistics.median(over):.3f}", f"{low:.3f}–{high:.3f}"]
    if way != "offloaded":
        return [*times, f"{row['bytes'] / 1e6:.1f}", "", "", "", ""]
    hidden = statistics.median(row["hidden"]) if row["hidden"] else 1.0
    sizes = [f"{row['bytes'] / 1e6:.1f}", f"{row['moved'] / 1e6:.1f}", f"{row['predicted_hidden']:.1%}"]
    return [*times, *sizes, f"{hidden:.1%}", f"{row['recomputed']} of {row['layers']} layers, {row['units']} units"]


# ---------------------------------------------------------------------------------------------- what each rank runs


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


def measure(path: str, rounds: int, bandwidth: float, part: float, schedules: Sequence[str]) -> dict[str, Any]:
    """On each rank: by schedule and way what was predicted and measured."""
    dist.init_process_group("gloo")
    initialize_parallel_state(RANKS)
    rank, speed = dist.get_rank(), (bandwidth, bandwidth)
    profile = replace(Profile.load(path), copies=CopyTimes(0.0, speed, speed))
    costs = ProfileCosts(profile)
    assert dist.group.WORLD is not None
    transport = make_transport(dist.group.WORLD, device())
    result: dict[str, Any] = {}
    for schedule in schedules:
        ways = Ways(schedule, costs, bandwidth, part)
        rows = result[schedule] = {name: ways.row(name) for name in ways.choices}
        offloader = Offloader(ThreadEngine(bandwidth))
        steps = ProfiledSteps(profile, ways.choices["kept"].program, transport, 1, rank, offloader=offloader)
        for number, name in turns(rows, 1 + rounds):  # the first warms up
            seconds, hidden = timed(steps, ways.choices[name])
            if number:
                rows[name]["seconds"].append(seconds)
                rows[name]["hidden"] += [hidden] if hidden is not None else []
    transport.close()
    return result


def timed(steps: ProfiledSteps, choice: OffloadedProgram) -> tuple[float, float | None]:
    """Seconds of a step over both ranks, and the share of its copies' time that ops did not wait for."""
    (own,), record = steps.run(choice.simulation.lowered, record=True)
    assert record is not None
    copying = sum(end - begin for begin, end in record.copies.values())
    seconds, copied, held_up = zip(*every_rank((own, copying, record.held_up)), strict=True)
    return max(seconds), max(0.0, 1 - sum(held_up) / sum(copied)) if sum(copied) else None
