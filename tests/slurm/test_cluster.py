"""The start and end of the SLURM that the other tests use."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.launching import ROOT
from tests.slurm.cluster import Cluster, unavailable, wait_until

pytestmark = pytest.mark.slurm

KILLED = """\
import os, pathlib, signal, sys
from tests.slurm.cluster import Cluster
Cluster(pathlib.Path(sys.argv[1])).__enter__()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_start_ends_what_a_killed_run_left(tmp_path: Path) -> None:
    if reason := unavailable():
        pytest.skip(reason)
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "killed"], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    left = [Path("/proc", file.read_text().strip()) for file in (tmp_path / "killed/pid").iterdir()]
    assert len(left) == 4 and all(process.exists() for process in left), "two slurmd, slurmctld and munged"
    with Cluster(tmp_path / "next"):
        wait_until(lambda: not any(process.exists() for process in left), lambda: f"still there: {left}")
