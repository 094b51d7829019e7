"""Batches that grow: at numbers of tokens, and by increments."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helixpipe.common.errors import UserError
from megatron.pretrain.step.microbatches import BatchSchedule, growth_of
from tests.training.helpers import config


@pytest.mark.parametrize("schedule", ["0:2 2K:4,4000:8", "4K:8 0:2 2000:4"])
def test_the_batch_grows_at_numbers_of_tokens(schedule: str) -> None:
    chosen = config(f"--seq-length 32 --step-batch-size-schedule {schedule.replace(' ', ',')}")
    grown = BatchSchedule.from_config(chosen)
    assert chosen.training.global_batch_size == 8 and grown.growth == ((0, 2), (62, 4), (125, 8))
    assert [grown.at(samples).samples for samples in (0, 61, 62, 124, 125, 10**9)] == [2, 2, 4, 4, 8, 8]
    assert grown.samples_after(33) == 62 + 2 * 4 and grown.iterations_within(70) == 33
    assert grown.step_sizes() == [1, 2, 4]


@given(start=st.integers(1, 4), increment=st.integers(1, 4), steps=st.integers(1, 5), ramp=st.integers(1, 200))
def test_a_rampup_has_megatron_lms_arithmetic(start: int, increment: int, steps: int, ramp: int) -> None:
    growth = growth_of(start + increment * steps, (start, increment, ramp), None, None)
    schedule, each = BatchSchedule(start + increment * steps, 1, growth=growth), ramp / steps
    for consumed in range(ramp + 2):
        size = start + int(consumed / each) * increment if consumed <= ramp else start + increment * steps
        assert schedule.at(consumed).samples == size


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--step-batch-size-schedule 0:2,1Q:4", "is not a list of TOKENS:SAMPLES"),
        ("--step-batch-size-schedule 768", "is not a list of TOKENS:SAMPLES"),
        ("--step-batch-size-schedule 1K:2", "must begin at 0 tokens"),
        ("--step-batch-size-schedule 0:2,31:4", "must begin at 0 tokens, with entries that are a sample apart or more"),
        (
            "--step-batch-size-schedule 0:3",
            "must have multiples of --micro-batch-size x data-parallel size = 2 samples",
        ),
        ("--step-batch-size-schedule 0:2 --global-batch-size 2", "stands in place of --global-batch-size"),
        ("--step-batch-size-schedule 0:2 --rampup-batch-size 2 2 4", "stands in place of --rampup-batch-size"),
    ],
)
def test_a_schedule_of_batches_that_cannot_be(flags: str, why: str) -> None:
    with pytest.raises(UserError, match=re.escape(why)):
        config(f"--seq-length 32 --micro-batch-size 2 {flags}")
