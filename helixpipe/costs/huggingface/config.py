"""A Hugging Face model's config.json as this program's flags, and back.

Four families are one model with small differences: Llama (2, 3, 3.1, 3.2), Mistral, Qwen2 (2.5), whose queries, keys
and values have a bias, and Qwen3, which normalizes those of each head. Mixtral and Qwen3-MoE are the second and the
last with experts. DeepSeek-V2 and DeepSeek-V3 have multi-latent attention besides (`latent.py`). Facts: the
`configuration_*.py` and `modeling_rope_utils.py` of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from helixpipe.common.errors import CheckpointError
from helixpipe.common.json_values import parse_json
from helixpipe.costs.huggingface.experts import MIXTRAL, QWEN3, arguments_of_experts, check_experts, expert_entries
from helixpipe.costs.huggingface.keys import check_keys
from helixpipe.costs.huggingface.latent import (
    DEEPSEEK,
    DEEPSEEK2,
    DEEPSEEK3,
    arguments_of_latent,
    check_latent,
    latent_entries,
    rotations,
)
from helixpipe.costs.layer_patterns import kinds_of_layers, shape_fields
from helixpipe.program.stages import WINDOW


class Family(NamedTuple):
    """A family of models. architecture: its class in transformers."""

    architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False
    latent: bool = False
    expert_bias: bool = False


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family("LlamaForCausalLM"),
        "mistral": Family("MistralForCausalLM"),
        "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True),
        "qwen3": Family("Qwen3ForCausalLM", qk_norm=True),
        MIXTRAL: Family("MixtralForCausalLM", experts=True),
        QWEN3: Family("Qwen3MoeForCausalLM", qk_norm=True, experts=True),
        DEEPSEEK2: Family("DeepseekV2ForCausalLM", qk_norm=True, experts=True, latent=True),
        DEEPSEEK3: Family("DeepseekV3ForCausalLM", qk_norm=True, experts=True, latent=True, expert_bias=True),
    }
)
"""The supported families by `model_type`."""

PLAIN_ROPE: Mapping[str, Any] = MappingProxyType(
    {"rotary_seq_len_interpolation_factor": None, "use_rope_scaling": False, "position_embedding_type": "rope"}
)


CONFIG = "config.json"


def read_config(path: Path) -> dict[str, Any]:
    """Read a folder's config.json, or that file. Raises CheckpointError."""
    path = path if path.suffix == ".json" else path / CONFIG
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from None
    except ValueError:
        raise CheckpointError(f"{path} is not JSON.") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is not a JSON object.")
    return config


def arguments_of(config: Mapping[str, Any], where: Path | str) -> dict[str, Any]:
    """Return the model's flags, by field. Raises CheckpointError, which names `where`, for an unsupported model."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise CheckpointError(f"{where} holds a model of type {kind!r}; those read are {', '.join(FAMILIES)}.")
    config = _without_nulls(config)
    check_keys(config, where)
    _refuse(config, kind, where)
    try:
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        groups = config.get("num_key_value_heads") or heads
        arguments = {
            "num_layers": config["num_hidden_layers"],
            "hidden_size": hidden,
            "ffn_hidden_size": config["intermediate_size"],
            "num_attention_heads": heads,
            "group_query_attention": groups != heads,
            "num_query_groups": groups if groups != heads else 1,
            "kv_channels": config.get("head_dim") or hidden // heads,
            "max_position_embeddings": config["max_position_embeddings"],
            "normalization": "RMSNorm",
            "norm_epsilon": float(config["rms_norm_eps"]),
            "swiglu": True,
            "squared_relu": False,
            "add_bias_linear": False,
            "add_qkv_bias": FAMILIES[kind].qkv_bias,
            "qk_layernorm": FAMILIES[kind].qk_norm,
            "apply_layernorm_1p": False,
            "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
            "attention_dropout": float(config.get("attention_dropout") or 0.0),
            "hidden_dropout": 0.0,
            "vocab_size": config["vocab_size"],
            "padded_vocab_size": config["vocab_size"],
        }
        arguments |= arguments_of_experts(config, kind, where) | arguments_of_latent(config, kind, where)
        return {**arguments, **_windows_of(config, kind, where), **rotations(_rope_of(config, where), kind)}
    except KeyError as error:
        raise CheckpointError(f"{where} has no {error.args[0]!r}.") from None


def _without_nulls(config: Mapping[str, Any]) -> dict[str, Any]:
    """Remove keys that are null, which mean the same as absent ones."""
    said = {key: value for key, value in config.items() if value is not None}
    return {key: _without_nulls(value) if isinstance(value, dict) else value for key, value in said.items()}


def _refuse(config: Mapping[str, Any], kind: str, where: Path | str) -> None:
    for wrong, what in (
        (config.get("hidden_act", "silu") not in ("silu", "swish"), f"hidden_act {config.get('hidden_act')!r}"),
        (kind != "qwen2" and config.get("attention_bias"), "attention_bias"),
        (config.get("mlp_bias"), "mlp_bias"),
        (config.get("quantization_config") is not None, "quantization_config: quantized weights are not read"),
        ((config.get("pretraining_tp") or 1) != 1, f"pretraining_tp {config.get('pretraining_tp')}"),
    ):
        if wrong:
            raise CheckpointError(f"{where} holds a model that is not supported ({what}).")


_FULL, _SLIDING = "full_attention", "sliding_attention"


def _windows_of(config: Mapping[str, Any], kind: str, where: Path | str) -> dict[str, Any]:
    """Return the flags of windows: Mistral's are of all layers, Qwen's of those in `layer_types`, or in older files of
    those from `max_window_layers` on. A sliding_window of w is a token's own and the w - 1 before it."""
    window, layers = config.get("sliding_window"), config["num_hidden_layers"]
    arguments: dict[str, Any] = {"window_size": None, "window_attn_skip_freq": None, "no_rope_freq": None}
    if (
        kind in (MIXTRAL, QWEN3, *DEEPSEEK)
        or not window
        or not (kind == "mistral" or (kind != "llama" and config.get("use_sliding_window", False)))
    ):
        return arguments
    types = config.get("layer_types")
    if types is None:
        first = 0 if kind == "mistral" else config.get("max_window_layers", 28)
        types = [_FULL] * min(first, layers) + [_SLIDING] * max(layers - first, 0)
    if len(types) != layers or not all(each in (_FULL, _SLIDING) for each in types):
        raise CheckpointError(
            f"{where} has layer_types that are not {layers} times {_FULL} or {_SLIDING}, for each of its layers."
        )
    if _SLIDING not in types:
        return arguments
    pattern = None if _FULL not in types else str([int(each == _SLIDING) for each in types]).replace(" ", "")
    return {**arguments, "window_size": f"{window - 1},0", "window_attn_skip_freq": pattern}


def _window_entries(arguments: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """And back."""
    layers = arguments["num_layers"]
    fields = shape_fields(arguments.get("window_size"), arguments.get("window_attn_skip_freq"), None, layers)
    if not fields["window"]:
        return {"sliding_window": None} if kind == "mistral" else {}
    types = [_SLIDING if WINDOW in own else _FULL for own in kinds_of_layers(layers, fields["windowed"], ())]
    if kind == "mistral":
        return {"sliding_window": fields["window"]}
    first = types.index(_SLIDING) if _SLIDING in types else layers
    return {
        "use_sliding_window": True,
        "sliding_window": fields["window"],
        "max_window_layers": first,
        "layer_types": types,
    }


def _rope_of(config: Mapping[str, Any], where: Path | str) -> dict[str, Any]:
    """Return the flags of the rotary embeddings: of `rope_parameters`, or in older files of `rope_theta` and
    `rope_scaling`.
    """
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    base = rope.get("rope_theta") or config.get("rope_theta") or 10000
    percent = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    arguments: dict[str, Any] = {
        "rotary_base": int(base),
        "rotary_percent": float(percent),
        "rotary_interleaved": False,
    }
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return {**arguments, **PLAIN_ROPE}
    if kind == "linear":
        return {**arguments, **PLAIN_ROPE, "rotary_seq_len_interpolation_factor": float(rope["factor"])}
    if kind == "llama3":
        return {
            **arguments,
            **PLAIN_ROPE,
            "use_rope_scaling": True,
            "rope_scaling_factor": float(rope["factor"]),
            "rope_scaling_low_freq_factor": float(rope["low_freq_factor"]),
            "rope_scaling_high_freq_factor": float(rope["high_freq_factor"]),
            "rope_scaling_original_max_position_embeddings": rope["original_max_position_embeddings"],
        }
    if kind == "yarn":
        return {**arguments, **PLAIN_ROPE, **_yarn_of(config, rope)}
    raise CheckpointError(
        f"{where} has rotary embeddings of type {kind!r}; those read are default, linear, llama3 and yarn."
    )


def _yarn_of(config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    longest = config["max_position_embeddings"]
    original = rope.get("original_max_position_embeddings") or longest
    factor = float(rope.get("factor") or longest / original)
    scales = (1.0, 0.0)
    if rope.get("attention_factor") is not None:
        length = float(rope["attention_factor"])
        scales = ((length - 1) / (0.1 * math.log(factor)) if factor > 1 else 1.0, 0.0)
    elif rope.get("mscale") and rope.get("mscale_all_dim"):
        scales = float(rope["mscale"]), float(rope["mscale_all_dim"])
    return {
        "position_embedding_type": "yarn",
        "rotary_scaling_factor": factor,
        "yarn_original_max_position_embeddings": original,
        "yarn_beta_fast": float(rope.get("beta_fast") or 32),
        "yarn_beta_slow": float(rope.get("beta_slow") or 1),
        "yarn_correction_range_round_to_int": bool(rope.get("truncate", True)),
        "mscale": scales[0],
        "mscale_all_dim": scales[1],
    }


# ------------------------------------------------------------------------------------------------------------- and back


def config_of(arguments: Mapping[str, Any], dtype: str, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a config.json for these flags. like: one of the same family, whose other entries are kept.

    Raises CheckpointError for a model that none of the families has.
    """
    check_exportable(arguments)
    own = _family(arguments)
    kind = str((like or {}).get("model_type") or own)
    if (own, kind) == ("mistral", "llama"):
        raise CheckpointError(f"the checkpoint's model attends to a window, as no model of type {kind} does.")
    if FAMILIES[kind][1:] != FAMILIES[own][1:]:
        raise CheckpointError(
            f"the checkpoint's model is of type {own}, by its biases and norms of queries and keys, and cannot be "
            f"written like one of type {kind}."
        )
    heads = arguments["num_attention_heads"]
    config = {k: v for k, v in (like or {}).items() if k not in ("rope_theta", "rope_scaling", "torch_dtype")}
    if like is None:
        config = {"architectures": [FAMILIES[kind].architecture], "model_type": kind, "use_cache": True}
    return {
        **config,
        "attention_dropout": arguments.get("attention_dropout") or 0.0,
        "dtype": dtype,
        "head_dim": arguments["kv_channels"],
        "hidden_act": "silu",
        "hidden_size": arguments["hidden_size"],
        "intermediate_size": arguments["ffn_hidden_size"],
        "max_position_embeddings": arguments["max_position_embeddings"],
        "num_attention_heads": heads,
        "num_hidden_layers": arguments["num_layers"],
        "num_key_value_heads": arguments["num_query_groups"] if arguments.get("group_query_attention") else heads,
        "rms_norm_eps": arguments["norm_epsilon"],
        "rope_parameters": _rope_parameters(arguments),
        "tie_word_embeddings": not arguments.get("untie_embeddings_and_output_weights"),
        "vocab_size": arguments["vocab_size"],
        **_window_entries(arguments, kind),
        **expert_entries(arguments),
        **latent_entries(arguments),
    }


def check_exportable(arguments: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a model that none of the families has."""
    for name, value in (
        ("normalization", "RMSNorm"),
        ("swiglu", True),
        ("add_bias_linear", False),
        ("apply_layernorm_1p", False),
        ("rotary_interleaved", False),
        ("attention_output_gate", False),
    ):
        if (arguments.get(name) or False) != value:
            raise CheckpointError(
                f"the checkpoint's model has {name} {arguments.get(name)}, and no family of Hugging Face's that is "
                f"written here has ({', '.join(FAMILIES)})."
            )
    if arguments.get("softmax_type") not in (None, "vanilla"):
        raise CheckpointError("the checkpoint's model has attention sinks, as no family that is written here has.")
    if "sinkhorn" in (arguments.get("moe_router_load_balancing_type") or ()):
        raise CheckpointError("the checkpoint's model deals tokens by sinkhorn, as no family written here does.")
    if arguments.get("no_rope_freq"):
        raise CheckpointError("the checkpoint's model has layers without RoPE, as no family that is written here has.")
    if arguments.get("multi_latent_attention"):
        check_latent(arguments)
    else:
        check_experts(arguments)
    if arguments.get("mtp_num_layers"):
        raise CheckpointError("the checkpoint's model predicts further tokens, as no family that is written here does.")
    if arguments.get("position_embedding_type") not in ("rope", "yarn"):
        raise CheckpointError("the checkpoint's model has no rotary embeddings, as all families that are written have.")
    _family(arguments)


def _family(arguments: Mapping[str, Any]) -> str:
    names = ("add_qkv_bias", "qk_layernorm", "num_experts", "multi_latent_attention", "moe_router_enable_expert_bias")
    wanted = tuple(bool(arguments.get(name)) for name in names)
    windows = shape_fields(arguments.get("window_size"), arguments.get("window_attn_skip_freq"), None)
    if windows["window"] and not any(wanted):
        if 0 in windows["windowed"]:
            raise CheckpointError(
                "the checkpoint's model has windows in some layers, as no family without biases here has."
            )
        return "mistral"
    for kind, family in FAMILIES.items():
        if family[1:] == wanted:
            return kind
    given = " and ".join(name for name, has in zip(names, wanted, strict=True) if has)
    raise CheckpointError(f"the checkpoint's model has {given}, together, as no family here has.")


def _rope_parameters(arguments: Mapping[str, Any]) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": float(arguments["rotary_base"]), "rope_type": "default"}
    if (arguments.get("rotary_percent") or 1.0) != 1:
        rope["partial_rotary_factor"] = arguments["rotary_percent"]
    interpolation = arguments.get("rotary_seq_len_interpolation_factor") or 1.0
    latent = arguments.get("multi_latent_attention")
    if arguments.get("rope_type" if latent else "position_embedding_type") == "yarn":
        return {
            **rope,
            "rope_type": "yarn",
            "factor": arguments["rotary_scaling_factor"],
            "original_max_position_embeddings": arguments["yarn_original_max_position_embeddings"],
            "beta_fast": arguments["yarn_beta_fast"],
            "beta_slow": arguments["yarn_beta_slow"],
            "truncate": arguments["yarn_correction_range_round_to_int"],
            **_length(arguments),
        }
    if arguments.get("use_rope_scaling"):
        if interpolation != 1:
            raise CheckpointError("a model with both --use-rope-scaling and position interpolation cannot be written.")
        return {
            **rope,
            "rope_type": "llama3",
            "factor": arguments["rope_scaling_factor"],
            "low_freq_factor": arguments.get("rope_scaling_low_freq_factor", 1.0),
            "high_freq_factor": arguments.get("rope_scaling_high_freq_factor", 4.0),
            "original_max_position_embeddings": arguments.get("rope_scaling_original_max_position_embeddings", 8192),
        }
    return {**rope, "rope_type": "linear", "factor": interpolation} if interpolation != 1 else rope


def _length(arguments: Mapping[str, Any]) -> dict[str, float]:
    """Return YaRN's factor on the length of queries and keys (`RopeScaling.length`), unless it is the default."""
    scales = arguments["mscale"], arguments["mscale_all_dim"]
    if scales == (1.0, 0.0):
        return {}
    if all(scales):
        return {"mscale": scales[0], "mscale_all_dim": scales[1]}
    factor = float(arguments["rotary_scaling_factor"])
    growth = 0.1 * math.log(factor) if factor > 1 else 0.0
    return {"attention_factor": (growth * scales[0] + 1.0) / (growth * scales[1] + 1.0)}
