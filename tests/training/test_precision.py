"""float16 with loss scaling, and weight gradients that a kernel adds to their sum."""

from __future__ import annotations

import pytest

from tests.distributed import run_ranks
from tests.selection import graded, selected
from tests.training.precision import ITERATIONS, SPOILED, Steps, with_an_overflow, with_fused_weight_gradients
from tests.training.steps import Run

SCALING = "--fp16 --initial-loss-scale 1024 --hysteresis 1 --loss-scale-window 4 --min-loss-scale 256"
CATALOGUE = {
    "1f1b": "--pipeline-schedule 1f1b",
    "1f1b, distributed optimizer": "--pipeline-schedule 1f1b --use-distributed-optimizer",
    "zb1p": "--pipeline-schedule zb1p",
    "weipipe": "--pipeline-schedule weipipe",
}
SCALED = {name: Run("llama", f"{SCALING} {flags}", pp=2) for name, flags in CATALOGUE.items()}
SCALED["in parts"] = Run("llama", f"{SCALING} --data-parallel-sharding-strategy optim_grads_params")
CORE = ("1f1b, distributed optimizer",)
PLAIN = Run("llama", "--pipeline-schedule 1f1b", pp=2)

FUSED = [
    Run("gpt", "--pipeline-schedule 1f1b", pp=2),
    Run("llama", "--pipeline-schedule zb1p --chunk-size 6 --loss-chunk-size 5", pp=2),
    Run("llama", "--pipeline-schedule weipipe", pp=2),
    Run("gpt", "--pipeline-schedule helix --helix-ship qkv", pp=2),
    Run("llama", "--sequence-parallel", tp=2),
    Run("gpt", "--use-distributed-optimizer"),  # the tied head beside the embedding
]


@pytest.fixture(scope="module")
def overflows(request: pytest.FixtureRequest) -> dict[Run, list[Steps]]:
    """By run, of each rank."""
    runs = [*(SCALED[name] for name in selected(request, "schedule", list(SCALED))), PLAIN]
    by_rank = run_ranks(with_an_overflow, 2, runs, timeout=300.0)
    return {run: [steps[index] for steps in by_rank] for index, run in enumerate(runs)}


@pytest.mark.parametrize("schedule", graded(list(SCALED), CORE))
def test_an_overflow_on_one_rank_skips_the_step_on_all(schedule: str, overflows: dict[Run, list[Steps]]) -> None:
    for steps in overflows[SCALED[schedule]]:
        expected = [number == SPOILED for number in range(1, ITERATIONS + 1)]
        assert [result.skipped for result in steps.results] == expected
        assert [not moved for moved in steps.weights_moved] == expected


@pytest.mark.parametrize("schedule", graded(list(SCALED), CORE))
def test_the_scale_falls_with_an_overflow_and_grows_without(schedule: str, overflows: dict[Run, list[Steps]]) -> None:
    """It doubles after four good steps in a row."""
    for steps in overflows[SCALED[schedule]]:
        expected = [*[1024.0] * 3, 2048.0, *[1024.0] * 4, *[2048.0] * 4]
        assert [result.loss_scale for result in steps.results] == expected


@pytest.mark.parametrize("schedule", graded(list(SCALED), CORE))
def test_training_is_that_without_a_loss_scale(schedule: str, overflows: dict[Run, list[Steps]]) -> None:
    expected = overflows[PLAIN][0].losses
    assert expected[-1] < 0.8 * expected[0], "the model learns, so steps matter"
    for steps in overflows[SCALED[schedule]]:
        assert steps.losses == pytest.approx(expected, rel=2e-3)


@pytest.fixture(scope="module")
def fused(request: pytest.FixtureRequest) -> dict[Run, list[tuple[Steps, Steps, int]]]:
    runs = selected(request, "run", FUSED)
    by_rank = run_ranks(with_fused_weight_gradients, 2, runs, timeout=400.0)
    return {run: [found[index] for found in by_rank] for index, run in enumerate(runs)}


@pytest.mark.parametrize("run", graded(FUSED, FUSED[1:2]), ids=str)
def test_a_kernel_that_adds_weight_gradients_changes_no_loss(
    run: Run, fused: dict[Run, list[tuple[Steps, Steps, int]]]
) -> None:
    for plain, found, calls in fused[run]:
        assert calls > 0
        assert found.losses == pytest.approx(plain.losses, rel=1e-5)
        norms = [[float(result.grad_norm or 0.0) for result in steps.results] for steps in (found, plain)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5) and min(norms[0]) > 0
