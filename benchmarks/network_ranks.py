"""What each of network.py's ranks runs: every engine's step in turn, timed, with the bytes it sent.

python network_ranks.py OUTPUT ROUNDS ENGINES SIZE...     (under torch.distributed.run; ENGINES and a SIZE with commas)

An engine is a schedule's name, `fsdp2` or `fsdp2-once` (see fsdp.py); the first must be a schedule. Two ranks.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.engines import Engine, OurEngine, Problem, start
from benchmarks.fsdp import FsdpEngine
from benchmarks.measure import gathered, gradient_differences, timed
from benchmarks.network_costs import VOCABULARY, is_fsdp


def engine(problem: Problem, name: str) -> Engine:
    if is_fsdp(name):
        return FsdpEngine(problem, once=name == "fsdp2-once")
    return OurEngine(problem, problem.program(name))


def sent_bytes() -> int:
    """Bytes that have left by this host's interface, headers among them; by loopback where there is no lab."""
    device = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    for line in Path("/proc/net/dev").read_text(encoding="utf-8").splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == device:
            return int(counters.split()[8])
    raise ValueError(f"no interface {device} in /proc/net/dev")


def compare(problem: Problem, names: list[str], rounds: int) -> dict[str, Any]:
    """Engines in turn, forwards and backwards through the list, `rounds` times. op_times: of each schedule, (kind,
    stage, chunk, seconds), recorded just before. sent: bytes a step from the rank that sent most."""
    every = {name: engine(problem, name) for name in names}
    differences = gradient_differences(every)  # also the warm-up
    times = {
        name: [[*key, seconds] for key, seconds in ours.op_times(steps=1).times.items()]
        for name, ours in every.items()
        if isinstance(ours, OurEngine)
    }
    rows: dict[str, Any] = {
        name: {"seconds": [], "sent": [], "gradient_difference": differences[name], "op_times": times.get(name)}
        for name in every
    }
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            before = sent_bytes()
            rows[name]["seconds"].append(timed(every[name]))
            rows[name]["sent"].append(sent_bytes() - before)
    for row in rows.values():
        row["sent"] = [max(counts) for counts in zip(*gathered(row["sent"]), strict=True)]
    return rows


def main() -> None:
    output, rounds, names, *sizes = sys.argv[1:]
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # of views; nothing is changed in place here
    shapes = [[int(value) for value in size.split(",")] for size in sizes]
    problem = start(shapes[0], VOCABULARY)
    results = [compare(problem, names.split(","), int(rounds))]
    for shape in shapes[1:]:
        torch.manual_seed(1)
        results.append(compare(Problem(shape, VOCABULARY), names.split(","), int(rounds)))
    if problem.rank == 0:
        Path(output).write_text(json.dumps(results), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
