"""What each of bench.py's two ranks runs: every engine's step in turn, timed; its gradients; its memory.

python measure.py OUTPUT PAIRS ROWS SIZE...     (under torch.distributed.run; ROWS with commas between)
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.accounting import AliveBytes
from benchmarks.attention import helix
from benchmarks.chunks import seq1f1b
from benchmarks.empty import empty
from benchmarks.engines import Engine, OurEngine, Pairs, Problem, found, start
from benchmarks.kept import peak_kept
from benchmarks.other_engines import megatron_core, torch_1f1b, torch_interleaved, torch_zbv
from helixpipe.costs.hardware import HARDWARE
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import Layout, ModelShape
from helixpipe.lowering.lower import lower
from helixpipe.simulate.memory import rank_memory
from helixpipe.simulate.simulator import simulate


def one_f_one_b(problem: Problem) -> tuple[dict[str, Engine], Pairs]:
    every = {
        "ours, 1f1b": OurEngine(problem, problem.program("1f1b")),
        "megatron-core 1F1B, its GPTModel": megatron_core(problem, whole=True),
        "megatron-core 1F1B, our pieces": megatron_core(problem, whole=False),
        "torch Schedule1F1B": torch_1f1b(problem),
    }
    first, *others = every
    return every, [(first, other) for other in others]


def zero_bubble(problem: Problem) -> tuple[dict[str, Engine], Pairs]:
    """Ours are found from measured times; torch's orders run under torch and under our engine.

    torch splits a backward well only where linear layers are its own (see `engines.py`): so they are in two rows of it.
    """
    their_v, v = torch_zbv(problem)
    their_interleaved, interleaved = torch_interleaved(problem)
    every = {
        "ours, zbv": OurEngine(problem, found(problem, "zbv")),
        "ours, zb1p": OurEngine(problem, found(problem, "zb1p")),
        "ours, zb-interleaved": OurEngine(problem, found(problem, "zb-interleaved")),
        "ours, torch's ZBV order": OurEngine(problem, v),
        "ours, torch's InterleavedZeroBubble order": OurEngine(problem, interleaved),
        "torch ScheduleZBVZeroBubble": their_v,
        "torch ScheduleInterleavedZeroBubble": their_interleaved,
        "torch ScheduleZBVZeroBubble, Megatron's linear": torch_zbv(problem, plain=False)[0],
    }
    zbv, zb1p, interleaving, same_v, same_interleaved, other_v, other_interleaved, unsplit = every
    pairs = [(zbv, other_v), *((mine, other_interleaved) for mine in (zbv, zb1p, interleaving)), (zbv, unsplit)]
    engine_alone = [(same_v, other_v), (same_interleaved, other_interleaved)]
    return every, [*pairs, *engine_alone, (zbv, same_v)]


FAMILIES = {"empty": empty, "1f1b": one_f_one_b, "zero-bubble": zero_bubble, "seq1f1b": seq1f1b, "helix": helix}


# -------------------------------------------------------------------------------------------------------------- speed


def compare(problem: Problem, family: str, pairs: int) -> dict[str, Any]:
    """Engines in turn, forwards and backwards through the list, `pairs` times; ours are predicted just before."""
    every, compared = FAMILIES[family](problem)
    differences = gradient_differences(every)  # also the warm-up
    predicted = {name: prediction(engine) for name, engine in every.items() if isinstance(engine, OurEngine)}
    times: dict[str, list[float]] = {name: [] for name in every}
    for round_number in range(pairs):
        names = list(every)
        for name in names if round_number % 2 == 0 else reversed(names):
            times[name].append(timed(every[name]))
    tokens = problem.count * problem.micro * problem.sequence
    rows = {
        name: {
            "tokens_per_second": tokens / statistics.median(times[name]),
            "seconds": times[name],
            "peak_bytes": gathered(peak_alive(engine)),
            "gradient_difference": differences[name],
            "ours": predicted.get(name),
        }
        for name, engine in every.items()
    }
    ratios = []
    for mine, other in compared:
        values = [theirs / own for own, theirs in zip(times[mine], times[other], strict=True)]
        quartiles = statistics.quantiles(values, n=4)[::2]
        ratio = {"ours": mine, "over": other, "ratio": statistics.median(values), "quartiles": quartiles}
        if other in predicted:
            ratio["predicted"] = predicted[other]["predicted_seconds"] / predicted[mine]["predicted_seconds"]
        ratios.append(ratio)
    return {"engines": rows, "ratios": ratios}


def prediction(engine: OurEngine) -> dict[str, Any]:
    """A step simulated from what its ops take, and the time of each chunk over all stages; by rank what is kept at
    most, in microbatch-layers as simulated and in bytes as measured, and the bytes of the store of keys and values."""
    costs, program = engine.op_times(), engine.program
    simulation = simulate(engine.lowered, costs)
    times = [0.0] * program.num_chunks
    for (_, _, chunk), seconds in costs.times.items():
        times[chunk] += seconds
    return {
        "predicted_seconds": simulation.makespan,
        "chunk_lengths": program.chunk_lengths,
        "chunk_seconds": times,
        "kept_layers": simulation.peak_activation,
        "kept_bytes": gathered(peak_saved(engine)),
        "keys_values_bytes": gathered(engine.executor.keys_values.peak_bytes()),
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
        ranks = gathered(engine.gradients())
        gradients = {key: value for rank in ranks for key, value in rank.items()}
        expected = expected or gradients
        assert gradients.keys() == expected.keys(), f"{name}: {gradients.keys() ^ expected.keys()}"
        worst = max(
            float((value - expected[key]).abs().max() / expected[key].abs().max()) for key, value in gradients.items()
        )
        assert worst < 1e-5, f"{name}: gradients differ by {worst:.1e}"
        differences[name] = worst
    return differences


def gathered(value: Any) -> list[Any]:
    every: list[Any] = [None, None]
    dist.all_gather_object(every, value)
    return every


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
        result[name] = {"simulated": simulated, "measured": gathered(peak_saved(OurEngine(problem, program)))}
    return result


def main() -> None:
    output, pairs, rows, *size = sys.argv[1:]
    problem = start([int(value) for value in size])
    result: dict[str, Any] = {}
    for row in rows.split(","):
        result[row] = memory(problem) if row == "memory" else compare(problem, row, int(pairs))
    if problem.rank == 0:
        Path(output).write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
