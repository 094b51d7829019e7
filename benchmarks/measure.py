"""Runs on each of the two ranks of bench.py: every engine's step in turn, timed; its gradients; its memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.accounting import AliveBytes
from benchmarks.engines import Engine, OurEngine, Problem, start
from benchmarks.families import FAMILIES
from benchmarks.kept import peak_kept
from benchmarks.other_engines import torch_zbv
from benchmarks.profiled import every_rank
from benchmarks.rounds import in_turn, quartiles, ratios
from helixpipe.costs.hardware import HARDWARE
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import Layout, ModelShape
from helixpipe.lowering.lower import lower
from helixpipe.simulate.memory import rank_memory
from helixpipe.simulate.simulator import simulate


def measure(size: Sequence[int], pairs: int, rows: Sequence[str]) -> dict[str, Any]:
    """By row what is compared in it."""
    problem = start(size)
    return {row: memory(problem) if row == "memory" else compare(problem, row, pairs) for row in rows}


# -------------------------------------------------------------------------------------------------------------- speed


def compare(problem: Problem, family: str, pairs: int) -> dict[str, Any]:
    """Engines in turn, `pairs` times; ours are predicted just before."""
    every, compared = FAMILIES[family](problem)
    differences = gradient_differences(every)  # also the warm-up
    predicted = {name: prediction(engine) for name, engine in every.items() if isinstance(engine, OurEngine)}
    times = in_turn(every, pairs, lambda name: timed(every[name]))
    tokens = problem.count * problem.micro * problem.sequence
    rows = {
        name: {
            "tokens_per_second": tokens / statistics.median(times[name]),
            "seconds": times[name],
            "peak_bytes": every_rank(peak_alive(engine)),
            "gradient_difference": differences[name],
            "ours": predicted.get(name),
        }
        for name, engine in every.items()
    }
    speeds = []
    for mine, other in compared:
        values = ratios(times[other], times[mine])
        speed = {"ours": mine, "over": other, "ratio": statistics.median(values), "quartiles": quartiles(values)}
        if other in predicted:
            speed["predicted"] = predicted[other]["predicted_seconds"] / predicted[mine]["predicted_seconds"]
        speeds.append(speed)
    return {"engines": rows, "ratios": speeds}


def prediction(engine: OurEngine) -> dict[str, Any]:
    """A step simulated from what its ops take, with the sum over copies after it, and the time of each chunk over all
    stages; by rank what is kept at most, in microbatch-layers as simulated and in bytes as measured, and the bytes of
    the store of keys and values."""
    costs, program = engine.op_times(), engine.program
    simulation, sum_seconds = simulate(engine.lowered, costs), engine.sum_time()
    times = [0.0] * program.num_chunks
    for (_, _, chunk), seconds in costs.times.items():
        times[chunk] += seconds
    return {
        "predicted_seconds": simulation.makespan + sum_seconds,
        "simulated_seconds": simulation.makespan,
        "sum_seconds": sum_seconds,
        "chunk_lengths": program.chunk_lengths,
        "chunk_seconds": times,
        "kept_layers": simulation.peak_activation,
        "kept_bytes": every_rank(peak_saved(engine)),
        "keys_values_bytes": every_rank(engine.executor.keys_values.peak_bytes()),
    }


def timed(engine: Engine) -> float:
    """Seconds of one step over both ranks, from a common start to the later end."""
    engine.clear()
    dist.barrier()
    start = time.perf_counter()
    engine.step()
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def gradient_differences(every: dict[str, Engine]) -> dict[str, float]:
    """The largest of any gradient from those of the first engine, relative to the gradient's largest element; 0 means
    equal in every bit. Raises AssertionError beyond what another order of sums explains."""
    differences: dict[str, float] = {}
    expected: dict[str, Tensor] = {}
    for name, engine in every.items():
        timed(engine)
        ranks = every_rank(engine.gradients())
        gradients = {key: value for rank in ranks for key, value in rank.items()}
        expected = expected or gradients
        assert gradients.keys() == expected.keys(), f"{name}: {gradients.keys() ^ expected.keys()}"
        worst = max(
            float((value - expected[key]).abs().max() / expected[key].abs().max()) for key, value in gradients.items()
        )
        assert worst < 1e-5, f"{name}: gradients differ by {worst:.1e}"
        differences[name] = worst
    return differences


# ------------------------------------------------------------------------------------------------------------- memory


def peak_alive(engine: Engine) -> int:
    """Most bytes alive at once of what a step makes: activations, messages, gradients on their way."""
    engine.clear()
    with AliveBytes() as alive:
        engine.step()
    return alive.peak


def peak_saved(engine: Engine) -> int:
    """Most bytes kept at once for a backward; see `peak_kept`."""
    engine.clear()
    copies = (lambda: engine.executor.borrowed.copies) if isinstance(engine, OurEngine) else list
    return peak_kept(engine.step, engine.parameters.values(), copies)


def memory(problem: Problem) -> dict[str, Any]:
    """Peak bytes of activations of our schedules, by the cost model and measured."""
    config = problem.config
    model = ModelShape(
        name="bench", layers=problem.layers, hidden=config.hidden_size, heads=config.num_attention_heads,
        groups=config.num_query_groups, ffn=config.ffn_hidden_size, gated=True, vocab=problem.gpt.vocab_size,
        tied=False, norm="RMSNorm", positions="rope", bias=False, seq_length=problem.sequence,
    )  # fmt: skip
    layout = Layout(micro_batch_size=problem.micro, element_bytes=4, fused_kernels=False)
    costs = ModelCosts(model, HARDWARE["h20"], layout, problem.sequence)
    schedules = {"1f1b": None, "gpipe": None, "interleaved-1f1b": 2, "zb1p": None, "zbv": None, "zb-interleaved": 2}
    programs = {schedule: problem.program(schedule, virtual_stages=v) for schedule, v in schedules.items()}
    programs["torch's ZBV order"] = torch_zbv(problem)[1]
    result = {}
    for name, program in programs.items():
        lowered = lower(program)
        simulated = [rank_memory(lowered, costs, rank).activations for rank in range(2)]
        result[name] = {"simulated": simulated, "measured": every_rank(peak_saved(OurEngine(problem, program)))}
    return result
