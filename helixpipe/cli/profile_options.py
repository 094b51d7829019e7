"""Flags of `helixpipe profile`, and the model they come to. No torch here."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from helixpipe.common.errors import UserError
from helixpipe.common.flags import check_ranges, option
from helixpipe.common.ranges import MOST_LAYERS, MOST_STEPS, MOST_TOKENS, MOST_WIDTH
from helixpipe.costs.hardware import HARDWARE
from helixpipe.costs.models import MODELS, ModelShape, find_model

MOST_THREADS = 10_000


@dataclass(frozen=True)
class ProfileOptions:
    """What to measure. Sizes that are not given are the model's of --model. None: not given."""

    output: str = option("profile.json", "The file to write.", flags=("-o", "--output"), metavar="FILE")
    model: str | None = option(None, f"A model to start from: {', '.join(MODELS)}.", metavar="NAME")
    num_layers: int | None = option(
        None, "Layers that simulate takes unless told; their number is not measured.", at_least=1, at_most=MOST_LAYERS
    )
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
    disable_bias_linear: bool = option(False, "No bias in linear layers.")
    add_qkv_bias: bool = option(False, "A bias in the QKV layer all the same.")
    qk_layernorm: bool = option(False, "Norms of each head's query and key.")
    untie_embeddings_and_output_weights: bool | None = option(None, "An output layer with weights of its own.")
    seq_length: int | None = option(
        None, "Tokens of a sequence (default: the model's).", at_least=1, at_most=MOST_TOKENS
    )
    micro_batch_size: int = option(1, "Sequences in a microbatch.", at_least=1)
    chunk_size: int | None = option(
        None, "Tokens of a slice of the MLP (default: whole).", at_least=1, at_most=MOST_TOKENS
    )
    loss_chunk_size: int | None = option(
        None, "Tokens of a slice of head and loss (default: whole).", at_least=1, at_most=MOST_TOKENS
    )
    dtype: Literal["float32", "bfloat16"] = option("float32", "Type of weights and activations.")
    processes: int | None = option(
        None,
        "Processes that measure at the same time: as many as ranks will run on this machine, which share its memory's "
        "bandwidth (default: 2, or 1 where there is one GPU).",
        at_least=1,
        at_most=MOST_THREADS,
    )
    threads: int = option(1, "Threads of a process, as OMP_NUM_THREADS in training.", at_least=1, at_most=MOST_THREADS)
    repeats: int = option(15, "Rounds that count; figures are medians over them.", at_least=1, at_most=MOST_STEPS)
    hardware: str | None = option(
        None,
        f"Also print the shares of the peaks of this hardware that were reached: {', '.join(HARDWARE)} (default: the "
        "machine's, if it is among them).",
        metavar="NAME",
    )


def model_shape(options: ProfileOptions) -> ModelShape:
    """The model of the flags. Raises UserError for sizes that are missing or do not fit each other."""
    check_ranges(options)
    if options.model is not None:
        model = find_model(options.model)
    else:
        model = _own_model(options)
    given = {
        "layers": options.num_layers,
        "hidden": options.hidden_size,
        "heads": options.num_attention_heads,
        "groups": options.num_query_groups,
        "ffn": options.ffn_hidden_size,
        "gated": options.swiglu,
        "vocab": options.vocab_size,
        "norm": options.normalization,
        "positions": options.position_embedding_type,
        "bias": False if options.disable_bias_linear else None,
        "tied": None
        if options.untie_embeddings_and_output_weights is None
        else not options.untie_embeddings_and_output_weights,
        "seq_length": options.seq_length,
        "head_channels": options.kv_channels,
        "qkv_bias": options.add_qkv_bias or None,
        "qk_norm": options.qk_layernorm or None,
    }
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    model = dataclasses.replace(model, **changes)
    if model.hidden % model.heads and not model.head_channels:
        raise UserError(f"--hidden-size {model.hidden} must be a multiple of --num-attention-heads {model.heads}.")
    if model.heads % model.groups:
        raise UserError(f"--num-query-groups {model.groups} must divide --num-attention-heads {model.heads}.")
    if model.positions == "rope" and model.channels % 2:
        raise UserError(
            f"--position-embedding-type rope needs an even --hidden-size / --num-attention-heads, not {model.channels}."
        )
    return model


def _own_model(options: ProfileOptions) -> ModelShape:
    """Without --model: the sizes that have no default must be given."""
    needed = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "seq_length")
    flags = {name: "--" + name.replace("_", "-") for name in needed}
    for name in needed:
        if getattr(options, name) is None:
            raise UserError(
                f"profile needs --model, or else {', '.join(flags.values())}; {flags[name]} is missing "
                f"(models: {', '.join(MODELS)})."
            )
    hidden, heads = options.hidden_size or 0, options.num_attention_heads or 0
    return ModelShape(
        "own", 1, hidden, heads, heads, 4 * hidden, False, 1, True, "LayerNorm", "learned_absolute", True, 1
    )
