"""NVIDIA's checkout, unmodified: its own 1F1B beside each schedule, checkpoints and data both ways."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.megatron_lm.cases import CHECKOUT, GROUPS, Group, Megatron, Steps, check_equal, going_on_from_2

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(not (CHECKOUT / "pretrain_gpt.py").is_file(), reason="MEGATRON_LM names no checkout"),
]
CASES = [(group, schedule) for group in GROUPS for schedule in group.schedules]
RESULTS: list[tuple[str, str, dict[int, tuple[str, str]]]] = []


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Megatron]:
    yield Megatron(tmp_path_factory.mktemp("megatron"))
    if path := os.environ.get("MEGATRON_RESULTS"):
        commit = ["git", "-C", str(CHECKOUT), "rev-parse", "HEAD"]
        done = subprocess.run(commit, capture_output=True, text=True, check=False)
        Path(path).write_text(json.dumps([done.stdout.strip() or "unknown", RESULTS]))


@pytest.mark.parametrize(("group", "schedule"), CASES, ids=[f"{group.name} {schedule}" for group, schedule in CASES])
def test_a_schedule_trains_as_nvidias_own(megatron: Megatron, group: Group, schedule: str) -> None:
    """Losses, gradient norms and evaluations, from weights and optimizer of a checkpoint of NVIDIA's."""
    theirs = megatron.theirs(group)
    ours = megatron.train(group, schedule, f"--load {megatron.start(group)}")
    if not any(name == group.name for name, _, _ in RESULTS):
        RESULTS.append((group.name, "", theirs.iterations))
    RESULTS.append((group.name, schedule, ours.iterations))
    check_equal(ours, theirs, group.loss)


def test_data_has_the_same_bytes(megatron: Megatron) -> None:
    for ending in ("bin", "idx"):
        theirs = megatron.folder / f"numbers_text_document.{ending}"
        assert theirs.read_bytes() == (megatron.folder / f"ours_text_document.{ending}").read_bytes()


GPT, SHARDED = (next(group for group in GROUPS if name in group.name) for name in ("GPT", "distributed optimizer"))


@pytest.mark.parametrize("group", [GPT, SHARDED], ids=lambda group: group.name)
def test_the_trainer_goes_on_from_nvidias_checkpoint_and_nvidia_from_its(megatron: Megatron, group: Group) -> None:
    """Weights and Adam's state, both ways."""
    theirs, saved = megatron.theirs(group), megatron.folder / f"ours_{group.ranks}"
    steps = f"--load {megatron.start(group)} --save {saved} --exit-interval 2"
    ours = megatron.train(group, "1f1b", steps, trainer=True)
    assert ours.iterations == {2: theirs.iterations[2]}
    again = megatron.train(group, None, f"--load {saved}")
    check_goes_on(again, theirs)


def check_goes_on(again: Steps, theirs: Steps) -> None:
    losses = {number: float(loss) for number, (loss, _) in again.iterations.items()}
    assert losses == pytest.approx(going_on_from_2(theirs), abs=2.1e-6)  # of printed digits
    assert [again.iterations[number][1] for number in (3, 4)] == [theirs.iterations[number][1] for number in (3, 4)]


def test_nvidia_goes_on_from_a_checkpoint_of_a_v_shape(megatron: Megatron) -> None:
    theirs, saved = megatron.theirs(GPT), megatron.folder / "of_a_v"
    flags = f"--load {megatron.start(GPT)} --save {saved} --exit-interval 2"
    megatron.train(GPT, "zbv --num-virtual-stages-per-pipeline-rank 2", flags)
    again = megatron.train(GPT, None, f"--load {saved}")
    check_goes_on(again, theirs)
