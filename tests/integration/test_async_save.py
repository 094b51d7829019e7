"""Runs with --async-save: the same losses and tensors as without, complete whenever and however they end."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.integration.forked import Forked, run_forked
from tests.integration.launching import MOCK, Launch, Result
from tests.integration.tensors import assert_same_tensors

P2 = "--pipeline-model-parallel-size 2"
HOW = {
    "seq1f1b": f"{P2} --pipeline-schedule seq1f1b --pipe-sp-splits 2",
    "helix": f"{P2} --pipeline-schedule helix",
    "parts of weights": "--data-parallel-sharding-strategy optim_grads_params",
}


def saved(result: Result) -> list[int]:
    """The iterations of which it is said that they are there."""
    return [
        int(each) for each in re.findall(r"  successfully saved checkpoint from iteration +(\d+) to", result.output)
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("how", list(HOW))
def test_it_changes_no_loss_and_no_bit_of_what_is_saved(how: str, tmp_path: Path) -> None:
    flags = f"{MOCK} {HOW[how]} --train-iters 8 --save-interval 2"
    at_once = run_forked(Launch("at once", f"{flags} --save {tmp_path}/once")).done()
    beside = f"{flags} --async-save --save {tmp_path}/beside --load {tmp_path}/beside"
    stopped = run_forked(Launch("stopped", f"{beside} --exit-interval 5")).done()
    resumed = run_forked(Launch("resumed", beside)).done()
    assert saved(stopped) == [2, 4, 5] and saved(resumed) == [6, 8] and saved(at_once) == [2, 4, 6, 8]
    assert stopped.output.count("  scheduled an async checkpoint save at iteration ") == 3
    assert "scheduled" not in at_once.output and "WARNING" not in stopped.output + resumed.output
    assert stopped.losses() | resumed.losses() == at_once.losses()
    for iteration in saved(at_once):
        assert_same_tensors(tmp_path / "beside", tmp_path / "once", iteration)
    assert (tmp_path / "beside" / "latest_checkpointed_iteration.txt").read_text() == "8"
    assert not list((tmp_path / "beside").glob(".*"))


def test_sigterm_ends_the_run_when_the_checkpoint_is_there(tmp_path: Path) -> None:
    flags = f"{MOCK} {P2} --train-iters 100000 --async-save --save {tmp_path} --load {tmp_path}"
    job = Forked(Launch("stopped by SIGTERM", flags))
    job.wait_for("iteration        3/")
    os.kill(job.rank(1), signal.SIGTERM)
    result = job.wait().done()
    assert "exiting program after receiving SIGTERM." in result.output
    assert saved(result) == [max(result.losses())]


def test_a_failure_keeps_what_was_scheduled_before_it(tmp_path: Path) -> None:
    flags = f"{MOCK} {P2} --train-iters 30 --clip-grad 0 --async-save --save-interval 1 --save {tmp_path}"
    result = run_forked(Launch("diverges", flags.replace("--lr 1e-2", "--lr 1e30")))
    assert " is nan at iteration " in result.sentence() or " is inf at iteration " in result.sentence()
    assert saved(result) and saved(result)[-1] == max(result.losses())
    assert int((tmp_path / "latest_checkpointed_iteration.txt").read_text()) == saved(result)[-1]
    assert not list(tmp_path.glob(".*"))
