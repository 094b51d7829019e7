"""megatron-core's compiled functions inside the pieces: equal dropout in F and R, and how often they are compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", params=["eager", pytest.param("inductor", marks=pytest.mark.thorough)])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process for all, by torch.compile's backend; compiling takes most of it."""
    cache = str(tmp_path_factory.mktemp("inductor"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": cache}
    command = [sys.executable, "-m", "tests.model.compiled", request.param]
    finished = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert finished.returncode == 0, finished.stderr
    result: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return result


def test_dropout_is_the_same_in_f_without_a_graph_and_in_r_with_one(found: dict[str, Any]) -> None:
    """Both are compiled, each by itself; each microbatch has masks of its own."""
    for first, second, apart in found["differences"]:
        assert first < 1e-6 and second < 1e-6
        assert apart > 1e-3
    assert all(0.5 < kept < 0.9 for kept in found["kept"])


def test_lengths_of_chunks_from_the_third_on_compile_nothing(found: dict[str, Any]) -> None:
    """Of dropout and activation, F and R, and of the activation's backward: one graph for the first length and one for
    all others."""
    first, second, *later = found["compiled"]
    assert first <= 5 and second <= 2 * first
    assert later == [second] * len(later)


def test_more_variants_than_torchs_limit_are_compiled(found: dict[str, Any]) -> None:
    """18 of one function that has some already: with torch's limit of 8 the rest would run op by op."""
    assert found["variants"] == found["asked"] == 18
