"""The jobs of test_jobs.py where SLURM tracks processes by cgroups and signals the first process of a step alone."""

from __future__ import annotations

import pytest

from tests.slurm.test_jobs import (
    _no_job_left,
    cluster,
    test_a_cancelled_job_saves_and_stays_cancelled,
    test_a_host_on_which_ranks_fail_twice_is_left_out,
    test_a_job_near_its_time_limit_goes_back,
    test_a_job_resumes_to_the_digit_after_a_signal_and_a_power_cut,
    test_a_wrong_flag_ends_the_job_with_one_sentence,
    test_arrays_and_chains_and_sites_that_hand_on_nothing,
    test_srun_may_start_one_task_a_rank,
    undisturbed,
)

__all__ = [
    "_no_job_left",
    "cluster",
    "test_a_cancelled_job_saves_and_stays_cancelled",
    "test_a_host_on_which_ranks_fail_twice_is_left_out",
    "test_a_job_near_its_time_limit_goes_back",
    "test_a_job_resumes_to_the_digit_after_a_signal_and_a_power_cut",
    "test_a_wrong_flag_ends_the_job_with_one_sentence",
    "test_arrays_and_chains_and_sites_that_hand_on_nothing",
    "test_srun_may_start_one_task_a_rank",
    "undisturbed",
]

pytestmark = pytest.mark.slurm

PROCTRACK = "cgroup"
