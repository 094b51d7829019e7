"""An extension follows a run: what is called when, what is summed, and what users may get wrong."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.stop_on_spike import StopOnSpike
from helixpipe.common.errors import UserError
from megatron.pretrain.extension import StepAhead, StepOutcome, TrainerExtension, load_extensions
from tests.distributed import run_ranks
from tests.integration.launching import MOCK, Launch
from tests.resilience.jobs import newest
from tests.training.helpers import config
from tests.training.steps import Figures, Run, make_trainer, of_runs

STEPS = 3
RUNS = [
    Run("gpt", "--pipeline-schedule 1f1b", pp=2, steps=STEPS),
    Run("gpt", "--pipeline-schedule zb2p --enable-optimizer-post-validation", pp=4, steps=STEPS, clip=1e9),
]


class Diary(TrainerExtension):
    """Notes what is called. Its two numbers are 1 and the rank's number. It is its own observer of messages."""

    numbers = 2

    def begin(self, trainer: Any) -> None:
        self.rank, self.calls, self.sums, self.losses = trainer.parallel.rank, ["begin"], [], []
        self.sent = self.came = 0

    def ahead(self, step: StepAhead) -> None:
        self.calls.append(f"ahead {step.iteration}")

    def weights_ready(self) -> None:
        self.calls.append("weights_ready")

    def observer(self, lowered: Any) -> Any:
        return self

    def begin_step(self) -> None:
        self.sent = self.came = 0

    def receive(self, message: Any, tensors: Any) -> None:
        self.came += len(tensors)

    def send(self, message: Any, tensors: Any) -> None:
        self.sent += len(tensors)

    def take_losses(self, losses: Any) -> None:
        self.calls.append("lose")

    def wants_times(self, iteration: int, lowered: Any) -> bool:
        return iteration == STEPS

    def times(self, iteration: int, record: Any) -> None:
        self.calls.append(f"times {iteration} {bool(record.ops)}")

    def figures(self) -> torch.Tensor:
        return torch.tensor([1.0, self.rank], dtype=torch.float64)

    def outcome(self, outcome: StepOutcome) -> None:
        self.calls.append(f"outcome {outcome.iteration}")
        self.sums.append(list(outcome.sums))
        self.losses.append(outcome.loss)

    def complete(self, iteration: int) -> None:
        self.calls.append(f"complete {iteration}")


class Second(Diary):
    """Has one number, which follows those of the first."""

    numbers = 1

    def figures(self) -> torch.Tensor:
        return torch.tensor([100.0], dtype=torch.float64)


def diaries(rank: int, world_size: int, runs: list[Run]) -> list[tuple[Any, ...]]:
    def one(run: Run) -> tuple[Any, ...]:
        settings = run.config(rank, world_size)
        first, second = Diary(settings), Second(settings)
        trainer = make_trainer(settings, first, second)
        trainer.log = figures = Figures(0)  # type: ignore[assignment]
        for _ in range(STEPS):
            trainer._iteration(record=False)
        trainer.pipeline.close()
        return first.calls, first.sums, second.sums, first.losses, figures.losses, first.sent, first.came

    return of_runs(runs, one)


def test_hooks_are_called_in_order_and_their_numbers_are_summed_over_all_ranks() -> None:
    by_rank = run_ranks(diaries, 4, RUNS)
    for index, run in enumerate(RUNS):
        found = [each[index] for each in by_rank]
        for calls, sums, second, losses, printed, _, _ in found:
            assert sums == [[4.0, 6.0]] * STEPS and second == [[400.0]] * STEPS
            assert losses == printed and len(losses) == STEPS and not any(map(math.isnan, losses))
            assert calls == (IMMEDIATE if run is RUNS[0] else LATE)
        assert sum(each[5] for each in found) == sum(each[6] for each in found) > 0, "messages sent and received"


IMMEDIATE = [
    "begin",
    *("ahead 1", "weights_ready", "lose", "outcome 1", "complete 1"),
    *("ahead 2", "weights_ready", "lose", "outcome 2", "complete 2"),
    *("ahead 3", "weights_ready", "lose", "outcome 3", "complete 3", "times 3 True"),
]
LATE = [
    "begin",
    *("ahead 1", "weights_ready", "lose", "outcome 1", "complete 1"),  # the first norm is waited for
    *("ahead 2", "weights_ready", "lose"),
    *("ahead 3", "outcome 2", "complete 2", "weights_ready", "lose", "outcome 3", "complete 3", "times 3 True"),
]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("examples.no_such:Thing", r"cannot be loaded \(No module named 'examples.no_such'\); give MODULE:CLASS"),
        ("examples.stop_on_spike:Other", "has no attribute 'Other'"),
        ("examples.stop_on_spike", "give MODULE:CLASS"),
        (":Thing", "give MODULE:CLASS"),
        ("math:sqrt", "is no class derived from megatron.pretrain.extension.TrainerExtension"),
    ],
)
def test_a_name_that_is_none_is_refused_in_one_sentence(name: str, says: str) -> None:
    with pytest.raises(UserError, match=f"^--extension {name}.*{says}") as refused:
        load_extensions(config(f"--extension {name}"))
    assert "\n" not in str(refused.value)


def test_the_example_is_loaded_after_the_projects_own_and_stops_at_a_jump_of_the_loss() -> None:
    settings = config("--extension examples.stop_on_spike:StopOnSpike --check-every 5")
    *_, check, spike = load_extensions(settings)
    assert isinstance(spike, StopOnSpike) and type(check).__name__ == "CorruptionCheck"
    for iteration in range(1, 41):
        spike.outcome(StepOutcome(iteration, [], 2.0 + 0.5 * (iteration % 2), 1.0))
    with pytest.raises(UserError, match=r"the loss is 4.000 at iteration 41, 1.5 times"):
        spike.outcome(StepOutcome(41, [], 4.0, 1.0))


def test_an_extension_ends_a_run_with_one_sentence_after_the_checkpoint_that_was_due(tmp_path: Path) -> None:
    flags = f"{MOCK} --pipeline-model-parallel-size 2 --train-iters 6 --save {tmp_path}/run --save-interval 2"
    done = Launch("extension", f"{flags} --async-save --extension tests.resilience.stopping:Stop", 2).run()
    assert done.sentence() == "three steps are enough." and list(done.losses()) == [1, 2]
    assert newest(tmp_path / "run") == 2


def test_only_what_flags_ask_for_is_loaded() -> None:
    def names(flags: str, world: int = 1) -> list[str]:
        return [type(each).__name__ for each in load_extensions(config(flags, world=world))]

    assert names("") == [] == names("--pipeline-model-parallel-size 2 --watch-interval 0", world=2)
    assert names("--pipeline-model-parallel-size 2", world=2) == ["Watching"]
    assert names("--check-every 3") == ["CorruptionCheck"]
    assert names("--in-memory-checkpoint-interval 1 --global-batch-size 4") == ["HostSnapshots"]
