"""Runs on each of network.py's ranks: every engine's step in turn, timed, with the bytes it sent."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.engines import Engine, OurEngine, Problem, start
from benchmarks.measure import gradient_differences, timed
from benchmarks.profiled import every_rank
from benchmarks.rounds import in_turn
from netlab.fsdp import FsdpEngine
from netlab.network_costs import VOCABULARY, is_fsdp


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


def compare(problem: Problem, names: Sequence[str], rounds: int) -> dict[str, Any]:
    """Engines in turn. op_times: of each schedule, (kind, stage, chunk, seconds), recorded just before. sent: bytes a
    step from the rank that sent most."""
    every = {name: engine(problem, name) for name in names}
    differences = gradient_differences(every)  # also the warm-up
    times = {
        name: [[*key, seconds] for key, seconds in ours.op_times(steps=1).times.items()]
        for name, ours in every.items()
        if isinstance(ours, OurEngine)
    }

    def step(name: str) -> tuple[float, int]:
        before = sent_bytes()
        return timed(every[name]), sent_bytes() - before

    rows = {}
    for name, found in in_turn(names, rounds, step).items():
        seconds, sent = zip(*found, strict=True)
        most = [max(counts) for counts in zip(*every_rank(sent), strict=True)]
        difference = {"gradient_difference": differences[name], "op_times": times.get(name)}
        rows[name] = {"seconds": seconds, "sent": most, **difference}
    return rows


def measure(shapes: Sequence[Sequence[int]], names: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """On each of two ranks, for each shape; by engine: a schedule's name, `fsdp2` or `fsdp2-once` (see fsdp.py). The
    first must be a schedule."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # of views; nothing is changed in place here
    problem = start(shapes[0], VOCABULARY)
    results = [compare(problem, names, rounds)]
    for shape in shapes[1:]:
        torch.manual_seed(1)
        results.append(compare(Problem(shape, VOCABULARY), names, rounds))
    return results
