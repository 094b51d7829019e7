"""Runs on the ranks of test_split_head.py: the parts of a model's head one after another against its whole head."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from helixpipe.model import PipelineModel
from helixpipe.model.ends import Targets
from helixpipe.program.stages import Piece, split_head
from tests.model.common import CONTEXT, SEQUENCE, make_config, make_options, set_parallel
from tests.model.equality import whole
from tests.model.loss_slices import hidden_states, masked
from tests.model.slices import PARALLEL

SLICES, PARTS = (0, 5), (1, 2, 3, 5)
ROOT = 0.37


def compare(rank: int, world_size: int) -> dict[str, float]:
    """For each layout, size of slices and number of parts the largest relative error of a gradient or the loss."""
    results = {}
    for layout, (tp, sequence_parallel) in PARALLEL.items():
        set_parallel(tp=tp)
        rows = SEQUENCE // tp if sequence_parallel else SEQUENCE
        changes = {"tp": tp, "sequence_parallel": sequence_parallel}
        expected = of_whole(rows, changes)
        for size in SLICES:
            for count in PARTS:
                for deferred in (False, True):
                    found = of_parts(rows, size, count, deferred, changes)
                    error = max(
                        ((found[name] - expected[name]).abs().max() / expected[name].abs().max()).item()
                        for name in expected
                    )
                    results[f"{layout}-{size}-{count}-{deferred}"] = error
    return results


def make(pieces: tuple[Piece, ...], size: int, changes: dict[str, Any]) -> PipelineModel:
    options = replace(make_options("gpt", tied=False), loss_chunk_size=size)
    return PipelineModel(make_config("gpt", **changes), options, pieces, seed=7)


def of_whole(rows: int, changes: dict[str, Any]) -> dict[str, Tensor]:
    """By torch's cross entropy, in float64; tensor-parallel ranks join their logits."""
    model = make((Piece("head"),), 0, changes)
    hidden, targets = hidden_states(model, rows), Targets.read(masked(), CONTEXT)
    logits = model.logits(hidden)
    size, rank = model.tp_group.size(), model.tp_group.rank()
    parts = [torch.empty_like(logits) for _ in range(size)]
    torch.distributed.all_gather(parts, logits.detach().contiguous(), group=model.tp_group)
    parts[rank] = logits
    losses = F.cross_entropy(torch.cat(parts, -1).flatten(0, 1), targets.labels.flatten(), reduction="none")
    loss = torch.sum(losses * targets.weights.flatten())
    loss.backward(loss.new_tensor(ROOT))
    assert hidden.grad is not None
    return {"loss": loss.detach(), "hidden": hidden.grad} | gradients(model)


def of_parts(rows: int, size: int, count: int, deferred: bool, changes: dict[str, Any]) -> dict[str, Tensor]:
    """deferred: as I and W do it, else as B does."""
    norm, *parts = split_head(count)
    first = make((norm,), size, changes)
    hidden, targets = hidden_states(first, rows), masked()
    (normed,) = first.run((norm,), (hidden,), targets, CONTEXT)
    models = [make((part,), size, changes) for part in parts]
    inputs = [normed.detach().requires_grad_() for _ in parts]
    own = [
        model.run((part,), (given,), targets, CONTEXT)[0]
        for model, part, given in zip(models, parts, inputs, strict=True)
    ]
    every = torch.stack([each.detach() for each in own])
    weights = []
    for number, model in enumerate(models):
        loss, gradient = model.part_loss(every, number, targets, CONTEXT)
        store = model.weight_gradients() if deferred else None
        with nullcontext() if store is None else store.keep("unit"):
            own[number].backward(gradient * ROOT)
        if store is not None:
            store.compute("unit")
        weights.append(gradients(model)["output_layer.weight"])
    normed.backward(sum(given.grad for given in inputs if given.grad is not None))
    assert hidden.grad is not None
    tp = first.tp_group.size()
    joined = torch.cat([part.chunk(tp)[rank] for rank in range(tp) for part in weights])
    return {"loss": loss, "hidden": hidden.grad, "output_layer.weight": joined} | gradients(first)


def gradients(model: PipelineModel) -> dict[str, Tensor]:
    """By name, of all tensor-parallel ranks."""
    own = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return own if model.tp_group.size() == 1 else whole(model, own, partial_sums=True)
