"""The first hour on a GPU: its calls fit their time, and its training commands start on a device without one."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest

from benchmarks.gpu import CALL_MINUTES, CALLS, Step, dry_run, steps_on, training
from benchmarks.report import ROOT

STEPS = steps_on("gpu")
TRAINING = [step for step in STEPS if training(step) is not None]


def test_each_call_fits_its_time() -> None:
    minutes: dict[int, float] = defaultdict(float)
    for step in STEPS:
        minutes[step.call] += step.minutes
    assert sorted(minutes) == list(range(1, CALLS + 1))
    assert all(total <= CALL_MINUTES for total in minutes.values())


def test_ranks_that_share_a_gpu_talk_over_gloo() -> None:
    assert len(TRAINING) >= 4
    for step in TRAINING:
        ranks, flags = training(step) or (0, [])
        assert ("--distributed-backend gloo" in step.command) == (ranks > 1)
        assert not any("$" in flag for flag in flags)


@pytest.mark.thorough
@pytest.mark.parametrize("step", TRAINING, ids=lambda step: step.name)
def test_training_starts(step: object) -> None:
    outcome = dry_run([step])  # type: ignore[list-item]
    assert outcome.status == 0 and "would train" in outcome.text, outcome.text


PARSED = [step for step in STEPS if step not in TRAINING and "pytest" not in step.command]
COLLECTED = [step for step in STEPS if "pytest" in step.command]


def test_steps_that_do_not_train_have_flags_of_their_programs() -> None:
    assert {step.call for step in PARSED} == set(range(1, CALLS + 1))
    outcome = dry_run(PARSED)
    assert outcome.text.splitlines() == [f"{step.name}: would start" for step in PARSED] and outcome.status == 0


@pytest.mark.thorough
@pytest.mark.parametrize("step", COLLECTED, ids=lambda step: step.name)
def test_steps_of_tests_find_some(step: Step) -> None:
    before = set(ROOT.iterdir())
    assert dry_run([step]).text == f"{step.name}: would start"
    assert {path.name for path in set(ROOT.iterdir()) - before} <= {".pytest_cache"}  # once it left a folder here
    assert dry_run([replace(step, command=step.command + " -k no_such_test")]).status != 0


@pytest.mark.parametrize("step", [each for each in PARSED if "--" in each.command], ids=lambda step: step.name)
def test_a_mistake_in_a_step_that_does_not_train_is_told(step: Step) -> None:
    outcome = dry_run([replace(step, command=step.command + " --no-such-flag 4")])
    assert outcome.status != 0 and "--no-such-flag" in outcome.text


@pytest.mark.thorough
def test_a_mistake_in_a_command_is_told() -> None:
    wrong = replace(TRAINING[0], command=TRAINING[0].command + " --num-layer 4")
    outcome = dry_run([wrong])
    assert outcome.status != 0 and "--num-layer" in outcome.text
