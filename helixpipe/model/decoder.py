"""The layers of a model that a rank holds."""

from __future__ import annotations

from typing import Any, cast

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, sharded_state_dict_default

from helixpipe.model.layers import Layer


class Decoder(MegatronModule):
    """The layers, by global index, and the final norm, named and checkpointed as megatron-core's TransformerBlock."""

    def __init__(self, config: TransformerConfig, tp_group: torch.distributed.ProcessGroup):
        super().__init__(config)
        self.tp_group = tp_group
        self.layers = torch.nn.ModuleDict()
        self.final_layernorm: Any = None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Keys without layer numbers and a leading axis of layers; numbered keys where `metadata` asks for them, and
        where some layers have experts and others not."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        numbered = metadata.get("non_homogeneous_layers") or metadata.get("singleton_local_shards")
        numbered = numbered or self.config.moe_layer_freq != 1
        state: ShardedStateDict = {}
        for index, child in self.layers.items():
            layer = cast(Layer, child)
            own_prefix = f"{prefix}layers.{index}."
            offsets = () if numbered else ((0, int(index), self.config.num_layers),)
            layer_state = layer.sharded_state_dict(own_prefix, offsets, metadata)
            replace_prefix_for_sharding(layer_state, own_prefix, own_prefix if numbered else f"{prefix}layers.")
            state.update(layer_state)
        if self.final_layernorm is not None:
            final_prefix = f"{prefix}final_layernorm."
            state.update(
                sharded_state_dict_default(
                    self.final_layernorm, final_prefix, sharded_offsets, metadata, tp_group=self.tp_group
                )
            )
        return state
