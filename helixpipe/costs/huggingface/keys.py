"""Checks the keys of a Hugging Face model's config.json against a table of types and ranges."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from helixpipe.common.errors import CheckpointError
from helixpipe.common.ranges import MOST_EXPERTS, MOST_LAYERS, MOST_SAMPLES, MOST_TOKENS, MOST_WIDTH, Range
from helixpipe.program.json_fields import shown


class Kind(NamedTuple):
    """The kind of a value. types: of JSON, as Python reads them. valid: in words. range: of a number."""

    types: tuple[type, ...]
    valid: str
    range: Range = Range()

    def holds(self, value: Any) -> bool:
        """Whether a value is valid; true and false do not count as numbers."""
        if type(value) not in self.types:
            return False
        if type(value) not in (int, float):
            return True
        return self.range.holds(value) and (self is not _BASE or value == int(value))


def _whole(most: int, least: int = 1) -> Kind:
    return Kind((int,), f"a whole number from {least} to {most}", Range(least, at_most=most))


def _number(valid: str, range: Range) -> Kind:
    return Kind((int, float), f"a number {valid}", range)


_TRUTH = Kind((bool,), "true or false")
_TEXT = Kind((str,), "text")
_OBJECT = Kind((dict,), "an object")
_FACTOR = _number("from 1 to 1000000", Range(1, at_most=1e6))
_TURNS = _number("above 0 and at most 1000000", Range(more_than=0, at_most=1e6))
_LENGTH = _number("from 0 to 1000000", Range(0, at_most=1e6))
_SHARE = _number("above 0 and at most 1", Range(more_than=0, at_most=1))
_BASE = Kind((int, float), f"a whole number from 1 to {MOST_SAMPLES}", Range(1, at_most=MOST_SAMPLES))

MODEL: Mapping[str, Kind] = MappingProxyType(
    {
        "model_type": _TEXT,
        "num_hidden_layers": _whole(MOST_LAYERS),
        "hidden_size": _whole(MOST_WIDTH),
        "intermediate_size": _whole(MOST_WIDTH),
        "num_attention_heads": _whole(MOST_WIDTH),
        "num_key_value_heads": _whole(MOST_WIDTH),
        "head_dim": _whole(MOST_WIDTH),
        "max_position_embeddings": _whole(MOST_TOKENS),
        "vocab_size": _whole(MOST_TOKENS),
        "rms_norm_eps": _SHARE,
        "attention_dropout": _number("from 0 to below 1", Range(0, less_than=1)),
        "tie_word_embeddings": _TRUTH,
        "hidden_act": _TEXT,
        "attention_bias": _TRUTH,
        "mlp_bias": _TRUTH,
        "sliding_window": _whole(MOST_TOKENS, least=0),
        "use_sliding_window": _TRUTH,
        "max_window_layers": _whole(MOST_LAYERS, least=0),
        "layer_types": Kind((list,), "a list"),
        "num_local_experts": _whole(MOST_EXPERTS),
        "num_experts": _whole(MOST_EXPERTS, least=0),
        "num_experts_per_tok": _whole(MOST_EXPERTS),
        "moe_intermediate_size": _whole(MOST_WIDTH),
        "norm_topk_prob": _TRUTH,
        "decoder_sparse_step": _whole(MOST_LAYERS),
        "mlp_only_layers": Kind((list,), "a list"),
        "n_routed_experts": _whole(MOST_EXPERTS),
        "n_shared_experts": _whole(MOST_EXPERTS),
        "n_group": _whole(MOST_EXPERTS),
        "topk_group": _whole(MOST_EXPERTS),
        "topk_method": _TEXT,
        "routed_scaling_factor": _TURNS,
        "first_k_dense_replace": _whole(MOST_LAYERS, least=0),
        "moe_layer_freq": _whole(MOST_LAYERS),
        "q_lora_rank": _whole(MOST_WIDTH),
        "kv_lora_rank": _whole(MOST_WIDTH),
        "qk_nope_head_dim": _whole(MOST_WIDTH),
        "qk_rope_head_dim": _whole(MOST_WIDTH, least=2),
        "v_head_dim": _whole(MOST_WIDTH),
        "rope_interleave": _TRUTH,
        "router_jitter_noise": _number("from 0 to 1", Range(0, at_most=1)),
        "pretraining_tp": _whole(MOST_WIDTH),
        "rope_theta": _BASE,
        "partial_rotary_factor": _SHARE,
        "rope_scaling": _OBJECT,
        "rope_parameters": _OBJECT,
    }
)
"""Keys of config.json that are read."""

ROPE: Mapping[str, Kind] = MappingProxyType(
    {
        "rope_type": _TEXT,
        "type": _TEXT,
        "rope_theta": _BASE,
        "partial_rotary_factor": _SHARE,
        "factor": _FACTOR,
        "low_freq_factor": _TURNS,
        "high_freq_factor": _TURNS,
        "original_max_position_embeddings": _whole(MOST_TOKENS),
        "attention_factor": _FACTOR,
        "mscale": _LENGTH,
        "mscale_all_dim": _LENGTH,
        "beta_fast": _TURNS,
        "beta_slow": _TURNS,
        "truncate": _TRUTH,
    }
)
"""The keys of `rope_scaling` and `rope_parameters`."""


def check_keys(config: Mapping[str, Any], where: Path | str) -> None:
    """Raise CheckpointError, one sentence with the file, the key, its value and what is valid, for a value of another
    type or out of range, and for numbers that do not fit each other."""
    _check(config, MODEL, where, "")
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name) or {}
        _check(rope, ROPE, where, f"{name}.")
        low, high = rope.get("low_freq_factor"), rope.get("high_freq_factor")
        if low is not None and high is not None and low >= high:
            raise _wrong(where, f"{name}.low_freq_factor", low, f"below its high_freq_factor {shown(high)}")
        longest, original = config.get("max_position_embeddings"), rope.get("original_max_position_embeddings")
        yarn = rope.get("rope_type", rope.get("type")) == "yarn"
        if yarn and "factor" not in rope and longest and original and original > longest:
            key = f"{name}.original_max_position_embeddings"
            raise _wrong(where, key, original, f"at most max_position_embeddings {longest}, as there is no factor")
    heads, groups, hidden = (config.get(k) for k in ("num_attention_heads", "num_key_value_heads", "hidden_size"))
    if heads is not None and groups is not None and heads % groups:
        raise _wrong(where, "num_key_value_heads", groups, f"a divisor of num_attention_heads {heads}")
    if heads is not None and hidden is not None and config.get("head_dim") is None and hidden % heads:
        raise _wrong(where, "num_attention_heads", heads, f"a divisor of hidden_size {hidden}, as there is no head_dim")
    channels = config.get("head_dim") or (hidden or 0) // (heads or 1)
    if channels % 2:
        key, value = ("head_dim", channels) if config.get("head_dim") else ("hidden_size", hidden)
        raise _wrong(where, key, value, f"such that heads have an even number of channels, not {channels}")


def _check(values: Mapping[str, Any], kinds: Mapping[str, Kind], where: Path | str, inside: str) -> None:
    for key, kind in kinds.items():
        value = values.get(key)
        if value is not None and not kind.holds(value):
            raise _wrong(where, inside + key, value, kind.valid)


def _wrong(where: Path | str, key: str, value: Any, valid: str) -> CheckpointError:
    return CheckpointError(f"{where}: {key} must be {valid}, not {shown(value)}.")
