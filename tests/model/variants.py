"""Runs on the ranks of test_variants.py: norms of heads and centered norms, wider heads, each kind of RoPE, gates, and
sinks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel

from helixpipe.model import GPTOptions, Microbatch, PipelineModel, UnitContext
from helixpipe.model.options import layers_of
from helixpipe.model.rope_scaling import RopeScaling
from helixpipe.program.stages import model_pieces
from tests.model.chunks import MICROBATCHES, ChunkedRun, objective, relative
from tests.model.common import (
    SEQUENCE,
    VOCABULARY,
    gate_exactly,
    gradients_of,
    make_batch,
    make_config,
    make_options,
    reference_forward,
    run_parts,
    set_parallel,
    worst,
)
from tests.model.equality import whole

LLAMA3 = RopeScaling("llama3", 8.0, original_length=30)
YARN = RopeScaling("yarn", 4.0, original_length=24, beta_fast=3.0, beta_slow=0.1, mscale=1.3, mscale_all_dim=0.2)

VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3": ("llama", {"qk_layernorm": True, "kv_channels": 12}, {"rotary_percent": 1.0}),
    "qwen2": ("llama", {"add_qkv_bias": True}, {"rope_scaling": RopeScaling(interpolation=4.0)}),
    "interleaved": ("llama", {"rotary_interleaved": True}, {}),
    "llama3": ("llama", {}, {"rope_scaling": LLAMA3, "rotary_percent": 1.0}),
    "yarn": ("llama", {}, {"rope_scaling": YARN, "position_embedding_type": "yarn", "rotary_percent": 1.0}),
    "gpt-qk": ("gpt", {"qk_layernorm": True, "num_query_groups": 2}, {"position_embedding_type": "rope"}),
    "centered": ("llama", {"layernorm_zero_centered_gamma": True, "qk_layernorm": True}, {}),
    "gpt-centered": ("gpt", {"layernorm_zero_centered_gamma": True}, {}),
    "gate": ("llama", {"attention_output_gate": True, "softmax_type": "learnable"}, {}),
    "gate-qk": ("llama", {"attention_output_gate": True, "qk_layernorm": True, "kv_channels": 12}, {}),
    "gpt-sinks": ("gpt", {"attention_output_gate": True, "softmax_type": "off-by-one"}, {}),
}
"""Style, and what is changed in megatron-core's configuration and in the options."""


def options(name: str) -> GPTOptions:
    style, _, changes = VARIANTS[name]
    return replace(make_options(style, tied=False), **changes)


def make(name: str, tp: int = 1, **also: Any) -> PipelineModel:
    """Make a model whose norms' weights differ from where they begin, by fixed amounts."""
    style, changes, _ = VARIANTS[name]
    config = make_config(style, tp, **{**changes, **also})
    model = PipelineModel(config, options(name), model_pieces(layers_of(config)), seed=7)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter += 0.3 * torch.sin(torch.arange(parameter.numel(), dtype=torch.float64) + len(key))
    return model


def expected_of(name: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of megatron-core's GPTModel on the same weights. It has no centered norms without compiled
    packages, so there they are others of weights that are larger by one."""
    style, changes, changed = VARIANTS[name]
    centered = changes.get("layernorm_zero_centered_gamma", False)
    config = make_config(style, **{**changes, "layernorm_zero_centered_gamma": False})
    scaling: RopeScaling = changed.get("rope_scaling", RopeScaling())
    for field, value in (
        ("yarn_rotary_scaling_factor", scaling.factor),
        ("yarn_original_max_position_embeddings", scaling.original_length),
        ("yarn_beta_fast", scaling.beta_fast),
        ("yarn_beta_slow", scaling.beta_slow),
        ("yarn_mscale", scaling.mscale),
        ("yarn_mscale_all_dim", scaling.mscale_all_dim),
        ("yarn_correction_range_round_to_int", scaling.round_ramp),
    ):
        if scaling.kind == "yarn":
            setattr(config, field, value)
    norm = "RMSNorm" if style == "llama" else None
    gpt = options(name)
    reference = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization=norm, qk_layernorm=config.qk_layernorm),
        VOCABULARY,
        SEQUENCE,
        share_embeddings_and_output_weights=False,
        position_embedding_type=gpt.position_embedding_type,
        rotary_percent=gpt.rotary_percent,
        rotary_base=gpt.rotary_base,
        seq_len_interpolation_factor=scaling.interpolation if scaling.interpolation != 1 else None,
    ).to(torch.float64)
    if scaling.kind == "llama3":  # whose original length is a constant there
        rotary = reference.rotary_pos_emb
        rotary.inv_freq = rotary._apply_scaling(
            rotary.inv_freq, scaling.factor, scaling.low, scaling.high, scaling.original_length
        )
    gate_exactly(reference)
    weights = make(name).state_dict()
    if centered:
        weights = {key: w + 1 if "norm" in key and key.endswith("weight") else w for key, w in weights.items()}
    reference.load_state_dict(weights)
    loss = torch.zeros((), dtype=torch.float64)
    for microbatch in range(MICROBATCHES):
        batch = make_batch(microbatch)
        loss = loss + objective(reference_forward(reference, batch, None), batch, UnitContext(0, microbatch), 0)
    loss.backward()
    return loss.item(), gradients_of(reference)


def in_chunks(model: PipelineModel, lengths: tuple[int, ...], parts: Any) -> float:
    model.zero_grad()
    run = ChunkedRun(model, lengths, parts, recomputed=(1,))
    run.all()
    return run.loss


def before_attention(model: PipelineModel) -> Any:
    """Its pieces, cut between qkv and attn of each of two layers."""
    return model.pieces[:3], model.pieces[3:8], model.pieces[8:]


def compare(rank: int, world_size: int) -> dict[str, Any]:
    """Largest relative difference and where, for every case; each rank cuts every other model."""
    set_parallel(tp=1)
    results: dict[str, Any] = {}
    expected = {name: expected_of(name) for name in VARIANTS}
    for name in list(VARIANTS)[rank::world_size]:
        model = make(name)
        for lengths, cut in (((12,), False), ((5, 4, 3), True)):
            loss = in_chunks(model, lengths, before_attention(model) if cut else [(piece,) for piece in model.pieces])
            results[f"{name}-{len(lengths)}-chunks-loss"] = relative(loss, expected[name][0])
            results[f"{name}-{len(lengths)}-chunks"] = worst(gradients_of(model), expected[name][1])
    set_parallel(tp=2)
    for name, (_, gradients) in expected.items():
        for split in (False, True):
            model = make(name, tp=2, sequence_parallel=split)
            in_chunks(model, (8, 4), before_attention(model))
            results[f"{name}-tp2-{split}"] = worst(whole(model, gradients_of(model), partial_sums=True), gradients)
    set_parallel(cp=2)
    for name, (_, gradients) in expected.items():
        model = make(name)
        for microbatch in range(MICROBATCHES):
            context = UnitContext(0, microbatch)
            own, unit = model.context.share(make_batch(microbatch), context)

            def value(logits: torch.Tensor, own: Microbatch = own, unit: UnitContext = unit) -> torch.Tensor:
                return objective(logits, own, unit, 0)

            run_parts([(model, model.pieces)], make_batch(microbatch), value, context)
        found = gradients_of(model)
        for gradient in found.values():
            torch.distributed.all_reduce(gradient)
        results[f"{name}-cp2"] = worst(found, gradients)
    return results
