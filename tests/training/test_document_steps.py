"""Training over whole documents: the same under every schedule, size and packing; plans that come late or never."""

from __future__ import annotations

import numpy
import pytest

from megatron.pretrain.plan.documents import DocumentPlanner, StepRequest
from tests.distributed import run_ranks
from tests.selection import graded
from tests.training.document_steps import STEPS, gradients_of_runs, losses_of_runs, resumed, troubled
from tests.training.steps import Run

DOCUMENTS = "--seq-length 192 --max-position-embeddings 192 --variable-seq-lengths --infinipipe-chunks"

ALONE = f"{DOCUMENTS} 1 --infinipipe-packing none"
"""Every document in a row of its own."""

SHARDED = "--data-parallel-sharding-strategy optim_grads_params"

RUNS = [
    Run("llama", f"{ALONE} --pipeline-schedule none", batch=9),
    Run("llama", f"{DOCUMENTS} 3 --pipeline-schedule infinipipe", pp=2, batch=9),
    Run("llama", f"{DOCUMENTS} auto --pipeline-schedule infinipipe", pp=4, batch=9),
    Run("llama", f"{DOCUMENTS} 2 --pipeline-schedule seq1f1b-zb", pp=2, tp=2, batch=9),
    Run("llama", f"{DOCUMENTS} 2 --pipeline-schedule infinipipe", pp=2, cp=2, batch=9),
    Run(
        "llama",
        f"{DOCUMENTS} 3 --pipeline-schedule infinipipe --cp-comm-type a2a --recompute-granularity full",
        cp=2,
        batch=9,
    ),
    Run("llama", f"{DOCUMENTS} auto --pipeline-schedule infinipipe {SHARDED}", pp=2, batch=9),
    Run("llama", f"{DOCUMENTS} 2 --pipeline-schedule seq1f1b-zb {SHARDED}", cp=2, batch=9),
    Run("llama", f"{DOCUMENTS} 1 --pipeline-schedule helix", pp=2, batch=9),
    Run("llama", f"{DOCUMENTS} 1 --pipeline-schedule weipipe", pp=2, batch=9),
    Run("llama", f"{DOCUMENTS} 3 --pipeline-schedule sppo", pp=2, batch=9),
    Run("llama", f"{DOCUMENTS} 2 --pipeline-schedule seq1f1b --infinipipe-split fixed", pp=4, batch=9),
]


FEW = [RUNS[number] for number in (0, 1, 2, 6)]
"""Alone, cut into chunks, in parts."""


@pytest.mark.parametrize("runs", graded((FEW, RUNS), (FEW,)), ids=("few", "all"))
def test_the_same_losses_however_documents_run(runs: list[Run]) -> None:
    by_rank = run_ranks(losses_of_runs, 4, runs, timeout=600.0)
    alone = by_rank[0][0][0]
    assert len(alone) == STEPS and alone[-1] < alone[0]
    for number, run in enumerate(runs):
        for results in by_rank:
            losses, steps = results[number]
            assert losses == pytest.approx(alone, rel=1e-4), run
            assert all(samples == 9 for *_, samples in steps)
    chunks = {steps[1] for results in by_rank for steps in results[1][1]}
    assert max(chunks) == 3
    assert len({steps[0] for steps in by_rank[0][2][1]}) > 1  # successive steps have unlike plans


EXACT = "--clip-grad 0"  # which is in single precision
IN_DOUBLE = [
    Run("llama", f"{ALONE} --pipeline-schedule 1f1b {EXACT}", pp=2, batch=7),
    Run("llama", f"{DOCUMENTS} 3 --pipeline-schedule infinipipe {EXACT}", batch=7),
    Run("llama", f"{DOCUMENTS} 3 --pipeline-schedule infinipipe {EXACT} {SHARDED}", batch=7),
    Run("llama", f"{DOCUMENTS} 3 --pipeline-schedule infinipipe {EXACT} --cp-comm-type a2a", cp=2, batch=7),
    Run("llama", f"{DOCUMENTS} 2 --pipeline-schedule infinipipe {EXACT} --cp-comm-type p2p", cp=2, batch=7),
]
BOTH_KINDS = [IN_DOUBLE[number] for number in (0, 2, 4)]
"""Alone, data-parallel in parts, over a context."""


@pytest.mark.parametrize("runs", graded((BOTH_KINDS, IN_DOUBLE), (BOTH_KINDS,)), ids=("few", "all"))
def test_gradients_in_double_precision_of_data_and_context_parallel_ranks(runs: list[Run]) -> None:
    """Every weight's gradient of the whole batch, of two successive steps: one pipeline of each document alone, two
    pipelines that deal them, with whole weights and in parts, and context-parallel ranks that share them both ways."""
    by_rank = run_ranks(gradients_of_runs, 2, runs)
    for step in range(2):
        alone = by_rank[0][0][step] | by_rank[1][0][step]
        for number in range(1, len(runs)):
            for results in by_rank:
                assert set(results[number][step]) == set(alone)
                for name, gradient in results[number][step].items():
                    assert gradient.dtype == numpy.float64
                    error = numpy.abs(gradient - alone[name]).max() / numpy.abs(alone[name]).max()
                    assert error < 1e-9, f"{runs[number]}, step {step}, {name}: {error}"


@pytest.mark.thorough
def test_dropout_of_context_parallel_ranks_repeats_in_recomputation() -> None:
    flags = f"{DOCUMENTS} 2 --pipeline-schedule infinipipe --cp-comm-type a2a"
    dropout = f"{flags} --attention-dropout 0.2 --hidden-dropout 0.2"
    runs = [Run("llama", each, cp=2, batch=3) for each in (flags, dropout, f"{dropout} --recompute-granularity full")]
    for without, kept, recomputed in run_ranks(losses_of_runs, 2, runs):
        assert recomputed[0] == pytest.approx(kept[0], rel=1e-6)
        assert all(abs(one - other) > 1e-3 for one, other in zip(without[0], kept[0], strict=True))


def test_a_resumed_run_goes_on_in_the_middle_of_an_epoch() -> None:
    run = Run("gpt", f"{DOCUMENTS} 2 --pipeline-schedule infinipipe", pp=2, batch=5)
    assert all(run_ranks(resumed, 2, run))


def test_a_step_of_fewer_documents_than_pipelines() -> None:
    """As --max-tokens may make: the others run a document of padding."""
    run = Run("gpt", f"{DOCUMENTS} 2 --pipeline-schedule infinipipe", pp=2, batch=6)
    planner = DocumentPlanner(run.config(0, 8))
    plans = [planner(StepRequest("train", 0, (30, 12), dp_rank)) for dp_rank in range(4)]
    assert sorted(plan.numbers for plan in plans) == [(), (), (0,), (1,)]
    tokens = {plan.numbers: sum(plan.lowered.program.workload.tokens(0)) for plan in plans}
    assert tokens == {(): 1, (0,): 30, (1,): 12}
    assert len({plan.deal for plan in plans}) == 1


def test_pipelines_with_other_experts_run_one_order() -> None:
    """As many rows of as many chunks, of each one's own documents: they meet in every exchange of tokens."""
    experts = (
        "--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --disable-bias-linear"
    )
    run = Run("gpt", f"{DOCUMENTS} 2 --pipeline-schedule infinipipe {experts}", pp=2, batch=6)
    planner = DocumentPlanner(run.config(0, 4))
    plan = planner(StepRequest("train", 0, (30, 3, 5, 12, 7, 2), 0))
    first, second = (plan.of(dp_rank) for dp_rank in (0, 1))
    assert {*first.numbers, *second.numbers} == set(range(6))
    counts, others = (tuple(map(len, each.lowered.program.workload.microbatches)) for each in (first, second))
    assert counts == others and first.lowered.program.ranks == second.lowered.program.ranks


@pytest.mark.parametrize(
    ("tp", "cp", "more", "together"),
    [
        (2, 1, "--expert-tensor-parallel-size 1", False),
        (1, 2, "--cp-comm-type a2a", False),
        (2, 1, "", True),
        (1, 1, "", True),
        (2, 1, f"--expert-tensor-parallel-size 1 {SHARDED}", True),
    ],
)
def test_only_pipelines_that_exchange_tokens_are_planned_together(tp: int, cp: int, more: str, together: bool) -> None:
    """Experts shared out over the ranks of one pipeline leave each pipeline its own rows."""
    experts = (
        "--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --disable-bias-linear"
    )
    run = Run(
        "gpt",
        f"{DOCUMENTS} 2 --pipeline-schedule infinipipe {experts} {more}{' --sequence-parallel' * (tp > 1)}",
        pp=1,
        tp=tp,
        cp=cp,
        batch=6,
    )
    planner = DocumentPlanner(run.config(0, 4))
    assert planner.together == together
    plan = planner(StepRequest("train", 0, (30, 3, 5, 12, 7, 2), 0))
    assert len(plan.shares) == (planner.config.parallel.data_parallel_size if together else 0)


def test_plans_that_are_late_fail_or_deviate_and_a_killed_planner() -> None:
    run = Run("gpt", f"{DOCUMENTS} 2 --pipeline-schedule infinipipe", pp=2, batch=6)
    by_rank = run_ranks(troubled, 4, run)
    for rank, found in enumerate(by_rank):
        late, said, arrived = found["late"]
        assert late == [False, True, True] and arrived == [0, 1, 2]
        plans = rank in (0, 1)  # the first rank of each pipeline
        assert len(said) == 2 * plans
        assert found["failing"] == ["UserError: nothing fits."] * 3
        assert all(each.startswith("RuntimeError") and "dealt" in each for each in found["deviating"])
        same, said = found["killed"]
        assert same == [True] * 3
        assert plans or not said
    assert any("ended" in sentence for found in by_rank for sentence in found["killed"][1])
