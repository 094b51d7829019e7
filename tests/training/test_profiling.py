"""--profile starts and stops where Megatron-LM does, and its trace has the ranges of ops."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.pretrain.log.profiling import Profiler
from tests.training.helpers import config

FLAGS = "--profile --profile-step-start 2 --profile-step-end 4"


def iterations(flags: str, done: int = 0, rank: int = 0, tensorboard: str = "none") -> None:
    """Six iterations, each with an op of its number."""
    with Profiler(config(f"{flags} --tensorboard-dir {tensorboard}"), rank, done) as profiler:
        for iteration in range(done + 1, 7):
            with torch.autograd.profiler.record_function(f"PP:0F{iteration}"):
                pass
            profiler.after(iteration)


def ops_of(trace: Path) -> list[str]:
    with gzip.open(trace) as file:
        names = {event.get("name", "") for event in json.load(file)["traceEvents"]}
    return sorted(name for name in names if name.startswith("PP:"))


def test_a_trace_has_the_ops_of_the_iterations_asked_for(tmp_path: Path) -> None:
    iterations(FLAGS, tensorboard=str(tmp_path))
    assert ops_of(tmp_path / "trace-rank0.json.gz") == ["PP:0F3", "PP:0F4"]


@pytest.mark.parametrize(
    ("flags", "done", "rank", "expected"),
    [
        (FLAGS, 2, 0, ["PP:0F3", "PP:0F4"]),  # resumed right there
        (FLAGS, 3, 0, None),  # resumed behind it
        (FLAGS, 0, 1, None),  # another rank
        (FLAGS.replace("--profile ", ""), 0, 0, None),
        ("--profile --profile-step-start 0 --profile-step-end 1", 0, 0, ["PP:0F1"]),
        ("--profile --profile-step-start 5 --profile-step-end 9", 0, 0, ["PP:0F6"]),  # cut short by the end
    ],
)
def test_which_iterations_and_ranks(
    tmp_path: Path, flags: str, done: int, rank: int, expected: list[str] | None
) -> None:
    iterations(flags, done, rank, str(tmp_path))
    trace = tmp_path / f"trace-rank{rank}.json.gz"
    assert trace.exists() == (expected is not None)
    assert expected is None or ops_of(trace) == expected


def test_nsys_is_told_around_the_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """With CUDA and without --use-pytorch-profiler."""
    calls: list[str] = []

    class Ranges:
        def __init__(self, record_shapes: bool) -> None: ...

        def __enter__(self) -> None:
            calls.append("ranges")

        def __exit__(self, *error: Any) -> None:
            calls.append("no ranges")

    class Range:
        def __init__(self, name: str) -> None:
            calls.append(name)

        def __enter__(self) -> None: ...

        def __exit__(self, *error: Any) -> None: ...

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: calls.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: calls.append("stop"))
    monkeypatch.setattr(torch.autograd.profiler, "emit_nvtx", Ranges)
    monkeypatch.setattr(torch.autograd.profiler, "record_function", Range)
    iterations(FLAGS)
    assert calls == [
        "PP:0F1", "PP:0F2", "start", "ranges", "PP:0F3", "PP:0F4", "no ranges", "stop", "PP:0F5", "PP:0F6",
    ]  # fmt: skip
