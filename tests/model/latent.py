"""Runs on the ranks of test_latent.py: multi-latent attention against megatron-core's, on the same weights and data."""

from __future__ import annotations

from typing import Any

from helixpipe.model.options import layers_of
from helixpipe.program.stages import model_pieces
from tests.model.common import (
    CONTEXT,
    gradients_of,
    make_batch,
    make_config,
    make_model,
    run_parts,
    score,
    set_parallel,
    worst,
)
from tests.model.equality import expected_of, whole

CHAIN = model_pieces(layers_of(make_config("latent")))
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "whole queries, bare latents": {"q_lora_rank": None, "qk_layernorm": False},
    "rope": {"rope_type": "rope", "rotary_percent": 0.5, "rotary_scaling_factor": 1.0},
    "sinks": {"softmax_type": "learnable"},
    "wide values": {"v_head_dim": 12, "normalization": "LayerNorm"},
}


def compare(rank: int, world_size: int) -> dict[str, Any]:
    """Largest relative difference and where, for every case."""
    results: dict[str, Any] = {}
    for name, changes in VARIANTS.items():
        set_parallel(tp=1)
        weights, gradients, loss = expected_of("latent", False, CHAIN, **changes)
        for cut, parts in (("whole", [CHAIN]), ("cut", [(piece,) for piece in CHAIN])):
            model = make_model("latent", False, CHAIN, **changes)
            run_parts([(model, pieces) for pieces in parts], make_batch(), objective=score)
            results[f"{name}, {cut}"] = worst(gradients_of(model), gradients)
        set_parallel(tp=2)
        for split in (False, True):
            model = make_model("latent", False, CHAIN, tp=2, sequence_parallel=split, **changes)
            shards = {key: parameter.detach() for key, parameter in model.named_parameters()}
            results[f"{name}, weights, {split}"] = worst(whole(model, shards, partial_sums=False), weights)
            run_parts([(model, (piece,)) for piece in CHAIN], make_batch(), objective=lambda x: score(x, rank))
            results[f"{name}, two ranks, {split}"] = worst(whole(model, gradients_of(model), True), gradients)
            ours = model.run(CHAIN, (), make_batch(), CONTEXT)[0]
            results[f"{name}, loss, {split}"] = (abs(ours.item() / loss - 1) * 1e-3, "loss")
    return results
