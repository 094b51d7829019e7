"""Floating-point operations of training, for the throughput in log lines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from helixpipe.costs.layer_patterns import kinds_of_layers, mixed_layers, parse_frequency, shape_fields
from helixpipe.program.stages import WINDOW
from helixpipe.program.workload import Extent, attention_pairs
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
    qkv = hidden * (query * (1 + model.attention_output_gate) + 2 * key_value)
    of_pair = 2 * query
    shape = shape_fields(model.window_size, model.window_attn_skip_freq, model.no_rope_freq)
    kinds = kinds_of_layers(layers, shape["windowed"], ())
    whole = (Extent(length, 0),)
    pairs = [attention_pairs(whole, shape["window"] if WINDOW in each else 0) for each in kinds]
    projection = query * hidden
    if model.multi_latent_attention:
        qkv, of_pair, projection = _latent(model, hidden, heads)
    mlps = [(3 if model.swiglu else 2) * hidden * ffn] * layers
    if model.num_experts is not None:
        pattern = mixed_layers(parse_frequency("--moe-layer-freq", model.moe_layer_freq) or 1)
        mlps = [_experts(model, hidden) if pattern[at % len(pattern)] else mlp for at, mlp in enumerate(mlps)]
    every = [qkv + projection + mlp + of_pair * seen / length for mlp, seen in zip(mlps, pairs, strict=True)]
    head = hidden * padded_vocab_size
    # a further token: a layer such as the last, the layer that joins its embedding, and the output layer again
    further = (model.mtp_num_layers or 0) * (every[-1] + 2 * hidden * hidden + head)
    return 3 * 2 * length * (sum(every) + head + further)


def flops_of_document(model: ModelConfig, padded_vocab_size: int) -> Callable[[int], float]:
    """Return a function that gives the operations of one document by its number of tokens."""
    return cache(lambda tokens: flops_per_sample(replace(model, seq_length=tokens), padded_vocab_size))


def _latent(model: ModelConfig, hidden: int, heads: int) -> tuple[int, int, int]:
    """Return the multiply-adds of multi-latent attention: of one token before it, of a query and a key, and of one
    token's output projection."""
    own, shared, value = model.qk_head_dim, model.qk_pos_emb_head_dim, model.v_head_dim
    query, rank = heads * (own + shared), model.q_lora_rank
    to_query = hidden * query if rank is None else rank * (hidden + query)
    to_latent = hidden * (model.kv_lora_rank + shared)
    return (
        to_query + to_latent + model.kv_lora_rank * heads * (own + value),
        query + heads * value,
        heads * value * hidden,
    )


def _experts(model: ModelConfig, hidden: int) -> int:
    """Return the multiply-adds of one token in a layer with experts: its own ones, shared ones and the router."""
    inner = model.moe_router_topk * _given(model.moe_ffn_hidden_size) + (model.moe_shared_expert_intermediate_size or 0)
    return (3 if model.swiglu else 2) * hidden * inner + hidden * _given(model.num_experts)


def _given(value: int | None) -> int:
    if value is None:
        raise ValueError("the configuration was not validated")
    return value
