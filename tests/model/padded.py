"""Code for the ranks of test_experts_padding.py: layers with experts on padded samples, and on each sample alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from helixpipe.model import Microbatch, PipelineModel, UnitContext, layers_of
from helixpipe.model.real_tokens import RealTokens
from helixpipe.program.stages import model_pieces
from tests.model.common import gradients_of, in_float64, make_config, make_options, set_parallel, worst

KINDS: dict[str, dict[str, Any]] = {
    "per sample": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.3},
    "per microbatch": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.3},
    "over the step": {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.3},
    "capacity": {
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.3,
        "moe_expert_capacity_factor": 0.5,
    },
}


@in_float64()
def errors(rank: int, world_size: int, cases: list[tuple[str, list[int], int, int]]) -> list[Any]:
    """For each case (kind, real tokens of each sample, padding behind the longest, samples of a microbatch) the largest
    error of a gradient, the parameter's name, and whether the loads are those of the samples alone."""
    set_parallel()
    return [_error(*case) for case in cases]


def _error(kind: str, lengths: list[int], padding: int, size: int) -> tuple[float, str, bool]:
    samples = [torch.arange(2 * length).view(2, length) * (3 + index) % 29 for index, length in enumerate(lengths)]
    alone = [Microbatch(each[:1], each[1:], torch.ones(1, each.size(1))) for each in samples]
    whole = max(lengths) + padding
    padded = [_padded(samples[at : at + size], whole) for at in range(0, len(samples), size)]
    expected, loads = _gradients(kind, alone)
    found, own = _gradients(kind, padded)
    return *worst(found, expected), torch.equal(own, loads)


def _padded(samples: list[Tensor], length: int) -> Microbatch:
    rows = torch.stack([torch.nn.functional.pad(each, (0, length - each.size(1))) for each in samples])
    real = torch.arange(length) < torch.tensor([[each.size(1)] for each in samples])
    return Microbatch(rows[:, 0], rows[:, 1], real.float(), real=RealTokens(real))


def _gradients(kind: str, batches: list[Microbatch]) -> tuple[dict[str, Tensor], Tensor]:
    """Return gradients of sums over tokens, as with --calculate-per-token-loss."""
    config = make_config("experts", num_layers=2, **KINDS[kind])
    model = PipelineModel(config, make_options("experts", False), model_pieces(layers_of(config)), seed=7)
    for index, batch in enumerate(batches):
        count = batch.tokens.numel() if batch.real is None else batch.real.count
        unit = UnitContext(1, index, auxiliary_gradient=partial(float, count), number=index)
        (loss,) = model.run(model.pieces, (), batch, unit)
        loss.backward()
    return gradients_of(model), model.routing.loads(1)
