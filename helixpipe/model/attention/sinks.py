"""Attention sinks: of each head a logit that softmax has beside those of the keys, and that has no value.

`--softmax-type off-by-one` has 0 in all heads (Miller, "Attention Is Off By One", 2023), `learnable` a parameter each
(Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2024; OpenAI, gpt-oss, 2025).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint

VANILLA, LEARNABLE = "vanilla", "learnable"
"""Values of `--softmax-type`: without sinks, and with those above."""


class SoftmaxOffset(MegatronModule):
    """The learned logits of a layer's heads, [heads / tp], under megatron-core's name. Every tensor-parallel size draws
    the same."""

    def __init__(self, config: TransformerConfig, tp_group: dist.ProcessGroup):
        super().__init__(config)
        self.tp_group = tp_group
        on = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        drawn = torch.zeros(1, config.num_attention_heads, device=on)  # in float32, as megatron-core draws weights
        if config.perform_initialization:
            assert config.init_method is not None  # TransformerConfig fills it in
            config.init_method(drawn)
        own = drawn[0].chunk(tp_group.size())[tp_group.rank()]
        self.softmax_offset = torch.nn.Parameter(own.to(config.params_dtype, copy=True))
        set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """The rank's heads."""
        state: ShardedStateDict = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )
        return state
