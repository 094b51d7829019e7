"""Flags that say the shape of a model, alone or in place of what a named one has."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from helixpipe.common.errors import UserError
from helixpipe.common.flags import option
from helixpipe.common.ranges import MOST_TOKENS, MOST_WIDTH
from helixpipe.costs.huggingface.shape import folder_shape, names_a_folder
from helixpipe.costs.layer_patterns import shape_fields
from helixpipe.costs.models import MODELS, ModelShape, find_model


@dataclass(frozen=True)
class ShapeFlags:
    """The sizes of a layer, the embedding and the head, named as in training. None: not given."""

    hidden_size: int | None = option(None, "Size of the hidden states.", at_least=1, at_most=MOST_WIDTH)
    num_attention_heads: int | None = option(None, "Attention heads.", at_least=1, at_most=MOST_WIDTH)
    num_query_groups: int | None = option(
        None, "Heads of keys and values (default: as many as heads).", at_least=1, at_most=MOST_WIDTH
    )
    kv_channels: int | None = option(
        None,
        "Channels of a head (default: --hidden-size / --num-attention-heads).",
        at_least=1,
        at_most=MOST_WIDTH,
    )
    ffn_hidden_size: int | None = option(
        None, "Inner size of the MLP (default: 4 times --hidden-size).", at_least=1, at_most=MOST_WIDTH
    )
    swiglu: bool | None = option(None, "Gated MLP with SiLU in place of GELU.")
    vocab_size: int | None = option(
        None, "Size of the vocabulary, before padding to a multiple of 128.", at_least=1, at_most=MOST_TOKENS
    )
    normalization: Literal["LayerNorm", "RMSNorm"] | None = option(None, "The norm (default: LayerNorm).")
    position_embedding_type: Literal["learned_absolute", "rope", "none"] | None = option(
        None, "Positions (default: learned_absolute)."
    )
    window_size: str | None = option(
        None,
        "LEFT,0: a token attends to LEFT tokens before its own and none before these; -1,0: to all of its document.",
        metavar="LEFT,0",
    )
    window_attn_skip_freq: str | None = option(
        None,
        "With --window-size: N, every N-th layer attends to all tokens, or a list of 1 (window) and 0, for each layer, "
        "such as ([1]*3+[0])*2 (default: all layers have the window).",
        metavar="N|LIST",
    )
    no_rope_freq: str | None = option(
        None,
        "N, every N-th layer does not rotate queries and keys, or a list of 1 (no RoPE) and 0, a number a layer.",
        metavar="N|LIST",
    )
    disable_bias_linear: bool = option(False, "No bias in linear layers.")
    add_qkv_bias: bool = option(False, "A bias in the QKV layer all the same.")
    qk_layernorm: bool = option(False, "Norms of each head's query and key.")
    attention_output_gate: bool = option(False, "Attention's output is gated by channels of the QKV layer.")
    softmax_type: Literal["vanilla", "learnable"] = option(
        "vanilla", "Attention sinks: of each head a learned logit beside those of the keys."
    )
    untie_embeddings_and_output_weights: bool | None = option(None, "An output layer with weights of its own.")
    mtp_num_layers: int | None = option(
        None,
        "Tokens after the next that the head predicts as well, each by a layer of its own.",
        at_least=0,
        at_most=64,
    )


def described(name: str | None, flags: ShapeFlags, **sizes: int | None) -> ModelShape:
    """Return the model of that name or folder, or without one the GPT of the flags, with what the flags say in place of
    its own.

    sizes: `layers` and `seq_length`, if they are known. Raises UserError for sizes that are missing or do not fit each
    other.
    """
    model = _named(name) if name is not None else _own(flags, sizes)
    untied = flags.untie_embeddings_and_output_weights
    given = {
        "hidden": flags.hidden_size,
        "heads": flags.num_attention_heads,
        "groups": flags.num_query_groups,
        "ffn": flags.ffn_hidden_size,
        "gated": flags.swiglu,
        "vocab": flags.vocab_size,
        "norm": flags.normalization,
        "positions": flags.position_embedding_type,
        "bias": False if flags.disable_bias_linear else None,
        "tied": None if untied is None else not untied,
        "head_channels": flags.kv_channels,
        "qkv_bias": flags.add_qkv_bias or None,
        "qk_norm": flags.qk_layernorm or None,
        "further": flags.mtp_num_layers,
        "output_gate": flags.attention_output_gate or None,
        "sinks": flags.softmax_type == "learnable" or None,
        **sizes,
    }
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    model = dataclasses.replace(model, **changes)
    patterns = shape_fields(flags.window_size, flags.window_attn_skip_freq, flags.no_rope_freq, model.layers)
    model = dataclasses.replace(model, **patterns)
    if model.unrotated and model.positions != "rope":
        raise UserError(
            f"--no-rope-freq {flags.no_rope_freq} needs --position-embedding-type rope, not {model.positions}."
        )
    if model.hidden % model.heads and not model.head_channels:
        raise UserError(f"--hidden-size {model.hidden} must be a multiple of --num-attention-heads {model.heads}.")
    if model.heads % model.groups:
        raise UserError(f"--num-query-groups {model.groups} must divide --num-attention-heads {model.heads}.")
    if model.positions == "rope" and model.channels % 2:
        raise UserError(
            f"--position-embedding-type rope needs an even --hidden-size / --num-attention-heads, not {model.channels}."
        )
    return model


def _named(name: str) -> ModelShape:
    """Return a preset, or the model of a Hugging Face folder."""
    return folder_shape(name) if names_a_folder(name) else find_model(name)


def _own(flags: ShapeFlags, sizes: dict[str, int | None]) -> ModelShape:
    """Return a model without a name: the sizes that have no default must be given."""
    needed = {
        "--num-layers": sizes.get("layers"),
        "--hidden-size": flags.hidden_size,
        "--num-attention-heads": flags.num_attention_heads,
        "--vocab-size": flags.vocab_size,
        "--seq-length": sizes.get("seq_length"),
    }
    missing = [flag for flag, value in needed.items() if value is None]
    if missing:
        raise UserError(
            f"{', '.join(missing)} must be given for a model by its sizes; or give --model, one of {', '.join(MODELS)}."
        )
    hidden, heads = flags.hidden_size or 0, flags.num_attention_heads or 0
    return ModelShape(
        "own", 1, hidden, heads, heads, 4 * hidden, False, 1, True, "LayerNorm", "learned_absolute", True, 1
    )
