"""The projections of multi-latent attention, under megatron-core's names (`MLASelfAttention`).

Down-projections are of few channels: every tensor-parallel rank has all of their weights and computes them for its own
rows, as with megatron-core's Transformer Engine layers, so that what ranks gather is as narrow as the latents.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import cast

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from helixpipe.common.errors import UserError
from helixpipe.costs.models import HALVES
from helixpipe.model.attention.latent_attention import Expansion
from helixpipe.model.attention.rotary import Rotary
from helixpipe.model.attention.sinks import LEARNABLE, SoftmaxOffset
from helixpipe.model.linear import ReplicatedLinear, output_projection
from helixpipe.model.norms import make_norm
from helixpipe.model.options import GPTOptions, window_of
from helixpipe.model.rope_scaling import RopeScaling
from helixpipe.program.stages import Piece

LATENT_CHECKPOINT_NAMES = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""Norms in megatron-core's checkpoints of layers with multi-latent attention; that before it has its own name."""


def local_name(name: str, latent: bool) -> str:
    """Return the name in a checkpoint of megatron-core's local layers.

    Args:
        name: The name in a checkpoint of its layers of Transformer Engine, which is the one used here.
        latent: Whether the model has multi-latent attention, whose norms local layers save under names of their own.
            Without it they save the norm before experts as the norm before an MLP.
    """
    for own, of_linear in LATENT_CHECKPOINT_NAMES.items():
        if latent:
            name = name.replace(of_linear, own)
        elif own == "pre_mlp_layernorm.":
            name = name.replace(own, of_linear)
    return name


class LatentSelfAttention(MegatronModule):
    """Linear layers and norms around and in core attention; `qkv`, `attn` and `proj` may be on different ranks. norm:
    the kernel of norms."""

    def __init__(
        self,
        config: MLATransformerConfig,
        index: int,
        kinds: Collection[str],
        tp_group: torch.distributed.ProcessGroup,
        draw: Callable[[str], AbstractContextManager[None]],
        norm: str,
    ):
        super().__init__(config)
        self.tp_group = tp_group
        self._shared, self._rank = config.qk_pos_emb_head_dim, config.kv_lora_rank
        self._channels = config.qk_head_dim + self._shared
        self._values = config.v_head_dim
        heads = config.num_attention_heads
        if "qkv" in kinds:
            with draw(str(Piece("qkv", index))):
                if config.q_lora_rank is None:
                    self.linear_q_proj = self._column(config.hidden_size, heads * self._channels)
                else:
                    self.linear_q_down_proj = ReplicatedLinear(config, config.hidden_size, config.q_lora_rank)
                    self.linear_q_up_proj = self._column(config.q_lora_rank, heads * self._channels)
                self.linear_kv_down_proj = ReplicatedLinear(config, config.hidden_size, self._rank + self._shared)
            if config.qk_layernorm:
                if config.q_lora_rank is not None:
                    self.q_layernorm = self._norm(norm, config.q_lora_rank)
                self.kv_layernorm = self._norm(norm, self._rank)
        if "attn" in kinds:
            with draw(str(Piece("attn", index))):
                self.linear_kv_up_proj = self._column(self._rank, heads * (config.qk_head_dim + self._values))
                if config.softmax_type == LEARNABLE:
                    self.core_attention = SoftmaxOffset(config, tp_group)
        if "proj" in kinds:
            with draw(str(Piece("proj", index))):
                self.linear_proj = output_projection(config, heads * self._values, tp_group)

    def _column(self, inputs: int, outputs: int) -> ColumnParallelLinear:
        return ColumnParallelLinear(
            inputs,
            outputs,
            config=self.config,
            init_method=self.config.init_method,
            bias=False,
            gather_output=False,
            skip_bias_add=False,
            tp_group=self.tp_group,
        )

    def _norm(self, kernel: str, channels: int) -> torch.nn.Module:
        """Of this rank's rows, as norms of hidden states are."""
        norm = make_norm(self.config, kernel, channels)
        for parameter in norm.parameters():
            parameter.sequence_parallel = self.config.sequence_parallel  # type: ignore[attr-defined]
        return norm

    def query_key_latent(self, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states [s, b, h], with sequence parallelism [s / tp, b, h], to [s, b, heads / tp, d] query,
        [s, b, 1, shared] key and [s, b, 1, rank] latent; nothing is rotated yet."""
        config = cast(MLATransformerConfig, self.config)
        if config.q_lora_rank is None:
            query = self.linear_q_proj(normed)[0]
        else:
            down = self.linear_q_down_proj(normed)
            query = self.linear_q_up_proj(self.q_layernorm(down) if config.qk_layernorm else down)[0]
        latent, key = self.linear_kv_down_proj(normed).split([self._rank, self._shared], dim=-1)
        if config.qk_layernorm:
            latent = self.kv_layernorm(latent)
        if self.tp_group.size() > 1:
            both = self._on_every_rank(torch.cat((latent, key), dim=-1))
            latent, key = both.split([self._rank, self._shared], dim=-1)
        return query.unflatten(-1, (-1, self._channels)), key[:, :, None], latent[:, :, None]

    def _on_every_rank(self, rows: Tensor) -> Tensor:
        """All rows; in the backward the gradients that all ranks' heads give are summed."""
        whole: Tensor
        if self.config.sequence_parallel:
            whole = gather_from_sequence_parallel_region(rows, tensor_parallel_output_grad=True, group=self.tp_group)
        else:
            whole = copy_to_tensor_model_parallel_region(rows, group=self.tp_group)
        return whole

    def expansion(self) -> Expansion:
        """How `attn` makes keys and values of latents."""
        own = self._channels - self._shared
        return Expansion(self.linear_kv_up_proj.weight, own, self._shared, self._values)


def check_latent(config: TransformerConfig, gpt: GPTOptions, context_parallel: int) -> None:
    """Raise UserError, naming the flag, for what multi-latent attention cannot be had with; nothing without it."""
    if not config.multi_latent_attention:
        return
    if not isinstance(config, MLATransformerConfig):
        raise UserError("--multi-latent-attention needs megatron-core's MLATransformerConfig, which has its sizes.")
    for flag, refused, why in (
        (f"--context-parallel-size {context_parallel}", context_parallel > 1, "latents are not passed between ranks"),
        ("--overlap-tp-comm halves", gpt.overlap_tp_comm == HALVES, "its projections do not run in halves"),
        ("--window-size", window_of(config) is not None, "it attends to all tokens"),
        ("--no-rope-freq", config.no_rope_freq is not None, "all of its layers rotate"),
        ("--position-embedding-type yarn", gpt.position_embedding_type == "yarn", "--rope-type says it instead"),
        ("--rope-type", config.rope_type not in ("rope", "yarn"), "valid values are rope and yarn"),
    ):
        if refused:
            raise UserError(f"{flag} cannot be had with --multi-latent-attention: {why}.")


def make_rotary(config: TransformerConfig, gpt: GPTOptions, kernel: str) -> Rotary | None:
    """The rotary embeddings of a model's layers; None where none has any. kernel: as of `Rotary`."""
    rotates = gpt.rotates or config.multi_latent_attention
    return Rotary(config, positions(config, gpt), kernel) if rotates else None


def positions(config: TransformerConfig, gpt: GPTOptions) -> GPTOptions:
    """Return the options with the rotary embeddings of multi-latent attention's own configuration, if it is used."""
    if not isinstance(config, MLATransformerConfig):
        return gpt
    if config.rope_type == "rope":
        return replace(
            gpt, rotary_percent=config.rotary_percent, rotary_base=config.rotary_base, rope_scaling=RopeScaling()
        )
    scaling = RopeScaling(
        "yarn",
        config.rotary_scaling_factor,
        original_length=config.original_max_position_embeddings,
        beta_fast=config.beta_fast,
        beta_slow=config.beta_slow,
        mscale=config.mscale,
        mscale_all_dim=config.mscale_all_dim,
    )
    return replace(gpt, rotary_percent=1.0, rotary_base=config.rotary_base, rope_scaling=scaling)
