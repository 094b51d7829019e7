"""What may differ between a checkpoint and the run that resumes from it."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from helixpipe.common.errors import CheckpointError
from megatron.pretrain.checkpoint import resumed
from megatron.pretrain.checkpoint.optimizer import convert, saved_steps
from megatron.pretrain.checkpoint.resumed import check_identities, load_scheduler

FOLDER = Path("saved/iter_0000001")


def scheduler(samples: int, **changes: Any) -> OptimizerParamScheduler:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    optimizer.param_groups[0].update(max_lr=1.0, min_lr=0.0)
    values: dict[str, Any] = {
        "init_lr": 0.0, "max_lr": 1.0, "min_lr": 0.0, "lr_warmup_steps": 0, "lr_decay_steps": samples,
        "lr_decay_style": "linear", "start_wd": 0.1, "end_wd": 0.1, "wd_incr_steps": samples,
        "wd_incr_style": "constant", "use_checkpoint_opt_param_scheduler": False,
    }  # fmt: skip
    return OptimizerParamScheduler(optimizer, **{**values, **changes})


def saved(samples: int = 100, at: int = 50, **arguments: Any) -> dict[str, Any]:
    made = scheduler(samples)
    made.step(at)
    return {"opt_param_scheduler": made.state_dict(), "args": Namespace(**arguments)}


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(resumed, "say", lines.append)
    return lines


@pytest.mark.parametrize(("samples", "word", "rate"), [(200, "longer", 0.75), (80, "shorter", 0.375)])
def test_another_length_of_training_just_works(said: list[str], samples: int, word: str, rate: float) -> None:
    now = scheduler(samples)
    load_scheduler(now, saved(), FOLDER, {"lr_decay_iters": None})
    assert now.num_steps == 50 and now.get_lr(now.optimizer.param_groups[0]) == pytest.approx(rate)
    (line,) = said
    assert f"training is {word}" in line and f"over {samples} samples instead of 100" in line
    assert f"from 5.000000E-01 to {rate:.6E}" in line


def test_the_same_length_needs_no_word(said: list[str]) -> None:
    load_scheduler(scheduler(100), saved(), FOLDER, {})
    assert said == []


@pytest.mark.parametrize(
    ("changes", "flags", "arguments"),
    [
        ({"max_lr": 2.0}, {}, {}),
        ({"lr_decay_style": "cosine"}, {}, {}),
        ({}, {"lr_decay_iters": 20}, {}),
        ({}, {"lr_decay_iters": 20}, {"lr_decay_iters": 20}),
        ({}, {}, {"global_batch_size": 3}),
        ({"lr_warmup_steps": 5}, {}, {}),
    ],
)
def test_other_differences_are_refused(
    said: list[str], changes: dict[str, Any], flags: dict[str, Any], arguments: dict[str, Any]
) -> None:
    with pytest.raises(CheckpointError, match=r"another learning-rate schedule .*--override-opt-param-scheduler"):
        load_scheduler(scheduler(200, **changes), saved(**arguments), FOLDER, flags)
    assert said == []


def test_the_checkpoints_rates_hold_from_the_first_step_on() -> None:
    before, now = (scheduler(100, max_lr=rate, use_checkpoint_opt_param_scheduler=True) for rate in (0.5, 1.0))
    before.optimizer.param_groups[0]["max_lr"] = 0.5
    before.step(50)
    common = {"opt_param_scheduler": before.state_dict(), "optimizer": before.optimizer.state_dict()}
    load_scheduler(now, common, FOLDER)
    (group,) = now.optimizer.param_groups
    assert group["max_lr"] == 0.5 and group["lr"] == pytest.approx(0.25)


def test_a_warm_up_that_is_a_share_grows_with_the_length(said: list[str]) -> None:
    common = saved(lr_warmup_fraction=0.1)
    now = scheduler(200, lr_warmup_steps=20)
    load_scheduler(now, common, FOLDER, {"lr_warmup_fraction": 0.1})
    assert now.lr_warmup_steps == 20 and len(said) == 1


STYLES = st.sampled_from(["constant", "linear", "cosine", "inverse-square-root"])


@given(STYLES, st.integers(0, 9), st.integers(10, 40), st.integers(0, 60), st.integers(0, 5), st.booleans())
def test_a_schedule_finds_its_place_in_any_checkpoint(
    style: str, warmup: int, decay: int, steps: int, skipped: int, counted_by_steps: bool
) -> None:
    """Whether schedule and optimizer, the schedule alone or neither was saved; steps without an update do not count."""
    flags: dict[str, Any] = {"max_tokens": 64, "global_batch_size": 4} if counted_by_steps else {}
    done = steps * 4 if counted_by_steps else steps
    changes: dict[str, Any] = {"lr_decay_style": style, "lr_warmup_steps": warmup, "max_lr": 1.0}
    before = scheduler(decay, **changes)
    before.step(done)
    args = Namespace(consumed_train_samples=steps + skipped, skipped_train_samples=skipped)
    bare = {"args": args, "iteration": steps}
    whole = {**bare, "opt_param_scheduler": before.state_dict()}
    unreadable = {**whole, "optimizer": {"param_groups": []}}
    for common in (bare, whole, unreadable, {**whole, "optimizer": before.optimizer.state_dict()}):
        for theirs in {False, common is not bare}:
            rate = 2.0 if theirs else 1.0
            now = scheduler(decay, **{**changes, "max_lr": rate, "use_checkpoint_opt_param_scheduler": theirs})
            now.optimizer.param_groups[0]["max_lr"] = rate
            with mock.patch.object(resumed, "say"):
                load_scheduler(now, common, FOLDER, flags)
            assert now.num_steps == done
            assert now.optimizer.param_groups[0]["lr"] == before.optimizer.param_groups[0]["lr"]


def test_without_the_flags_nothing_may_differ(said: list[str]) -> None:
    with pytest.raises(CheckpointError):
        load_scheduler(scheduler(200), saved(), FOLDER)


@pytest.mark.parametrize("what", ["tokenizer", "data"])
def test_other_data_or_another_tokenizer_is_refused_unless_wanted(what: str) -> None:
    identity, (name, *_) = resumed.IDENTITIES[what]
    before, now = {identity: "1", name: "before"}, {identity: "2", name: "now"}
    with pytest.raises(CheckpointError) as caught:
        check_identities(before, now, (), FOLDER)
    flag = "--" + name.replace("_", "-")
    assert f"trained with other {what} ({flag} before)" in str(caught.value)
    assert f"--resume-with-other {what}." in str(caught.value)
    with pytest.raises(CheckpointError, match="files of the same names"):
        check_identities({identity: "1"}, {identity: "2"}, (), FOLDER)
    check_identities(before, now, (what,), FOLDER)
    check_identities(before, {**before}, (), FOLDER)
    check_identities({}, now, (), FOLDER)  # another program's


@pytest.mark.parametrize(("saved", "handed_on"), [({}, {}), ({"scale": 8.0}, {"grad_scaler": {"scale": 8.0}})])
@pytest.mark.parametrize("old", ["half", "distributed"])
def test_a_loss_scale_is_resumed_where_it_has_adapted(
    saved: dict[str, float], handed_on: dict[str, Any], old: str
) -> None:
    state = {"optimizer": {"param_groups": [{"params": [0]}], "state": {}}, "grad_scaler": saved}
    common = {"optimizer": {"optimizer": {"param_groups": [{"step": 2}]}, "grad_scaler": saved}}
    result = convert(state, common, old, "half")
    assert "optimizer" in result and {name: result[name] for name in result if name != "optimizer"} == handed_on


@given(counts=st.lists(st.none() | st.integers(0, 3), min_size=1, max_size=4), common=st.none() | st.integers(0, 3))
def test_the_number_of_steps_is_read_in_any_layout_or_refused(counts: list[int | None], common: int | None) -> None:
    """Groups without a count are empty ones of FusedAdam; the smaller of two counts is of an optimizer replaced."""
    groups = [{} if count is None else {"step": torch.tensor([count])} for count in counts]
    inner: dict[str, Any] = {"param_groups": groups, "state": {}}
    if common is not None:
        inner["state"]["common_step"] = torch.tensor(float(common))
    told = {count for count in counts if count is not None}
    states: list[dict[Any, Any]] = [inner, {"optimizer": inner}, {0: {"optimizer": inner}, 1: {"optimizer": inner}}]
    for state in states:
        if len(told) > 1:
            with pytest.raises(CheckpointError, match=r"steps of Adam.*--no-load-optim"):
                saved_steps(state)
        else:
            assert saved_steps(state) == max(*told, common or 0, 0)
