"""Twenty optimizer steps have the losses of plain megatron-core, whatever the schedule and the parallel sizes.

The norms of gradients and weights show in three steps what losses show in twenty, so three are run under every schedule
and layout, and twenty (`WHOLE`) with one run of each family."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.distributed import run_ranks
from tests.selection import first_of_each, graded, selected
from tests.training.steps import (
    COUNTED,
    STEPS,
    Expected,
    Figures,
    Run,
    figures_of_runs,
    reference,
    words_of_failures,
)

PER_TOKEN = "--calculate-per-token-loss"
DISTRIBUTED = "--use-distributed-optimizer"
ON_HOST = f"{DISTRIBUTED} --optimizer-cpu-offload"
SHARDED = "--data-parallel-sharding-strategy optim_grads_params"
SPLIT = "--pipeline-vocab-parallel split"
WHOLE = [
    Run("llama", f"--pipeline-schedule sppo --pipe-sp-splits 3 --sppo-multiplex both {DISTRIBUTED}", pp=2, batch=2),
    Run("gpt", f"--pipeline-schedule 1f1b {COUNTED}", pp=4),
    Run(
        "gpt",
        "--pipeline-schedule interleaved-1f1b --num-virtual-stages-per-pipeline-rank 2 "
        f"--microbatch-group-size-per-virtual-pipeline-stage 4 {DISTRIBUTED}",
        pp=2,
    ),
    Run("llama", f"--pipeline-schedule zb1p --recompute-granularity without-attention {DISTRIBUTED}", pp=2),
    Run("llama", f"--bf16 --sequence-parallel {ON_HOST} --optimizer-offload-fraction 0.6 {COUNTED}", tp=2),
    Run("llama", f"--pipeline-schedule helix --helix-ship qkv --helix-folds 1 --sequence-parallel {COUNTED}", 2, 2, 4),
    Run("gpt", f"--pipeline-schedule weipipe {DISTRIBUTED} {COUNTED}", pp=2),
    Run("gpt", f"{SHARDED} {COUNTED}"),
    Run("llama", f"{SHARDED} {PER_TOKEN} --pipeline-schedule seq1f1b --pipe-sp-splits 3 --chunk-alignment 1", pp=2),
    Run("gpt", f"--pipeline-schedule 1f1b {SPLIT} {COUNTED}", pp=4),
]
BRIEF = [
    Run("llama", f"--overlap-tp-comm halves --sequence-parallel {DISTRIBUTED} {COUNTED}", tp=2, pp=2, batch=4),
    Run("gpt", f"--overlap-tp-comm halves {SHARDED}", tp=2, batch=4),
    Run(
        "llama",
        f"--overlap-tp-comm halves --sequence-parallel --pipeline-schedule 1f1b {SPLIT} {COUNTED}",
        tp=2,
        pp=2,
        batch=4,
    ),
    Run("llama", "--pipeline-schedule gpipe --pipeline-model-parallel-layout E|tt|tt|L", pp=4),
    Run("llama", f"--pipeline-schedule 1f1b {COUNTED}", tp=2, pp=2, batch=4),
    Run("llama", "--sequence-parallel", tp=2, batch=4),
    Run("gpt", DISTRIBUTED),
    Run("gpt", "--pipeline-schedule 1f1b --recompute-granularity full", pp=2),
    Run("llama", f"--pipeline-schedule seq1f1b --pipe-sp-splits 3 --chunk-alignment 1 {DISTRIBUTED}", pp=2),
    Run("gpt", "--pipeline-schedule seq1f1b --pipe-sp-splits auto --pipe-sp-strategy average", pp=2),
    Run("gpt", "--pipeline-schedule sppo --pipe-sp-splits 4 --sppo-ahead 1 --kv-blocks", pp=2),
    Run("llama", "--pipeline-schedule infinipipe --pipe-sp-splits 2 --infinipipe-ahead 2", pp=2),
    Run("gpt", f"--pipeline-schedule zbv --pipe-sp-splits 3 --chunk-alignment 1 {DISTRIBUTED}", pp=2),
    Run("llama", f"{SHARDED} --pipeline-schedule helix --pipe-sp-splits 2", pp=2),
    Run("llama", f"--pipeline-schedule weipipe --pipe-sp-splits 2 --kv-blocks {DISTRIBUTED}", pp=2),
    Run("gpt", "--pipeline-schedule seq1f1b-zb --chunk-lengths 10,6 --sequence-parallel", tp=2, pp=2, batch=4),
    Run("llama", f"{PER_TOKEN} --pipeline-schedule 1f1b {DISTRIBUTED} {COUNTED}", pp=2),
    Run("llama", f"--bf16 --pipeline-schedule 1f1b {DISTRIBUTED} {COUNTED}", pp=2),
    Run("llama", "--bf16 --pipeline-schedule interleaved-1f1b --num-layers-per-virtual-pipeline-stage 1", 2, 2, 4),
    Run("llama", f"{PER_TOKEN} --pipeline-schedule helix --helix-ship none {COUNTED}", pp=4),
    Run("llama", f"--bf16 --pipeline-schedule helix {DISTRIBUTED} {COUNTED}", pp=2),
    Run("llama", f"--pipeline-schedule chimera --sequence-parallel {COUNTED}", tp=2, pp=2, batch=4),
    Run("gpt", f"--pipeline-schedule chimera {DISTRIBUTED} {COUNTED}", pp=2),
    Run("llama", f"--pipeline-schedule hanayo {DISTRIBUTED}", pp=2),
    Run("llama", f"--pipeline-schedule wzb2 --sequence-parallel {COUNTED}", tp=2, pp=2, batch=4),
    Run("llama", f"--bf16 --pipeline-schedule weipipe --weipipe-grad-dtype bf16 {COUNTED}", pp=4),
    Run("llama", f"--pipeline-schedule seq1f1b --pipe-sp-splits 2 {DISTRIBUTED} {COUNTED}", pp=2, cp=2),
    Run("gpt", f"{PER_TOKEN} --cp-comm-type a2a", cp=2),
    Run("llama", f"{SHARDED} --sequence-parallel {COUNTED}", tp=2, batch=4),
    Run("llama", f"{SHARDED} --pipeline-schedule zb1p --recompute-granularity without-attention", pp=2),
    Run("gpt", f"--data-parallel-sharding-strategy optim_grads --pipeline-schedule 1f1b {COUNTED}", pp=2),
    Run("llama", f"{SHARDED} --pipeline-schedule seq1f1b --pipe-sp-splits 2 {COUNTED}", pp=2, cp=2),
    Run("gpt", f"{SHARDED} --cp-comm-type a2a", cp=2),
    Run("gpt", f"{SHARDED} --pipeline-schedule helix {COUNTED}", pp=2),
    Run("llama", f"{SHARDED} --bf16 --pipeline-schedule helix --helix-ship none {COUNTED}", pp=2),
    Run(
        "gpt",
        "--pipeline-schedule interleaved-1f1b --num-layers-per-virtual-pipeline-stage 1 "
        f"{SPLIT} {DISTRIBUTED} {COUNTED}",
        pp=2,
    ),
    Run("llama", f"{SPLIT} --pipeline-schedule zbv --sequence-parallel {COUNTED}", tp=2, pp=2, batch=4),
    Run("gpt", f"{SPLIT} --pipeline-schedule zb1p --loss-chunk-size 9 {COUNTED}", tp=2, pp=2, batch=4),
    Run("llama", f"{SHARDED} {SPLIT} --pipeline-schedule 1f1b {COUNTED}", pp=2),
    Run("llama", f"{SPLIT} --pipeline-schedule seq1f1b --pipe-sp-splits 2 {DISTRIBUTED} {COUNTED}", pp=2, cp=2),
    Run("llama", f"--bf16 {SPLIT} --pipeline-schedule 1f1b --recompute-granularity full {DISTRIBUTED} {COUNTED}", pp=2),
    Run("llama", f"{PER_TOKEN} {SPLIT} --pipeline-schedule gpipe {COUNTED}", pp=4),
]
FIRST = [replace(run, steps=3) for run in [*WHOLE, *BRIEF]]
RUNS = [*FIRST, *WHOLE]
LATE = "--enable-optimizer-post-validation"
LATE_RUNS = [
    replace(run, steps=8, clip=0.85 if run.style == "gpt" else 1.02)
    for run in (
        Run("gpt", f"--pipeline-schedule zb2p {LATE}", pp=4),
        Run("llama", f"--pipeline-schedule zbv {LATE} {DISTRIBUTED}", pp=2),
        Run("llama", f"--pipeline-schedule v-half --zb-max-inflight 1 {LATE}", pp=2),
        Run("gpt", f"--pipeline-schedule v-min {LATE} {DISTRIBUTED}", pp=2),
        Run("llama", f"--pipeline-schedule wzb2 {LATE}", pp=4),
        Run("gpt", f"--pipeline-schedule helix --loss-chunk-size 5 {LATE}", pp=2),
        Run("llama", f"{PER_TOKEN} --pipeline-schedule seq1f1b --pipe-sp-splits 2 {LATE} {DISTRIBUTED}", pp=2),
        Run("llama", f"--pipeline-schedule zb1p --sequence-parallel --loss-chunk-size 6 {LATE}", tp=2, pp=2),
        Run("llama", f"--bf16 --pipeline-schedule zb1p {LATE} {DISTRIBUTED}", pp=2),
        Run("llama", f"--pipeline-schedule zbv {LATE} {SHARDED}", pp=2),
        Run("gpt", f"{SPLIT} --pipeline-schedule zb2p --loss-chunk-size 9 {LATE}", pp=4),
    )
]
"""With gradients of which some are clipped, after others that are not."""
# The loss scale grows until gradients overflow; such a step is left out, and the scale halved.
FP16 = "--fp16 --clip-grad 0 --initial-loss-scale 1048576 --loss-scale-window 2 --hysteresis 1"
OVERFLOWING = [
    replace(run, steps=8)
    for run in (
        Run("llama", f"{FP16} --pipeline-schedule 1f1b", pp=2),
        Run("llama", f"{FP16} --pipeline-schedule 1f1b {ON_HOST} --overlap-cpu-optimizer-d2h-h2d", pp=2),
        Run("llama", f"{FP16} --pipeline-schedule wzb2 {LATE}", pp=2),
        Run("llama", f"{FP16} --pipeline-schedule zbv --loss-chunk-size 7 {LATE} {DISTRIBUTED}", pp=2),
    )
]


def numerics(run: Run) -> str:
    """The flag that makes the numbers other than those of the style alone."""
    return next((flag for flag in (PER_TOKEN, "--bf16") if flag in run.flags), "")


def kinds(run: Run) -> Iterator[object]:
    """Yield what `make test` has a run of at least: each schedule and every other flag, whole weights and weights in
    parts on tensor- and context-parallel ranks, and each way to count with each style."""
    flags = [f"--{flag}" for flag in run.flags.removeprefix("--").split(" --")]
    yield from (flag for flag in flags if flag not in (COUNTED, *COUNTED.split()))
    yield run.tp, run.cp, SHARDED in flags
    yield run.style, numerics(run)
    yield run.style, LATE in flags


CORE = frozenset(first_of_each([*FIRST, *LATE_RUNS], kinds))


def alone(run: Run) -> Run:
    """The run of one process whose figures it must have."""
    return Run(run.style, f"{numerics(run)} {COUNTED}", batch=run.batch, steps=run.steps, clip=run.clip)


@pytest.fixture(scope="module")
def figures(request: pytest.FixtureRequest) -> dict[Run, list[Figures]]:
    """Figures of each run by rank."""
    chosen = selected(request, "run", RUNS + LATE_RUNS + OVERFLOWING)
    chosen = list(dict.fromkeys([*chosen, *OVERFLOWING[: any(run in OVERFLOWING for run in chosen)]]))
    by_rank = run_ranks(figures_of_runs, 4, chosen, timeout=1200.0)
    return {run: [figures[index] for figures in by_rank] for index, run in enumerate(chosen)}


@pytest.fixture(scope="module")
def references(request: pytest.FixtureRequest) -> dict[Run, Expected]:
    runs = list(dict.fromkeys(alone(run) for run in selected(request, "run", RUNS + LATE_RUNS)))
    (found,) = run_ranks(reference, 1, runs)
    return dict(zip(runs, found, strict=True))


@pytest.mark.parametrize("run", graded([*RUNS, *LATE_RUNS], CORE), ids=str)
def test_losses_equal_megatron_core(
    run: Run, figures: dict[Run, list[Figures]], references: dict[Run, Expected]
) -> None:
    """And the norms of gradients and weights, on every rank alike: what several ranks hold counts once."""
    expected, found = references[alone(run)], figures[run][0]
    assert len(figures[run]) == 4 and all(each == found for each in figures[run])
    assert found.parameters == expected.parameters
    tolerance = 2e-2 if numerics(run) == "--bf16" else 1e-4
    assert found.losses == pytest.approx(expected.losses, rel=tolerance)
    compared = 3 if numerics(run) == "--bf16" else run.steps  # later gradients show how bfloat16 was rounded
    assert found.gradients[:compared] == pytest.approx(expected.gradients[:compared], rel=tolerance)
    assert found.weights == pytest.approx(expected.weights[-1], rel=tolerance / 10)
    few = 4  # sums that cancel to nothing in one order of summing, or on one kind of processor
    assert found.zeros[:1] == pytest.approx(expected.zeros[: COUNTED in run.flags], rel=tolerance, abs=few)
    if run.steps == STEPS:
        assert found.losses[-1] < 0.8 * found.losses[0], "the model learns in twenty steps, so each of them matters"


@pytest.mark.parametrize(
    "run", graded([*LATE_RUNS, *(run for run in OVERFLOWING if LATE in run.flags)], {*CORE, OVERFLOWING[-1]}), ids=str
)
def test_steps_start_before_the_norm_is_known(run: Run, figures: dict[Run, list[Figures]]) -> None:
    """Some go on with the weights they have, and some go back: gradients had to be clipped, or overflowed."""
    assert {True, False} == set(figures[run][0].confirmed)


@pytest.mark.parametrize("run", graded(OVERFLOWING, OVERFLOWING[1::2]), ids=str)
def test_an_overflow_leaves_the_weights_alone(run: Run, figures: dict[Run, list[Figures]]) -> None:
    """On every rank, and the rest is as if that step had not been."""
    plain = figures[OVERFLOWING[0]][0]
    assert 3 <= sum(plain.skipped) <= len(plain.skipped) - 3
    for found in figures[run]:
        assert found.skipped == plain.skipped
        assert found.losses == pytest.approx(plain.losses, rel=1e-3)


@pytest.mark.thorough
def test_a_loss_that_is_no_number_ends_all_ranks_alike() -> None:
    """With the same sentence, also where a step starts before the outcome of the last one is known."""
    diverging = "--lr 1e30 --clip-grad 0 --pipeline-schedule"
    runs = [
        Run("llama", f"{diverging} 1f1b", pp=2),
        Run("llama", f"{diverging} zbv {LATE}", pp=2),
        Run("llama", f"{diverging} 1f1b {DISTRIBUTED}"),
    ]
    by_rank = run_ranks(words_of_failures, 2, runs)
    assert by_rank[0] == by_rank[1]
    assert all(re.match("the (loss|norm of the gradients) is (nan|inf) at iteration 2; lower", w) for w in by_rank[0])
