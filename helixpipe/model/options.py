"""Defines the model's inputs: its shape beyond megatron-core's TransformerConfig, a microbatch, and the unit to run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from helixpipe.common.errors import UserError
from helixpipe.costs.context_parallel import nearest_sizes
from helixpipe.costs.layer_patterns import (
    Frequency,
    kinds_of_layers,
    mixed_layers,
    unrotated_layers,
    windowed_layers,
)
from helixpipe.costs.models import A2A, HALVES, OFF, P2P, PAIRS
from helixpipe.model.rope_scaling import RopeScaling
from helixpipe.program.stages import HEAD_MTP, HEAD_NORM, HEAD_PART, LayerKinds, Piece, model_pieces

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from helixpipe.model.attention.kv_blocks import UnitBlocks
    from helixpipe.model.attention.kv_store import UnitKeyValues
    from helixpipe.model.documents import Documents
    from helixpipe.model.real_tokens import RealTokens


@dataclass(frozen=True)
class GPTOptions:
    """Settings that TransformerConfig leaves to megatron-core's GPTModel, with its names; and how MLP and loss run."""

    vocab_size: int
    """Rows of the embedding, already padded to a multiple of the tensor-parallel size."""
    max_sequence_length: int
    """Longest sequence the model can be given: the number of learned positions."""
    position_embedding_type: str = "learned_absolute"
    """`learned_absolute`, `rope`, `yarn` or `none`."""
    rotary_percent: float = 1.0
    """Share of every head's channels that RoPE rotates."""
    rotary_base: int = 10000
    """Base period of RoPE."""
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    """What extends the context of RoPE: `yarn`'s with those positions, none or another with `rope`."""
    share_embeddings_and_output_weights: bool = True
    """Whether the head uses the word embedding's weights."""
    chunk_size: int = 0
    """Tokens of a slice of the MLP, whose inner activations are recomputed slice by slice; 0: the whole MLP at once."""
    loss_chunk_size: int = 0
    """Tokens of a slice of output layer and loss, whose logits are made in the backward, slice by slice; 0: the logits
    of the whole chunk at once."""
    cp_comm_type: str = P2P
    """What context-parallel ranks exchange for core attention, where there are several: `a2a` or `p2p`."""

    cuda_graphs: str = OFF
    """`auto`: pieces whose kernels depend on a chunk's length alone run as CUDA graphs, where the host is slower than
    the device; `off`: none do."""
    overlap_tp_comm: str = OFF
    """`halves`: the tokens of every chunk run in two halves, one of which computes while tensor-parallel ranks
    communicate what the other needs; `pairs`: all at once, in steps between which the backward of another unit can run;
    `off`: all at once."""

    @property
    def rotates(self) -> bool:
        """Whether positions enter by rotating queries and keys."""
        return self.position_embedding_type in ("rope", "yarn")


@dataclass(frozen=True)
class Microbatch:
    """One microbatch: a row of tokens for each sample; a rank that has neither embed nor head uses no tensor of it."""

    tokens: torch.Tensor
    """[b, s] int64, on the model's device, as are the others."""
    labels: torch.Tensor
    """[b, s] int64: the token that follows each token."""
    loss_mask: torch.Tensor
    """[b, s] float32: weight of each token's loss."""
    position_ids: torch.Tensor | None = None
    """[b, s] int64 for learned positions; None means 0 to s - 1, or from 0 on in each document. RoPE, as in
    megatron-core, always counts from 0, in each document where there are several."""
    documents: Documents | None = None
    """What of each sample is one document, which attention does not look out of; None: all of it. Ranks with layers
    need it, also those without embed and head."""
    real: RealTokens | None = None
    """The tokens that are no padding; None: all. Ranks with experts need it, also those without embedding and head."""

    def tensors(self) -> list[torch.Tensor]:
        positions = None if self.documents is None else self.documents.positions()
        places = () if self.real is None else self.real.places()
        every = (self.tokens, self.labels, self.loss_mask, self.position_ids, positions, *places)
        return [tensor for tensor in every if tensor is not None]


class UnitContext(NamedTuple):
    """The unit that the model runs: what its random state and its place in the sequence depend on."""

    step: int
    """Training iteration."""
    microbatch: int
    """Number of the microbatch in the step over data-parallel ranks, dealt in turn: own number * dp_size + dp_rank."""
    chunk: int = 0
    """Number of the chunk in the sequence."""
    offset: int = 0
    """First token of the chunk in the sequence."""
    length: int | None = None
    """Tokens of the chunk; None means up to the end of the sequence."""
    training: bool = True
    """Whether dropout is applied."""
    keys_values: UnitKeyValues | UnitBlocks | None = None
    """The earlier chunks' keys and values; None when the chunk is all of its microbatch."""
    row_length: int | None = None
    """Tokens of each of the microbatch's rows; None when the chunk is all of them."""
    auxiliary_gradient: Callable[[], float | torch.Tensor] = lambda: 1.0
    """Says what the gradients of the microbatch's auxiliary losses, each a mean over its tokens, are multiplied by;
    asked in the backward, before which the loss scale may change."""
    number: int = 0
    """Number of the microbatch among those of this pipeline."""
    in_graphs: bool = False
    """Whether runs of its pieces may be replayed from graphs (`graphs`)."""

    @property
    def tokens(self) -> slice:
        """The chunk's tokens in the sequence."""
        return slice(self.offset, None if self.length is None else self.offset + self.length)


State = tuple[torch.Tensor, ...]
"""What crosses the cut before a piece, or after it."""

RunPiece = Callable[[State, Microbatch, UnitContext], State]
"""Runs a piece on a chunk of a microbatch."""


class _Requirement(NamedTuple):
    """A setting of TransformerConfig that the pieces rely on, and what to tell the user who set it otherwise."""

    field: str
    holds: Callable[[Any], bool]
    valid: str


_NORMS = ("LayerNorm", "RMSNorm")
_POSITIONS = ("learned_absolute", "rope", "yarn", "none")
_REQUIREMENTS = (
    _Requirement(
        "window_size",
        lambda value: value is None or (value[0] >= -1 and value[1] == 0),
        "--window-size must be LEFT,0: attention is causal",
    ),
    _Requirement("fp32_residual_connection", lambda value: not value, "--fp32-residual-connection is not supported"),
    _Requirement(
        "context_parallel_size",
        lambda value: value == 1,
        "TransformerConfig.context_parallel_size is for megatron-core's own attention and must be 1 here; "
        "context-parallel ranks are those of pg_collection.cp",
    ),
    _Requirement("fp8", lambda value: value is None, "--fp8-format is not supported: leave it out"),
    _Requirement("normalization", lambda value: value in _NORMS, "--normalization must be LayerNorm or RMSNorm"),
)


def window_of(config: TransformerConfig) -> int | None:
    """Tokens before its own that a token sees in layers that attend to a window; None: all, as in the others."""
    return None if config.window_size is None or config.window_size[0] < 0 else config.window_size[0]


def layers_of(config: TransformerConfig) -> tuple[LayerKinds, ...]:
    """The kinds of the pieces of each layer."""

    def frequency(value: int | Sequence[int] | None) -> Frequency | None:
        return value if value is None or isinstance(value, int) else tuple(int(each) for each in value)

    windowed = () if window_of(config) is None else windowed_layers(frequency(config.window_attn_skip_freq))
    mixed: tuple[int, ...] = ()
    if config.num_moe_experts is not None:
        mixed = mixed_layers(frequency(config.moe_layer_freq) or 1)
    unrotated = unrotated_layers(frequency(config.no_rope_freq))
    latent, sinks = config.multi_latent_attention, config.softmax_type == "learnable"
    return kinds_of_layers(config.num_layers, windowed, unrotated, mixed, latent, sinks)


def further_tokens(config: TransformerConfig) -> int:
    """Tokens after the next that the head predicts as well."""
    return config.mtp_num_layers or 0


def check_pieces(config: TransformerConfig, pieces: Sequence[Piece]) -> None:
    """Raise UserError for pieces that are not of the model's kinds."""
    own = {*model_pieces(layers_of(config))[:-1], Piece(HEAD_MTP if further_tokens(config) else "head")}
    for piece in pieces:
        divided = piece.kind in (HEAD_NORM, HEAD_PART) and not further_tokens(config)
        if piece not in own and not divided:
            raise UserError(
                f"{piece} is not a piece of the model that --num-layers, --window-size, --window-attn-skip-freq, "
                "--no-rope-freq, --softmax-type, --num-experts, --moe-layer-freq and --mtp-num-layers describe; "
                "helixpipe.model.layers_of gives the kinds of its layers' pieces, further_tokens its head's."
            )


def check_supported(
    config: TransformerConfig, gpt: GPTOptions, context_parallel: int = 1, tp_group: Any = None
) -> None:
    """Raise UserError, naming the flag, for a model that the pieces cannot express, or so many context-parallel ranks
    cannot share, and for a tensor-parallel group that is not megatron-core's own."""
    if _of_other_ranks(tp_group):
        raise UserError(
            "pg_collection.tp must have the ranks of megatron-core's tensor-parallel group: its loss sums over those."
        )
    for name, holds, valid in _REQUIREMENTS:
        value = getattr(config, name)
        if not holds(value):
            raise UserError(f"{valid} (it is {value!r}).")
    if gpt.position_embedding_type not in _POSITIONS:
        raise UserError(
            f"--position-embedding-type {gpt.position_embedding_type} is not supported; "
            f"valid values are {', '.join(_POSITIONS)}."
        )
    if (gpt.position_embedding_type == "yarn") != (gpt.rope_scaling.kind == "yarn"):
        raise UserError(
            f"--position-embedding-type {gpt.position_embedding_type} does not go with rope_scaling.kind "
            f"{gpt.rope_scaling.kind!r}: yarn needs yarn."
        )
    for flag, size in (("--chunk-size", gpt.chunk_size), ("--loss-chunk-size", gpt.loss_chunk_size)):
        if type(size) is not int or size < 0:
            raise UserError(f"{flag} must be a number of tokens, or 0 for no slices, not {size!r}.")
    tp = config.tensor_model_parallel_size
    if gpt.cp_comm_type not in (A2A, P2P):
        raise UserError(f"--cp-comm-type {gpt.cp_comm_type} is not supported; valid values are a2a and p2p.")
    if gpt.overlap_tp_comm not in (OFF, HALVES, PAIRS):
        raise UserError(
            f"--overlap-tp-comm {gpt.overlap_tp_comm} is not a way to run; valid values are off, halves and pairs."
        )
    if gpt.overlap_tp_comm == HALVES and further_tokens(config):
        raise UserError(
            "--overlap-tp-comm halves gathers the rows of a chunk in another order than the layers of "
            "--mtp-num-layers, which run whole, take them to be in; give pairs or off."
        )
    if context_parallel > 1 and gpt.cp_comm_type == P2P and config.attention_dropout:
        raise UserError(
            f"--attention-dropout {config.attention_dropout:g} cannot be had with --cp-comm-type p2p; "
            "give 0, or --cp-comm-type a2a."
        )
    if context_parallel > 1 and gpt.cp_comm_type == A2A and config.num_attention_heads // tp % context_parallel:
        raise UserError(
            f"--context-parallel-size {context_parallel} with --cp-comm-type a2a must divide the "
            f"{config.num_attention_heads // tp} heads of a tensor-parallel rank; nearest valid sizes are "
            f"{nearest_sizes(config.num_attention_heads // tp, context_parallel)}."
        )
    for flag, count in (
        ("--num-attention-heads", config.num_attention_heads),
        ("--num-query-groups", config.num_query_groups or config.num_attention_heads),
        ("the padded vocabulary size", gpt.vocab_size),
    ):
        if count % tp:
            raise UserError(f"{flag} {count} must be a multiple of --tensor-model-parallel-size {tp}.")


def _of_other_ranks(tp_group: Any) -> bool:
    from megatron.core import parallel_state

    own = parallel_state.get_tensor_model_parallel_group(check_initialized=False)
    if not isinstance(own, dist.ProcessGroup) or not isinstance(tp_group, dist.ProcessGroup):
        return False
    return dist.get_process_group_ranks(own) != dist.get_process_group_ranks(tp_group)
