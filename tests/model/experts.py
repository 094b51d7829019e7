"""What the ranks of test_experts.py run: layers with experts against megatron-core's model in one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from helixpipe.common.errors import UserError
from helixpipe.model import PipelineModel, UnitContext
from helixpipe.program.stages import model_pieces
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

VARIANTS: dict[str, dict[str, Any]] = {
    "alltoall": {},
    "allgather": {"moe_token_dispatcher_type": "allgather"},
    "softmax": {"moe_router_score_function": "softmax"},
    "pre-softmax": {
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": True,
        "moe_router_topk": 1,
        "moe_router_topk_scaling_factor": 2.5,
    },
    "groups": {"moe_router_num_groups": 2, "moe_router_group_topk": 1, "moe_router_dtype": "fp64"},
    "one loss": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.4},
    "no loss": {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": None},
    "capacity": {"moe_expert_capacity_factor": 0.5, "moe_router_load_balancing_type": "seq_aux_loss"},
    "padded": {
        "moe_expert_capacity_factor": 1.0,
        "moe_pad_expert_input_to_capacity": True,
        "moe_token_drop_policy": "position",
        "moe_router_load_balancing_type": "aux_loss",
    },
    "gate": {"moe_shared_expert_gate": True},
    "all layers": {"moe_layer_freq": 1, "moe_shared_expert_intermediate_size": None},
    "list": {"moe_layer_freq": [0, 1], "moe_ffn_hidden_size": 40},
    "biases": {"add_bias_linear": True, "moe_shared_expert_intermediate_size": None},
}


def compare(rank: int, world_size: int) -> dict[str, tuple[float, str]]:
    """For each variant the largest error of a gradient and the parameter's name; half of the gradient of auxiliary
    losses is asked for."""
    set_parallel()
    return {name: _difference(changes) for name, changes in VARIANTS.items()}


def _changes(changes: dict[str, Any]) -> dict[str, Any]:
    if isinstance(changes.get("moe_router_load_balancing_type"), str):
        changes = {"moe_aux_loss_coeff": 0.3, **changes}
    return changes


def _difference(changes: dict[str, Any]) -> tuple[float, str]:
    changes, batch = _changes(changes), make_batch()
    ours, theirs = _model(changes), make_reference("experts", False, **changes)
    theirs.load_state_dict(ours.state_dict())
    for module in theirs.modules():
        if getattr(module, "is_expert", False):  # else megatron-core cannot add an expert's bias on one rank
            module.explicit_expert_comm = True
    (loss,) = ours.run(ours.pieces, (), batch, UnitContext(0, 0, auxiliary_gradient=0.5))
    loss.backward()
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(0.5, dtype=torch.float64))
    torch.sum(reference_forward(theirs, batch, batch.labels) * batch.loss_mask).backward()
    return worst(gradients_of(ours), gradients_of(theirs))


def _model(changes: dict[str, Any]) -> PipelineModel:
    config = make_config("experts", **changes)
    options = make_options("experts", False)
    from helixpipe.model.options import layers_of

    return PipelineModel(config, options, model_pieces(layers_of(config)), seed=7)


def one_expert(rank: int, world_size: int) -> dict[str, Any]:
    """A router that sends every token to the same expert first: its load, and whether all gradients are numbers."""
    set_parallel()
    model = _model({"moe_router_topk": 1, "moe_router_pre_softmax": True})
    router: Any = model.decoder.layers["0"].mlp.router
    with torch.no_grad():
        router.weight.zero_()  # all scores alike: the first expert is the best
    (loss,) = model.run(model.pieces, (), make_batch(), UnitContext(0, 0))
    loss.backward()
    counts = router.counts.of[0, 0]
    finite = all(bool(torch.isfinite(each.grad).all()) for each in model.parameters() if each.grad is not None)
    missing = [name for name, each in model.named_parameters() if each.grad is None]
    return {"load": counts.load.tolist(), "finite": finite, "missing": missing}


def too_early(rank: int, world_size: int) -> str:
    """What a backward says that runs before the forward of another chunk of its microbatch."""
    set_parallel()
    model, batch = _model({}), make_batch()
    unit = UnitContext(0, 0, length=8, row_length=12)
    first = replace(batch, tokens=batch.tokens[:, :8], labels=batch.labels[:, :8], loss_mask=batch.loss_mask[:, :8])
    (loss,) = model.run(model.pieces, (), first, unit)
    try:
        loss.backward()
    except UserError as error:
        return str(error)
    return ""


def evaluated(rank: int, world_size: int) -> int:
    """How many chunks' counts an evaluation leaves behind."""
    set_parallel()
    model = _model({})
    with torch.no_grad():
        model.run(model.pieces, (), make_batch(), UnitContext(0, 0, training=False))
    router: Any = model.decoder.layers["0"].mlp.router
    assert parallel_state.get_expert_model_parallel_world_size() == 1
    return len(router.counts.of)
