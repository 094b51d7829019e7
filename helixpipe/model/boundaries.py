"""Shapes of what crosses a cut of the model, so that no rank ever has to ask another for them."""

from __future__ import annotations

import torch
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from helixpipe.costs.piece_kinds import inputs_after
from helixpipe.model.split_head import SUMS
from helixpipe.program.stages import HEAD_MTP, HEAD_PART, Piece


def payload_shapes(
    config: TransformerConfig, after: Piece, micro_batch_size: int, length: int, context_parallel: int = 1
) -> tuple[torch.Size, ...]:
    """Shapes, on one tensor-parallel rank, of the tensors that cross the cut after a piece, in their order.

    After head it is the loss sum, a scalar; after a part of it the sums that it makes of its logits. `length` is the
    chunk's number of tokens, which so many context-parallel ranks share.
    """
    length //= context_parallel
    tp = config.tensor_model_parallel_size
    rows = length // tp if config.sequence_parallel else length
    heads, channels = config.num_attention_heads // tp, config.kv_channels
    assert channels is not None and config.num_query_groups is not None  # TransformerConfig fills them in
    key = value = config.num_query_groups // tp, channels
    values = channels
    if isinstance(config, MLATransformerConfig):
        key, value, values = (1, config.qk_pos_emb_head_dim), (1, config.kv_lora_rank), config.v_head_dim
        channels = config.qk_head_dim + config.qk_pos_emb_head_dim
    if after.kind in ("head", HEAD_MTP):
        return (torch.Size(()),)
    if after.kind == HEAD_PART:
        return (torch.Size((SUMS, length, micro_batch_size)),)
    shapes = {
        "hidden": torch.Size((rows, micro_batch_size, config.hidden_size)),
        "query": torch.Size((length, micro_batch_size, heads, channels * (1 + config.attention_output_gate))),
        "key": torch.Size((length, micro_batch_size, *key)),
        "value": torch.Size((length, micro_batch_size, *value)),
        "attention": torch.Size((length, micro_batch_size, heads * values)),
    }
    return tuple(shapes[name] for name in inputs_after(after.kind))
