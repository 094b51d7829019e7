"""Sums over ranks in the training loop: gradients of experts' auxiliary losses, losses of further tokens, tokens and
FLOPs do not depend on what data a rank reads, nor on when the loss scale changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from helixpipe.model import Microbatch
from megatron.pretrain.process.parallel import Parallel
from tests.distributed import run_ranks
from tests.training.steps import Run, figures_of_runs, make_trainer, of_runs, stream

PER_TOKEN = "--calculate-per-token-loss"
POST_VALIDATION = "--enable-optimizer-post-validation"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1 "
    "--moe-z-loss-coeff 0.1"
)
MEANS = Run("llama", EXPERTS, batch=4)
"""The mean of each microbatch's losses: that over all tokens where each has as many."""
LAYOUTS = [
    Run("llama", f"{EXPERTS} {PER_TOKEN}", batch=4),
    Run("llama", f"{EXPERTS} {PER_TOKEN} --pipeline-schedule 1f1b", pp=4, batch=4),
    Run("llama", f"{EXPERTS} {PER_TOKEN} --pipeline-schedule v-half", pp=2, batch=4),
    Run("llama", f"{EXPERTS} {PER_TOKEN} --pipeline-schedule v-half", pp=2, cp=2, batch=4),
]
FURTHER = [
    Run("llama", "--mtp-num-layers 1", batch=4),
    Run("llama", "--mtp-num-layers 1 --pipeline-schedule 1f1b", pp=2, cp=2, batch=4),
    Run("llama", "--mtp-num-layers 1 --pipeline-schedule zb1p --sequence-parallel", tp=2, pp=2, batch=4),
]
OTHERS = [
    *FURTHER,
    Run("llama", "--pipeline-schedule weipipe", pp=4, batch=4),
    Run("gpt", "--pipeline-schedule 1f1b --pipeline-vocab-parallel split", pp=4, batch=4),
]


class Summed(NamedTuple):
    """Results of a step on one rank.

    Attributes:
        gradients: Gradients of its weights, by name.
        reads_data: Whether it read data.
        done: Its share of the step's tokens and FLOPs.
        further: Its share of the loss sum of the tokens after the next, and of their number.
    """

    gradients: dict[str, Tensor]
    reads_data: bool
    done: Tensor
    further: Tensor


def gradients_of(rank: int, world_size: int, runs: list[Run]) -> list[Summed]:
    return of_runs(runs, lambda run: _gradients(run, rank, world_size))


def _gradients(run: Run, rank: int, world_size: int) -> Summed:
    trainer = make_trainer(run.config(rank, world_size))
    reads_data = trainer.pipeline.reads_data
    data = _all_counted() if "--num-experts" in run.flags else stream(trainer.parallel)
    trainer.feed.train_batches = data if reads_data else None  # type: ignore[attr-defined]
    work = trainer.feed.train(trainer.progress)
    numbers = torch.arange(len(work.microbatches), dtype=torch.float64) * trainer.parallel.dp_size
    numbers += trainer.parallel.dp_rank + 1  # in the step; also on ranks that are not to count
    work = replace(work, counted_here=torch.stack([numbers, numbers.square()], dim=1))
    sums, _ = trainer._forward_backward(1, work, record=False, timed=False)
    weights = trainer.state.model.named_parameters()
    found = {name: weight.main_grad.clone() for name, weight in weights}
    trainer.pipeline.close()
    return Summed(found, reads_data, sums[3:5], sums[5:][-2:])


def _all_counted() -> Iterator[Microbatch]:
    for each in stream(Parallel.current()):
        yield replace(each, loss_mask=torch.ones_like(each.loss_mask))


@pytest.fixture(scope="module")
def found() -> dict[Run, list[Summed]]:
    """Of each run by rank."""
    runs = [MEANS, *LAYOUTS, *OTHERS]
    by_rank = run_ranks(gradients_of, 4, runs)
    return {run: [each[index] for each in by_rank] for index, run in enumerate(runs)}


@pytest.mark.parametrize("run", LAYOUTS, ids=str)
def test_gradients_of_tokens_do_not_depend_on_which_ranks_read_data(run: Run, found: dict[Run, list[Summed]]) -> None:
    expected, seen = found[MEANS][0].gradients, set()
    assert all(each.reads_data for each in found[run]) == (run.pp == 1)
    for each in found[run]:
        for name, gradient in each.gradients.items():
            seen.add(name)
            error = (gradient - expected[name]).norm() / expected[name].norm()
            assert error < 1e-4, name
    assert seen == set(expected)


@pytest.mark.parametrize("run", [MEANS, *LAYOUTS, *OTHERS], ids=str)
def test_each_microbatch_counts_once_in_tokens_and_flops(run: Run, found: dict[Run, list[Summed]]) -> None:
    assert torch.stack([each.done for each in found[run]]).sum(dim=0).tolist() == [1 + 2 + 3 + 4, 1 + 4 + 9 + 16]


def test_losses_of_further_tokens_do_not_depend_on_ranks(found: dict[Run, list[Summed]]) -> None:
    sums = torch.stack([torch.stack([each.further for each in found[run]]).sum(dim=0) for run in FURTHER])
    assert 20 < sums[0, 1] < 4 * 15 and sums[:, 1].tolist() == sums[:1, 1].tolist() * len(FURTHER)
    torch.testing.assert_close(sums, sums[:1].expand_as(sums), rtol=1e-6, atol=0.0)


GROWING = "--fp16 --clip-grad 0 --initial-loss-scale 256 --loss-scale-window 2"
WAITING, LATE = (Run("llama", f"{EXPERTS} {GROWING} {flag}", batch=2, steps=4) for flag in ("", POST_VALIDATION))


def test_the_loss_scale_may_grow_after_a_steps_first_forwards() -> None:
    """Their auxiliary losses are then scaled as their loss is."""
    (found,) = run_ranks(figures_of_runs, 1, [WAITING, LATE])
    expected, late = found
    assert late.confirmed == [True, True] and not any(late.skipped)
    assert late.gradients == pytest.approx(expected.gradients, rel=1e-4)
