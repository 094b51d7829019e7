"""The fake device refuses what CUDA refuses, tells of what the host waits for, and counts memory."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.fake_jobs import ROOT
from tests.model.log_sum_cases import CASES, LogSumCase


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    code = "from tests.fake_cuda import device_programs; device_programs.main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    (line,) = (
        (line for line in done.stdout.splitlines() if line.startswith("outcomes ")) if not done.returncode else [""]
    )
    assert line, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(line.removeprefix("outcomes "))
    return result


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("device", ["cuda:2", True, 2, "torch.cuda.FloatTensor"]),
        ("host scalar", "cuda:2"),
        ("view", True),
        ("storage", 128),
        ("time between events", True),
        ("training", ["cuda:2", "torch.bfloat16", [16, 8]]),
        ("memory", [4096, 4096, 0]),
        ("memory of a view", [0, 0, 0]),
        ("memory of a sum", [512, 1024, 0]),
        ("memory again", [512, 1024, 0]),
        ("memory resized", [0, 4096, 0]),
        ("memory of one kernel", [512, 512, 0]),
        ("memory after one kernel", [512, 512, 0]),
        ("whole storage", [96]),
        ("number", ["a number"]),
        ("branch", ["a number"]),
        ("list", ["a copy to the host"]),
        ("copy from locked memory", []),
        ("copy from pageable memory", ["a copy from memory that is not page-locked"]),
        ("waiting copy", ["a copy to the device"]),
        ("copy to locked memory", []),
        ("synchronize", ["the device"]),
        ("no wait", []),
        ("streams", [True, False]),
        ("attention", [1, 4, 64, 32]),
        ("attention of a chunk", [1 << 23, 1 << 25, 1 << 25]),
        ("random state", [16]),
        ("sum", ["all_reduce of 32 Float"]),
        ("exchange of splits", ["all_to_all_uneven of 32 Float: (32, 0, 0, 0), (8, 0, 24, 0)"]),
        ("unequal gather", ["all_gather_uneven of 32 Float: (32, 32, 32, 32), (32, 16, 0, 32)"]),
        ("unequal scatter", ["reduce_scatter_uneven of 32 Float: (32, 16, 0, 32), (32, 32, 32, 32)"]),
        ("message", ["send of 32 Float with its rank 3"]),
        ("messages together", ["start", "send of 32 Float with its rank 3", "recv of 32 Float with its rank 1", "end"]),
    ],
)
def test_what_a_device_does(outcomes: dict[str, Any], name: str, expected: object) -> None:
    assert outcomes[name] == expected


@pytest.mark.parametrize("case", CASES, ids=str)
def test_shapes_of_attention_with_log_sums(outcomes: dict[str, Any], case: LogSumCase) -> None:
    assert outcomes[f"log-sums {case}"] == case.shapes()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("host operand", "on the same device"),
        ("host scalar in a list", "on the same device"),
        ("other device", "cuda:2 and cuda:1"),
        ("wrong shape", "RuntimeError"),
        ("wrong dtype", "tensors of the same dtype, but got Float and BFloat16"),
        ("wrong sizes", "must have same reduction dim"),
        ("copy of another size", "does not fit"),
        ("view of a transposed", "not compatible"),
        ("too much memory", "OutOfMemoryError: CUDA out of memory"),
        ("sum of the host's", "No backend type associated with device type cpu"),
        ("sum of a transposed", "must be contiguous"),
        ("gather of another size", "is not 4 times"),
        ("gather of another dtype", "identical type"),
        ("scatter of another size", "is not 4 times"),
        ("exchange of rows that do not divide", "do not divide by 4"),
        ("exchange of splits of too few rows", "are not those of 4 rows"),
        ("message of a part", "must be contiguous"),
        ("message of another device", "current device is 2"),
    ],
)
def test_what_a_device_refuses(outcomes: dict[str, Any], name: str, words: str) -> None:
    assert "Error: " in str(outcomes[name])
    assert words in outcomes[name]
