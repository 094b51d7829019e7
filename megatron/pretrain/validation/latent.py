"""Checks of multi-latent attention."""

from __future__ import annotations

from helixpipe.common.errors import UserError
from megatron.pretrain.config import Config


def latent_attention(config: Config) -> Config:
    """Check that the flags of multi-latent attention fit the others; settle how it rotates."""
    model, parallel = config.model, config.parallel
    if not model.multi_latent_attention:
        if model.rope_type is not None:
            raise UserError(
                f"--rope-type {model.rope_type} is for --multi-latent-attention; otherwise give "
                f"--position-embedding-type {model.rope_type}."
            )
        return config
    if model.qk_pos_emb_head_dim % 2:
        raise UserError(f"--qk-pos-emb-head-dim {model.qk_pos_emb_head_dim} must be even: pairs of them are rotated.")
    for flag, given, why in (
        ("--group-query-attention", model.group_query_attention, "it shares keys and values by latents"),
        ("--add-qkv-bias", model.add_qkv_bias, "its projections have no bias"),
        ("--window-size", model.window_size is not None, "it attends to all tokens of a document"),
        ("--no-rope-freq", model.no_rope_freq is not None, "all of its layers rotate"),
        ("--attention-output-gate", model.attention_output_gate, "megatron-core has no gate for it"),
        ("--rotary-interleaved", model.rotary_interleaved, "it rotates neighbouring channels in any case"),
        (
            f"--position-embedding-type {model.position_embedding_type}",
            model.position_embedding_type == "yarn",
            "give rope, and --rope-type yarn",
        ),
        (
            f"--context-parallel-size {parallel.context_parallel_size}",
            parallel.context_parallel_size > 1,
            "latents are not passed between context-parallel ranks",
        ),
        ("--overlap-tp-comm halves", parallel.overlap_tp_comm == "halves", "its projections do not run in halves"),
    ):
        if given:
            raise UserError(f"{flag} cannot be had with --multi-latent-attention: {why}.")
    return config.replace("model", rope_type=model.rope_type or "yarn")
