"""A head whose vocabulary is divided into parts: loss and gradients equal those of the whole, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helixpipe.model.ends import Targets
from helixpipe.model.slices import Slices
from helixpipe.model.split_head import SlicedSums, VocabularyRows, part_loss, part_sums
from helixpipe.program.stages import split_head
from tests.distributed import run_ranks
from tests.model import split_head as on_ranks


class Alone:
    """A tensor-parallel group of one rank."""

    def size(self) -> int:
        return 1


@st.composite
def heads(draw: st.DrawFn) -> tuple[Tensor, Tensor, Targets, int]:
    """Hidden states, a weight, targets, of which some are no rows of the vocabulary, and a number of parts."""
    length, batch, width = draw(st.integers(1, 7)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    vocabulary = draw(st.integers(1, 23))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    scale = draw(st.sampled_from((1e-3, 1.0, 300.0)))
    hidden = torch.randn(length, batch, width, generator=generator, dtype=torch.float64) * scale
    weight = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, vocabulary, (length, batch), generator=generator)
    weights = torch.rand(length, batch, generator=generator)
    ignored = torch.rand(length, batch, generator=generator) < 0.3
    targets = Targets(labels.masked_fill(ignored, -100), weights.masked_fill(ignored, 0.0))
    return hidden, weight, targets, draw(st.integers(1, min(vocabulary, 5)))


def whole(hidden: Tensor, weight: Tensor, targets: Targets) -> tuple[Tensor, Tensor, Tensor]:
    """The loss sum and the gradients of hidden states and weight, by torch."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logits = (hidden @ weight.t()).flatten(0, 1)
    losses = F.cross_entropy(logits, targets.labels.flatten(), reduction="none", ignore_index=-100)
    loss = torch.sum(losses * targets.weights.flatten())
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    return loss.detach(), hidden.grad, weight.grad


@given(heads(), st.integers(0, 8))
def test_parts_equal_the_whole(head: tuple[Tensor, Tensor, Targets, int], slice_size: int) -> None:
    """Without slices (0) and with slices of so many tokens."""
    hidden, weight, targets, count = head
    group: Any = Alone()
    own_hidden, weights, sums = [], [], []
    for piece in split_head(count)[1:]:
        own = piece.rows(weight.size(0))
        rows = VocabularyRows(own.start, group)
        own_hidden.append(hidden.clone().requires_grad_())
        weights.append(torch.nn.Parameter(weight[own].clone()))
        if slice_size:
            part = SlicedSums(Slices(slice_size, False, group), weights[-1], rows, False)
            sums.append(part.sums(own_hidden[-1], targets.labels))
        else:
            sums.append(part_sums(own_hidden[-1] @ weights[-1].t(), targets.labels, rows))
    every = torch.stack([each.detach() for each in sums])
    losses = []
    for number, own_sums in enumerate(sums):
        loss, gradient = part_loss(every, number, targets)
        losses.append(loss)
        own_sums.backward(gradient)
    expected, of_hidden, of_weight = whole(hidden, weight, targets)
    found_hidden = sum(each.grad for each in own_hidden if each.grad is not None)
    found_weight = torch.cat([each.grad for each in weights if each.grad is not None])
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    torch.testing.assert_close(losses[0], expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(found_hidden, of_hidden, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(found_weight, of_weight, rtol=1e-10, atol=1e-11 * max(1.0, hidden.abs().max().item()))


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, float]]:
    return run_ranks(on_ranks.compare, 2)


@pytest.mark.parametrize("slice_size", on_ranks.SLICES)
@pytest.mark.parametrize("layout", on_ranks.PARALLEL)
def test_tensor_parallel_ranks_divide_the_rows_of_a_part(
    ranks: list[dict[str, float]], layout: str, slice_size: int
) -> None:
    """Of a model's own head: hidden states, final norm and output layer; also where I leaves weights to W."""
    for results in ranks:
        for count in on_ranks.PARTS:
            for deferred in (False, True):
                assert results[f"{layout}-{slice_size}-{count}-{deferred}"] < 1e-10
