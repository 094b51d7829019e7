"""What the ranks of test_pairs.py run."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from helixpipe.common.alternate import finished
from helixpipe.costs.models import PAIRS
from helixpipe.model import PipelineModel
from tests.model.common import CHAIN, CONTEXT, gradients_of, make_batch, set_parallel, worst
from tests.model.halves import INNER, Products, late_collectives, model_in_halves


def _hidden(model: PipelineModel, seed: int) -> Tensor:
    rows = model.payload_shapes(CHAIN[0], 2, 12)[0]
    generator = torch.Generator().manual_seed(seed + model.tp_group.rank() * model.config.sequence_parallel)
    return torch.randn(rows, generator=generator, dtype=torch.float64).requires_grad_()


def _forward(model: PipelineModel, microbatch: int, given: list[Tensor]) -> Generator[None, None, None]:
    """Of the layers, with the loss as the last of what is given."""
    hidden = _hidden(model, microbatch)
    context = CONTEXT._replace(microbatch=microbatch)
    (output,) = yield from model.steps(INNER, (hidden,), make_batch(), context)
    given += [hidden, output.square().sum()]


def _steps(model: PipelineModel, beside: bool, events: list[str], split: bool) -> list[Tensor]:
    """The backward of one unit and the forward of another, beside each other or not, then the other's backward; returns
    the gradients of both inputs."""
    first, second = list[Tensor](), list[Tensor]()
    store = model.weight_gradients()
    with late_collectives(events), Products(events):
        finished(_forward(model, 0, first))
        events.clear()
        if beside:
            model.beside.begin(_forward(model, 1, second))
        if split:
            with store.keep("unit"):
                first[1].backward()
        else:
            first[1].backward()
        model.beside.finish()
        during = events.copy()
        if split:
            store.compute("unit")
        if not beside:
            finished(_forward(model, 1, second))
        second[1].backward()
    events[:] = during
    gradients = [first[0].grad, second[0].grad]
    assert all(each is not None for each in gradients)
    return [each for each in gradients if each is not None]


def beside_each_other(rank: int, world_size: int, split: bool) -> list[dict[str, Any]]:
    """The events while a forward ran beside a backward, and how far gradients are from those of one after the other."""
    set_parallel(tp=2)
    results = []
    for style, sequence_parallel in (("llama", True), ("gpt", False)):
        expected: dict[str, Tensor] = {}
        for beside in (False, True):
            model = model_in_halves(style, sequence_parallel, PAIRS, hidden_dropout=0.3, attention_dropout=0.3)
            events: list[str] = []
            inputs = _steps(model, beside, events, split)
            found = gradients_of(model.decoder.layers) | {f"input {number}": each for number, each in enumerate(inputs)}
            if beside:
                error = worst(found, expected)
                results.append({"sequence parallel": sequence_parallel, "events": events, "error": error})
            expected = found
    return results
