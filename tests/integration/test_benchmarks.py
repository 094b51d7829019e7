"""The benchmarks run and their engines agree; their figures are not looked at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TINY = "4 32 4 2 48 256 1 2"  # layers, hidden, heads, groups, ffn, tokens, micro batch, microbatches


def test_every_row_on_a_tiny_model(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [
        str(ROOT / "benchmarks/measure.py"),
        str(output),
        "2",
        "1f1b,zero-bubble,memory,seq1f1b,helix",
        *TINY.split(),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(output.read_text(encoding="utf-8"))
    assert list(result) == ["1f1b", "zero-bubble", "memory", "seq1f1b", "helix"]
    for rows in ("1f1b", "zero-bubble", "seq1f1b", "helix"):
        assert max(row["gradient_difference"] for row in result[rows]["engines"].values()) < 1e-5


def test_published_setups(tmp_path: Path) -> None:
    output = tmp_path / "table.md"
    command = [sys.executable, str(ROOT / "benchmarks/setups.py"), "--output", str(output), "--jobs", "1"]
    command += ["--hardware", "h20", "--models", "1.3b", "--tokens", "4", "--nodes", "2"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr[-3000:]
    written = output.read_text(encoding="utf-8")
    assert written == done.stdout and "\nSimulated, not measured." in written
    (row,) = [line for line in written.splitlines() if line.startswith("| h20 | 1.3b | 4k | 2 |")]
    assert row.count("|") == 12 and row.count("**") == 6
    assert "- h20: 80% of 148 TFLOP/s in matrix products" in written
