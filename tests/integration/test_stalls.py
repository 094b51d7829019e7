"""Runs that hang: one report on standard error, every rank ends by itself, and nothing is left behind."""

from __future__ import annotations

import os
import re
import signal

import pytest

from helixpipe.lowering.lower import lower
from helixpipe.planning.catalogue import Shape
from schedules import build
from tests.integration.forked import Forked
from tests.integration.launching import MOCK, Launch, Result

FAULTY = "tests/integration/faulty.py"


def report(result: Result) -> list[str]:
    """The lines of the one report of a failed launch."""
    assert result.status != 0, result.output
    said = re.findall(r"^\[Rank \d+\] (?!\(after)", result.output, re.MULTILINE)
    assert len(said) == 1, result.output  # nobody complains of what follows from the end
    _, _, text = result.output.partition("the job has stalled")
    text, end, _ = text.partition("What to do: docs/troubleshooting.md")
    assert end, result.output
    return text.splitlines()


@pytest.mark.thorough
def test_a_lost_message_is_named_and_the_job_ends() -> None:
    lowered = lower(build("1f1b", Shape(4, 8, 4)))
    lost = next(each for each in lowered.messages if str(each) == "gradient 2B5 -> 1B5 (rank 2 -> rank 1)")
    flags = f"{MOCK} --train-iters 100000 --stall-timeout-seconds 8 --pipeline-model-parallel-size 4"
    launch = Launch("lost message", flags, ranks=4, script=FAULTY)
    result = Forked(launch, FAULT=f"lose {lost.source} 3 {lost.number}").wait()
    assert set(result.losses()) == {1, 2}
    _, first, second, third, fourth, *rest = report(result)
    place = "forward-backward, iteration 3: waits"
    assert re.match(
        rf"  rank 0, {place} for the gradient of 1B5 from rank 1, to run 0B5 .* has not sent it yet$", first
    )
    assert re.match(rf"  rank 1, {place} for the gradient of 2B5 from rank 2, to run 1B5 .* has sent it$", second)
    assert third.startswith(f"  rank 2, {place} until all it has sent is received;")
    assert fourth.startswith("  rank 3, grads-reduce, iteration 3: in or before a collective;")
    assert rest[0] == "First cause:"
    assert rest[1].startswith("  message lost between rank 2 and rank 1: rank 2 has sent the gradient of 2B5, ")


@pytest.mark.thorough
def test_a_stopped_rank_is_silent() -> None:
    """The others end by themselves; such a rank is ended by torchrun."""
    flags = f"{MOCK} --train-iters 100000 --stall-timeout-seconds 8 --pipeline-model-parallel-size 2"
    job = Forked(Launch("stopped", flags))
    job.wait_for("iteration        3/")
    os.kill(job.rank(1), signal.SIGSTOP)
    assert job.wait_for_rank(0)
    os.kill(job.rank(1), signal.SIGKILL)
    lines = report(job.wait())
    assert lines[1].startswith("  rank 0, ")
    assert lines[2].startswith("  rank 1: silent")
    assert lines[3:5] == ["First cause:", f"{lines[2]}."]


@pytest.mark.thorough
def test_a_rank_that_is_slow_is_no_stall() -> None:
    """In each step rank 0 waits for longer than the limit, for a rank that gets on; then both evaluate."""
    flags = f"{MOCK} --global-batch-size 5 --train-iters 2 --eval-iters 1 --eval-interval 2 --pipeline-schedule gpipe"
    flags += " --pipeline-model-parallel-size 2 --stall-timeout-seconds 2"
    result = Forked(Launch("slow", flags, script=FAULTY), FAULT="slow 1 0.6").wait().done()
    assert len(result.losses()) == 2
