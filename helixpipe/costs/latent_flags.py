"""Flags of multi-latent attention, under Megatron-LM's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from helixpipe.common.flags import option
from helixpipe.common.ranges import MOST_WIDTH


@dataclass(frozen=True)
class LatentFlags:
    """Sizes of multi-latent attention (MLA, DeepSeek-V2), whose rotary embeddings are YaRN's unless flags say so."""

    multi_latent_attention: bool = option(False, "Multi-latent attention: keys and values are made of small latents.")
    q_lora_rank: int | None = option(
        None,
        "MLA: channels of what queries are made of (default: queries are made of the hidden states).",
        at_least=1,
        at_most=MOST_WIDTH,
    )
    kv_lora_rank: int = option(32, "MLA: channels of a latent.", at_least=1, at_most=MOST_WIDTH)
    qk_head_dim: int = option(
        128, "MLA: channels of a head's query and key that are not rotated.", at_least=1, at_most=MOST_WIDTH
    )
    qk_pos_emb_head_dim: int = option(
        64, "MLA: channels that are rotated; all heads share this part of their keys.", at_least=2, at_most=MOST_WIDTH
    )
    v_head_dim: int = option(128, "MLA: channels of a head's value.", at_least=1, at_most=MOST_WIDTH)
    rope_type: Literal["rope", "yarn"] | None = option(
        None, "MLA: how it rotates, plainly or with a context extended as YaRN does (default: yarn)."
    )
