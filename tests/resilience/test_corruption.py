"""A flipped bit is found and the rank is named; clean runs raise no alarm, and train as without checks."""

from __future__ import annotations

import re
from random import Random

import pytest

from megatron.pretrain.resilience.findings import CheckedValue, RankFindings, ReceivedDigest, sentence
from tests.distributed import run_ranks
from tests.resilience.corrupt import Found, clean, flipped
from tests.resilience.flipping import Flip
from tests.selection import graded, selected
from tests.training.steps import Run

EVERY = "--check-every 2"
DISTRIBUTED = "--use-distributed-optimizer"
LATE = "--enable-optimizer-post-validation"
CLEAN = [
    Run(style, f"{flags} {EVERY}", tp=tp, pp=pp, batch=batch, cp=cp, steps=4)
    for style, flags, tp, pp, batch, cp in (
        ("gpt", "--pipeline-schedule none", 1, 1, 8, 1),
        ("gpt", "--pipeline-schedule gpipe", 1, 4, 3, 1),
        ("gpt", f"--pipeline-schedule 1f1b --attention-dropout 0.1 --hidden-dropout 0.1 {DISTRIBUTED}", 1, 2, 8, 1),
        ("llama", "--pipeline-schedule interleaved-1f1b --num-virtual-stages-per-pipeline-rank 2 --bf16", 1, 2, 8, 1),
        ("gpt", f"--pipeline-schedule zb2p {LATE}", 1, 4, 8, 1),
        ("llama", f"--pipeline-schedule zbv --fp16 {LATE} {DISTRIBUTED}", 1, 2, 8, 1),
        ("llama", "--pipeline-schedule hanayo --num-virtual-stages-per-pipeline-rank 2", 1, 2, 8, 1),
        ("llama", f"--pipeline-schedule seq1f1b --pipe-sp-splits 3 --chunk-alignment 1 {DISTRIBUTED}", 1, 2, 8, 1),
        ("llama", "--pipeline-schedule sppo --pipe-sp-splits 4 --sppo-multiplex both", 1, 2, 2, 1),
        ("llama", "--pipeline-schedule 1f1b --offload-activations 0.5 --recompute-granularity full", 1, 2, 8, 1),
        ("llama", "--pipeline-schedule helix --helix-folds 1 --sequence-parallel", 2, 2, 4, 1),
        ("gpt", "--pipeline-schedule helix --helix-ship qkv --loss-chunk-size 5", 1, 2, 8, 1),
        ("gpt", f"--pipeline-schedule weipipe {DISTRIBUTED}", 1, 2, 8, 1),
        ("llama", "--pipeline-schedule wzb2 --calculate-per-token-loss", 1, 4, 8, 1),
        ("gpt", "--pipeline-schedule chimera", 1, 2, 8, 1),
        ("gpt", "--pipeline-schedule 1f1b --pipeline-vocab-parallel split", 1, 4, 8, 1),
        ("llama", "--pipeline-schedule 1f1b --overlap-tp-comm pairs --sequence-parallel", 2, 2, 4, 1),
        ("llama", f"--pipeline-schedule zb1p {DISTRIBUTED}", 1, 2, 4, 2),
    )
]
CORE = [CLEAN[4], CLEAN[10]]

STEPS = 5
REPLICAS = Run("gpt", f"--pipeline-schedule 1f1b {EVERY}", pp=2, steps=STEPS)
ALONE = Run("llama", f"--pipeline-schedule zb1p {EVERY}", pp=4, steps=STEPS)


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[Run, list[tuple[Found, list[float]]]]:
    """What each clean run says, by rank."""
    runs = selected(request, "run", CLEAN)
    by_rank = run_ranks(clean, 4, runs, timeout=600.0)
    return {run: [each[index] for each in by_rank] for index, run in enumerate(runs)}


@pytest.mark.parametrize("run", graded(CLEAN, CORE), ids=str)
def test_a_clean_run_raises_no_alarm_and_trains_as_without_checks(
    run: Run, found: dict[Run, list[tuple[Found, list[float]]]]
) -> None:
    for checked, unchecked in found[run]:
        assert checked.step == 0, checked.says
        assert checked.losses == unchecked and len(unchecked) == run.steps


def drawn(rng: Random, where: str) -> Flip:
    """Any bit of any value of any rank. Of what moves in a step every rank has some; state there is from step 2 on."""
    return Flip(
        where, rng.randrange(4), rng.randint(2, 3), rng.randrange(64), rng.randrange(1000), rng.randrange(10**6)
    )


CASES = ((REPLICAS, 1), (REPLICAS, 10), (ALONE, 10))
"""And how many bits of each kind of value."""


@pytest.mark.parametrize("case", graded(CASES, CASES[:1]), ids=["a few", "replicas", "alone"])
def test_a_flipped_bit_of_any_value_is_found_and_its_rank_named(case: tuple[Run, int]) -> None:
    run, times = case
    rng = Random(f"{run} {times}")
    kinds = ["weight", "state", "message", "flickering"]
    kinds += ["computed"] * (run is REPLICAS)  # without a replica it is alike twice
    flips = [drawn(rng, where) for where in kinds for _ in range(times)]
    by_rank = run_ranks(flipped, 4, run, flips)
    assert by_rank[0] == by_rank[1] == by_rank[2] == by_rank[3], "all ranks end alike"
    for flip, each in zip(flips, by_rank[0], strict=True):
        compared = flip.where in ("computed", "flickering")
        last = flip.step + (flip.step % 2 if compared else 0)
        assert each.step == last, flip
        assert f"rank {flip.rank}" in each.says, (flip, each.says)
        named = re.findall(r"rank (\d)(?: \(pipeline|: )", each.says)
        assert named == [str(flip.rank)] or (flip.where == "computed" and len(named) == 2), each.says


# ------------------------------------------------------------------------------------------------------- who is named

OUTPUT, GRADIENT = CheckedValue(3, "the activation of stage 0"), CheckedValue(9, "the gradient of a")


def ranks(*rows: tuple[int, int], unsteady: int | None = None) -> list[RankFindings]:
    """Replicas of one rank that have these digests."""
    return [
        RankFindings(
            f"rank {number}", number, (0, 0, 0), entries=(GRADIENT, OUTPUT), row=row,
            unsteady=(OUTPUT,) if number == unsteady else (),
        )
        for number, row in enumerate(rows)
    ]  # fmt: skip


def test_the_first_that_differs_is_told_and_the_fewer_are_to_blame() -> None:
    said = sentence(ranks((1, 5), (2, 6), (1, 5)), 40, 30)
    assert said.startswith("corrupt bits at iteration 40: rank 1: has the activation of stage 0 otherwise than its rep")
    assert "checkpoints up to iteration 29 are from before" in said
    said = sentence(ranks((1, 5), (2, 5), (2, 5)), 40, 0)
    assert "rank 0: has the gradient of a otherwise" in said and "no checkpoint is from before" in said


def test_of_two_the_one_that_computes_otherwise_when_it_tries_again_is_named_else_both() -> None:
    assert "rank 1: computed the activation of stage 0 twice, with other bits" in sentence(
        ranks((1, 5), (2, 6), unsteady=1), 4, 2
    )
    assert "one of rank 0 and rank 1: they have the activation" in sentence(ranks((1, 5), (2, 6)), 4, 2)


def test_of_messages_and_memory_all_that_differ_are_told() -> None:
    sender = RankFindings("rank 0", 0, (0, 0, 0), sent=((7, 100), (8, 5)), changed=("a.weight",))
    receiver = RankFindings(
        "rank 1", 0, (1, 0, 0), received=(ReceivedDigest(7, 101, "message 7"), ReceivedDigest(8, 5, "message 8"))
    )
    other = RankFindings("rank 2", 1, (0, 0, 0), sent=((7, 101),))
    said = sentence([sender, receiver, other], 12, 10)
    assert "rank 0: a.weight changed in its memory" in said
    assert "rank 1: the message 7 came with other bits than it was sent with" in said and "message 8" not in said
    assert "checkpoints up to iteration 11 are from before" in said
