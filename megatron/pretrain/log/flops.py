"""Floating-point operations of training, for the throughput in log lines."""

from __future__ import annotations

from helixpipe.costs.layer_patterns import kinds_of_layers, mixed_layers, parse_frequency, shape_fields
from helixpipe.costs.models import attention_pairs
from helixpipe.program.stages import WINDOW
from helixpipe.program.workload import Extent
from megatron.pretrain.config import ModelConfig


def flops_per_sample(model: ModelConfig, padded_vocab_size: int) -> float:
    """Return the floating-point operations of forward and backward of one sequence of a validated model.

    Counted as in Megatron-LM's log (and Korthikanti et al., 2022): matrix products only, a multiply and an add each;
    the backward is twice the forward; causal attention does half of the s x s products, and of those to a window the
    ones inside it; recomputation does not count.
    """
    layers, hidden, ffn, heads = (
        _given(value)
        for value in (model.num_layers, model.hidden_size, model.ffn_hidden_size, model.num_attention_heads)
    )
    length, channels = _given(model.seq_length), _given(model.kv_channels)
    groups = model.num_query_groups if model.group_query_attention else heads
    query, key_value = heads * channels, groups * channels
    # multiply-adds of one token
    qkv = hidden * (query + 2 * key_value)
    shape = shape_fields(model.window_size, model.window_attn_skip_freq, model.no_rope_freq)
    kinds = kinds_of_layers(layers, shape["windowed"], ())
    whole = (Extent(length, 0),)
    pairs = [attention_pairs(whole, shape["window"] if WINDOW in each else 0) for each in kinds]
    projection = query * hidden
    mlps = [(3 if model.swiglu else 2) * hidden * ffn] * layers
    if model.num_experts is not None:
        pattern = mixed_layers(parse_frequency("--moe-layer-freq", model.moe_layer_freq) or 1)
        mlps = [_experts(model, hidden) if pattern[at % len(pattern)] else mlp for at, mlp in enumerate(mlps)]
    every = [qkv + projection + mlp + 2 * query * seen / length for mlp, seen in zip(mlps, pairs, strict=True)]
    head = hidden * padded_vocab_size
    # a further token: a layer such as the last, the layer that joins its embedding, and the output layer again
    further = (model.mtp_num_layers or 0) * (every[-1] + 2 * hidden * hidden + head)
    return 3 * 2 * length * (sum(every) + head + further)


def _experts(model: ModelConfig, hidden: int) -> int:
    """Return the multiply-adds of one token in a layer with experts: its own ones, shared ones and the router."""
    inner = model.moe_router_topk * _given(model.moe_ffn_hidden_size) + (model.moe_shared_expert_intermediate_size or 0)
    return (3 if model.swiglu else 2) * hidden * inner + hidden * _given(model.num_experts)


def _given(value: int | None) -> int:
    if value is None:
        raise ValueError("the configuration was not validated")
    return value
