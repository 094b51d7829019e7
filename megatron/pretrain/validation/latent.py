"""Checks of multi-latent attention."""

from __future__ import annotations

from helixpipe.common.errors import UserError
from helixpipe.costs.conflicts import with_latent_attention
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
    cp, conflicts = parallel.context_parallel_size, []
    if model.rotary_interleaved:
        conflicts.append(("--rotary-interleaved", "it rotates neighbouring channels in any case"))
    if model.position_embedding_type == "yarn":
        conflicts.append(("--position-embedding-type yarn", "give rope, and --rope-type yarn"))
    conflicts += with_latent_attention(
        grouped=model.group_query_attention,
        qkv_bias=model.add_qkv_bias,
        windows=model.window_size is not None,
        unrotated=model.no_rope_freq is not None,
        output_gate=model.attention_output_gate,
        context=f"--context-parallel-size {cp}" * (cp > 1),
        overlap=parallel.overlap_tp_comm,
    )
    for flag, why in conflicts:
        raise UserError(f"{flag} cannot be had with --multi-latent-attention: {why}.")
    return config.replace("model", rope_type=model.rope_type or "yarn")
