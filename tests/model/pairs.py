"""What the ranks of test_pairs.py run."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from helixpipe.common.alternate import finished
from helixpipe.costs.models import PAIRS
from helixpipe.model import PipelineModel
from tests.model.common import CHAIN, CONTEXT, gradients_of, make_batch, set_parallel, worst
from tests.model.halves import INNER, Products, late_collectives, model_in_halves, model_over_context


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
    dropout = {"hidden_dropout": 0.3, "attention_dropout": 0.3}
    return [
        {"sequence parallel": sp, **_compared(partial(model_in_halves, style, sp, PAIRS, **dropout), split)}
        for style, sp in (("llama", True), ("gpt", False))
    ]


def over_context(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    """The same of context-parallel ranks, by what they exchange."""
    set_parallel(cp=2)
    dropout = {"a2a": {"attention_dropout": 0.3}, "p2p": dict[str, float]()}
    return {
        how: _compared(partial(model_over_context, how, PAIRS, hidden_dropout=0.3, **dropout[how]), split=False)
        for how in ("a2a", "p2p")
    }


def _compared(make: Callable[[], PipelineModel], split: bool) -> dict[str, Any]:
    expected: dict[str, Tensor] = {}
    events = list[str]()
    for beside in (False, True):
        model = make()
        events.clear()
        inputs = _steps(model, beside, events, split)
        found = gradients_of(model.decoder.layers) | {f"input {number}": each for number, each in enumerate(inputs)}
        error, expected = worst(found, expected or found), found
    return {"events": events, "error": error}
