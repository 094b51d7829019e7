"""What the ranks of test_further.py run: heads that predict further tokens against megatron-core's in one process."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper

from helixpipe.model import PipelineModel, UnitContext, layers_of
from helixpipe.program.stages import HEAD_MTP, Piece, model_pieces
from tests.model.common import (
    gradients_of,
    make_batch,
    make_config,
    make_options,
    make_reference,
    reference_forward,
    set_parallel,
    worst,
)

ONE = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.3}
NO_LOSS = {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": None}
VARIANTS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "two": ("further", False, {}),
    "tied": ("further", True, {}),
    "learned positions": ("gpt", True, ONE),
    "experts": ("experts", False, {**ONE, **NO_LOSS, "moe_layer_freq": [0, 1]}),
    "per token": ("further", False, {"calculate_per_token_loss": True}),
}


def compare(rank: int, world_size: int) -> dict[str, tuple[tuple[float, str], list[float], list[float]]]:
    """For each variant the largest error of a gradient and the parameter's name, and what the losses of further tokens
    are, here and in megatron-core's log."""
    set_parallel()
    return {name: _difference(*variant) for name, variant in VARIANTS.items()}


def _difference(style: str, tied: bool, changes: dict[str, Any]) -> tuple[tuple[float, str], list[float], list[float]]:
    config, batch = make_config(style, **changes), make_batch()
    pieces = (*model_pieces(layers_of(config))[:-1], Piece(HEAD_MTP))
    ours = PipelineModel(config, make_options(style, tied), pieces, seed=7)
    theirs = make_reference(style, tied, **changes)
    theirs.load_state_dict(ours.state_dict())
    (loss,) = ours.run(ours.pieces, (), batch, UnitContext(0, 0))
    scale = torch.tensor(0.5 if config.calculate_per_token_loss else 1.0, dtype=torch.float64)
    objective = scale if config.calculate_per_token_loss else scale / batch.loss_mask.sum()
    (loss * objective).backward()
    MTPLossAutoScaler.set_loss_scale(scale)
    (torch.sum(reference_forward(theirs, batch, batch.labels) * batch.loss_mask) * objective).backward()
    sums, weights = ours.further_losses.sums(0)
    losses = (sums / weights).tolist()
    logged = MTPLossLoggingHelper.tracker.pop("values").tolist()
    return worst(gradients_of(ours), gradients_of(theirs)), losses, logged


def evaluated(rank: int, world_size: int) -> bool:
    """Whether an evaluation's loss is that of training, without further tokens."""
    set_parallel()
    config, batch = make_config("further"), make_batch()
    pieces = (*model_pieces(2)[:-1], Piece(HEAD_MTP))
    model = PipelineModel(config, make_options("further", False), pieces, seed=7)
    model.mtp = None  # type: ignore[assignment]
    with torch.no_grad():
        (loss,) = model.run(pieces, (), batch, UnitContext(0, 0, training=False))
    plain = PipelineModel(make_config("llama"), make_options("llama", False), model_pieces(2), seed=7)
    (other,) = plain.run(model_pieces(2), (), batch, UnitContext(0, 0))
    return bool(loss == other)
