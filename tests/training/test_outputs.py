"""Where a run writes is tried before it trains; a checkpoint that cannot be written does not end it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helixpipe.common.errors import CheckpointError, LostSaveError, UserError
from megatron.pretrain.process.outputs import try_outputs
from megatron.pretrain.train import Trainer
from tests.training.helpers import config


@pytest.mark.parametrize(
    "flag", ["--save", "--tensorboard-dir", "--wandb-save-dir", "--record-timeline", "--timeline-png"]
)
def test_every_output_is_tried(tmp_path: Path, flag: str) -> None:
    (tmp_path / "file").touch()
    good, bad = (tmp_path / name / "out.png" for name in (".", "file"))
    try_outputs(config(f"{flag} {good}"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    with pytest.raises(UserError, match=f"{flag}: cannot write .*{bad}"):
        try_outputs(config(f"{flag} {bad}"))
    with pytest.raises(UserError, match="its name must end in"):
        try_outputs(config(f"--timeline-png {tmp_path / 'out'}"))


def test_the_folder_of_a_recorded_step_is_created(tmp_path: Path) -> None:
    try_outputs(config(f"--record-timeline {tmp_path}/a/b/step.json --timeline-png {tmp_path}/c/step.png"))
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == ["a", "a/b", "c"]


def trainer(failures: list[bool]) -> Any:
    """With a checkpointer that fails as often as said, and nothing else."""

    def save(*_: Any) -> None:
        if failures.pop(0):
            raise CheckpointError("--save here: No space left on device.")

    made: Any = object.__new__(Trainer)
    made.config = config("--save here --train-iters 3 --save-interval 1")
    made.checkpointer = SimpleNamespace(save=save, settle=lambda wait: None, writing=None)
    made.log = SimpleNamespace(paused=nullcontext)
    made.parallel = SimpleNamespace(is_first=True)
    made.progress = SimpleNamespace(iteration=7)
    made.feed = SimpleNamespace(has_valid=False, has_test=False)
    made.state = SimpleNamespace(model=None, optimizer=None)
    made.scheduler, made.not_saved, made.arguments = None, None, {}
    made.timed = lambda *_: nullcontext()
    return made


def test_a_failed_save_is_told_and_the_next_tried(capsys: pytest.CaptureFixture[str]) -> None:
    run = trainer([True, False])
    run._train = lambda: bool([run._save(), run._save()].count(0))
    run.run()
    told = capsys.readouterr().err
    assert told == "WARNING: iteration 7 was not saved: --save here: No space left on device.\n"


def test_a_run_whose_last_save_failed_ends_with_status_1() -> None:
    for stopped in (False, True):
        run = trainer([False, True])
        run._train = lambda run=run, stopped=stopped: [run._save(), run._save()] and stopped
        with pytest.raises(LostSaveError, match=r"the last checkpoint was not saved: .*No space left") as caught:
            run.run()
        assert caught.value.status == 1


def test_a_run_that_cannot_write_what_it_has_scheduled_ends_with_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    """Told as soon as it is known, or at the end; a later save that works makes up for it."""
    for failures, lost in (([True], True), ([True, False], False), ([False, True], True)):
        run = trainer([])
        Saver(run.checkpointer, failures)
        run._train = lambda run=run, saves=failures: bool([run._save() for _ in saves].count(0))
        with pytest.raises(LostSaveError) if lost else nullcontext():
            run.run()
        told = capsys.readouterr().err
        assert told == "WARNING: iteration 7 was not saved: --save here: No space left on device.\n"


class Saver:
    """Puts its methods in place of a checkpointer's: one that schedules, and fails later as often as said."""

    def __init__(self, checkpointer: Any, failures: list[bool]):
        self._checkpointer, self._failures = checkpointer, list(failures)
        checkpointer.save, checkpointer.settle = self.save, self.settle

    def save(self, progress: Any, *_: Any) -> None:
        assert self._checkpointer.writing is None, "one at a time"
        self._checkpointer.writing = progress.iteration

    def settle(self, wait: bool) -> None:
        if self._checkpointer.writing is not None:
            self._checkpointer.writing = None
            if self._failures.pop(0):
                raise CheckpointError("--save here: No space left on device.")


def test_a_run_that_fails_waits_for_what_it_has_scheduled() -> None:
    run = trainer([])
    Saver(run.checkpointer, [False])

    def train() -> bool:
        run._save()
        raise UserError("the loss is nan")

    run._train = train
    with pytest.raises(UserError, match="the loss is nan"):
        run.run()
    assert run.checkpointer.writing is None
