"""Checks of megatron-core's sharded tensors against the model and what was saved, and the random state."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.activations import squared_relu
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from helixpipe.common.errors import CheckpointError, UserError
from helixpipe.costs.layer_patterns import kinds_of_layers, mixed_layers, parse_frequency, shape_fields
from helixpipe.model.attention.sinks import LEARNABLE
from helixpipe.model.options import layers_of, window_of

_ROUTING = (
    *("moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax", "moe_router_topk_scaling_factor"),
    *("moe_router_num_groups", "moe_router_group_topk"),
)
"""Fields that say where tokens go, which no tensor shows; None is a value of some."""

_ONE_EXTENDED = (("rope", "yarn"), ("yarn", "rope"))


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the warnings about torch's sharded tensors that megatron-core's use of them causes on every rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def unwrap(model: Any) -> Any:
    while hasattr(model, "module"):
        model = model.module
    return model


def storable(value: Any) -> Any:
    """Return a flag's value as a type that any program can unpickle."""
    if isinstance(value, (list, tuple)):
        return [storable(item) for item in value]
    if isinstance(value, dict):
        return {str(key): storable(item) for key, item in value.items()}
    return value if value is None or isinstance(value, (bool, int, float, str, torch.dtype)) else str(value)


def saved_shapes(index: Any) -> dict[str, tuple[int, ...] | None]:
    """Name -> global shape of everything sharded in a checkpoint; None for objects. index: its torch `Metadata`."""
    entries = index.state_dict_metadata
    return {name: tuple(entry.size) if hasattr(entry, "size") else None for name, entry in entries.items()}


def forget_extra_state(state: dict[str, Any], saved: dict[str, Any]) -> None:
    """Ask for no `_extra_state` that is not there: it is empty here, and its sharding follows TP."""
    for name in [name for name in state if name.endswith("_extra_state") and state[name].unique_key not in saved]:
        del state[name]


def check_model(arguments: dict[str, Any], model: Any, folder: Path) -> None:
    """Raise CheckpointError when the checkpoint's flags describe a model of another shape."""
    config, gpt = model.config, model.gpt
    _check_layers(arguments, config, folder)
    if arguments.get("add_bias_linear"):  # Megatron-LM then sets add_qkv_bias as well, after it has parsed its flags
        arguments = {**arguments, "add_qkv_bias": True}
    grouped = arguments.get("group_query_attention", True)
    for flag, name, value in (
        ("--num-layers", "num_layers", config.num_layers),
        ("--hidden-size", "hidden_size", config.hidden_size),
        ("--num-attention-heads", "num_attention_heads", config.num_attention_heads),
        ("--num-query-groups", "num_query_groups" if grouped else "num_attention_heads", config.num_query_groups),
        ("--kv-channels", "kv_channels", config.kv_channels),
        ("--ffn-hidden-size", "ffn_hidden_size", config.ffn_hidden_size),
        ("--num-experts", "num_experts", config.num_moe_experts),
        ("--moe-ffn-hidden-size", "moe_ffn_hidden_size", config.moe_ffn_hidden_size),
        *((_flag(name), name, getattr(config, name)) for name in _ROUTING),
        (
            "--moe-router-enable-expert-bias",
            "moe_router_enable_expert_bias",
            config.moe_router_enable_expert_bias,
        ),
        ("--swiglu", "swiglu", config.gated_linear_unit),
        ("--squared-relu", "squared_relu", config.activation_func is squared_relu),
        ("--rotary-interleaved", "rotary_interleaved", config.rotary_interleaved),
        ("--normalization", "normalization", config.normalization),
        ("--norm-epsilon", "norm_epsilon", config.layernorm_epsilon),
        ("--apply-layernorm-1p", "apply_layernorm_1p", config.layernorm_zero_centered_gamma),
        ("--add-qkv-bias", "add_qkv_bias", config.add_qkv_bias or config.add_bias_linear),
        ("--qk-layernorm", "qk_layernorm", config.qk_layernorm),
        ("--attention-output-gate", "attention_output_gate", config.attention_output_gate),
        ("--softmax-type", "softmax_type", config.softmax_type),
        ("--multi-latent-attention", "multi_latent_attention", config.multi_latent_attention),
        *((_flag(name), name, getattr(config, name)) for name in _latent_sizes(config)),
        ("--position-embedding-type", "position_embedding_type", gpt.position_embedding_type),
        (
            "--untie-embeddings-and-output-weights",
            "untie_embeddings_and_output_weights",
            not gpt.share_embeddings_and_output_weights,
        ),
    ):
        saved = arguments.get(name, value if name in _ROUTING else None)
        told = saved is not None or name in _ROUTING
        experts = name.startswith("moe_") and not arguments.get(
            "num_experts"
        )  # of a model without any, it says nothing
        if (
            told and not experts and saved != value and (saved, value) not in _ONE_EXTENDED
        ):  # one is the other, extended
            raise CheckpointError(
                f"{folder} holds a model with {flag} {saved}, but the flags say {value}; give the flags it was trained "
                "with, or --use-checkpoint-args."
            )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _latent_sizes(config: Any) -> tuple[str, ...]:
    """Fields of multi-latent attention, which a configuration without it does not have."""
    if not config.multi_latent_attention:
        return ()
    return ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type")


def _check_layers(arguments: dict[str, Any], config: Any, folder: Path) -> None:
    """Check what no tensor shows: windows of attention, layers without RoPE, and which have experts; a checkpoint
    without them has none."""
    texts: list[Any] = [
        None if (value := arguments.get(name)) is None else str(value)
        for name in ("window_size", "window_attn_skip_freq", "no_rope_freq")
    ]
    mixed: tuple[int, ...] = ()
    try:
        saved = shape_fields(*texts)
        if arguments.get("num_experts"):
            frequency = str(arguments.get("moe_layer_freq", 1)).replace(" ", "")
            mixed = mixed_layers(parse_frequency("--moe-layer-freq", frequency) or 1)
    except UserError as error:
        raise CheckpointError(f"{folder} holds a model that is not supported ({str(error).rstrip('.')}).") from None
    left, kinds = window_of(config), layers_of(config)
    own = 0 if left is None else left + 1
    if saved["window"] != own:
        flag, there, here = "--window-size", *(f"{each - 1},0" for each in (saved["window"], own))
    elif kinds != kinds_of_layers(
        len(kinds),
        saved["windowed"],
        saved["unrotated"],
        mixed,
        config.multi_latent_attention,
        sinks=config.softmax_type == LEARNABLE,
    ):
        flag = "--window-attn-skip-freq and --no-rope-freq"
        there = " and ".join(map(str, texts[1:]))
        here = f"{config.window_attn_skip_freq} and {config.no_rope_freq}"
        if mixed or config.num_moe_experts:
            flag = f"{flag}, and --moe-layer-freq"
            there, here = f"{there}, and {arguments.get('moe_layer_freq')}", f"{here}, and {config.moe_layer_freq}"
    else:
        return
    raise CheckpointError(
        f"{folder} holds a model with {flag} {there}, but the flags say {here}; give the flags it was trained with, or "
        "--use-checkpoint-args."
    )


def check_tensors(state: dict[str, Any], saved: dict[str, Any], folder: Path) -> None:
    """Raise CheckpointError when a tensor is not in the checkpoint or has another shape there."""
    for tensor in nested_values(state):
        if isinstance(tensor, (ShardedTensor, ShardedTensorFactory)) and tensor.key not in saved:
            raise CheckpointError(f"{folder} holds no {tensor.key}, which the model of these flags has.")
        if not isinstance(tensor, ShardedTensor) or tensor.allow_shape_mismatch:
            continue
        wanted, saved_shape = list(tensor.global_shape), list(saved[tensor.key])
        if wanted != saved_shape:
            raise CheckpointError(
                f"{folder} holds {tensor.key} of shape {saved_shape}, but these flags make it {wanted}."
            )


def set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["random_rng_state"])
    np.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    torch.cuda.set_rng_state(state["cuda_rng_state"])
    get_cuda_rng_tracker().set_states(state["rng_tracker_states"])
