"""Goodput: the best time between checkpoints, what failures leave, and what `plan` says of it."""

from __future__ import annotations

from math import sqrt
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helixpipe.planning.search.goodput import GPU_HOURS, GoodputOptions, best_interval, goodput_of, useful_share
from tests.cli.commands import run, run_json


@given(st.floats(0.5, 300), st.floats(3600, 400_000), st.floats(0, 1800))
def test_no_other_interval_loses_less(checkpoint: float, failures: float, restart: float) -> None:
    best = best_interval(checkpoint, failures)
    share = useful_share(best, checkpoint, restart, failures)
    others = (useful_share(best * factor, checkpoint, restart, failures) for factor in (0.25, 0.5, 0.8, 1.25, 2, 4))
    assert max(others) <= share * (1 + 1e-4) and 0 < share < 1
    assert best == pytest.approx(sqrt(2 * checkpoint * failures), rel=0.15)  # Young's


def test_what_random_failures_leave() -> None:
    """The share is that of a run played out, failures in checkpoints and in restarts among them."""
    random, interval, checkpoint, restart, failures = Random(1), 900.0, 60.0, 300.0, 4000.0
    clock = done = 0.0
    next_failure = random.expovariate(1 / failures)
    while done < 4000:
        if clock + interval + checkpoint <= next_failure:
            clock, done = clock + interval + checkpoint, done + 1
            continue
        clock = next_failure
        next_failure = clock + random.expovariate(1 / failures)
        while next_failure < clock + restart:
            clock = next_failure
            next_failure = clock + random.expovariate(1 / failures)
        clock += restart
    assert useful_share(interval, checkpoint, restart, failures) == pytest.approx(done * interval / clock, rel=0.02)


def test_a_checkpoint_is_written_by_all_nodes() -> None:
    one = goodput_of(GoodputOptions(), 405e9, 16384, 2048)
    assert one.nbytes == 14 * 405e9 and one.checkpoint == pytest.approx(14 * 405 / 2048)
    assert one.failures == pytest.approx(3600 * GPU_HOURS / 16384) == pytest.approx(3600 * 54 * 24 / 419)
    slow = goodput_of(GoodputOptions(checkpoint_bandwidth=0.1), 405e9, 16384, 2048)
    given_hours = goodput_of(GoodputOptions(mtbf_hours=100, restart_minutes=1), 405e9, 16384, 2048)
    assert slow.checkpoint == pytest.approx(10 * one.checkpoint) and slow.share < one.share < given_hours.share
    assert given_hours.failures == 360_000


def test_plan_says_it_of_large_clusters(capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        "plan --model llama2-7b --seq-length 4096 --schedule 1f1b --tensor-parallel 2 --context-parallel 1 "
        "--pipeline-parallel 4 --jobs 1 --top 1"
    )
    large = run_json(capsys, f"{flags} --gpus 1024 --global-batch-size 1024 --mtbf-hours 10")
    assert large["goodput"]["failures"] == 36_000 and 0.8 < large["goodput"]["share"] < 1
    text = run(capsys, f"{flags} --gpus 1024 --global-batch-size 1024")
    assert "a failure every 49.5 hours" in text and "Goodput" in text
    assert "goodput" not in run_json(capsys, f"{flags} --gpus 8 --global-batch-size 8")
