"""Jobs where SLURM tracks processes by cgroups and signals the first process of a step alone."""

from __future__ import annotations

import pytest

from tests.slurm.test_jobs import (
    _no_job_left,
    cluster,
    test_a_job_goes_back_to_the_queue_and_resumes_to_the_digit_until_it_is_cancelled,
)

__all__ = [
    "_no_job_left",
    "cluster",
    "test_a_job_goes_back_to_the_queue_and_resumes_to_the_digit_until_it_is_cancelled",
]

pytestmark = pytest.mark.slurm

PROCTRACK = "cgroup"
