"""The training program on the fake device: every rank of jobs of all schedules and options comes through two steps.

No tensor is on the wrong device, none that NCCL would refuse is sent, the host waits for the device only where it is
meant to, and what the ranks ask each other for matches.
"""

from __future__ import annotations

import pytest

from benchmarks.fake_jobs import Job, Ran, run
from tests.fake_cuda.cases import CORE, MORE


@pytest.fixture(scope="module")
def core() -> dict[str, Ran]:
    """The jobs of the core, run in one process."""
    return run(CORE)


@pytest.mark.parametrize("name", [job.name for job in CORE])
def test_job_of_the_core(core: dict[str, Ran], name: str) -> None:
    ran = core[name]
    ran.check()
    for report in ran.reports:
        assert report.predicted is not None
        assert report.steps[-1].peak == pytest.approx(report.predicted.total, rel=0.15)


@pytest.mark.thorough
@pytest.mark.parametrize("job", MORE, ids=lambda job: job.name)
def test_job(job: Job) -> None:
    run([job])[job.name].check()
