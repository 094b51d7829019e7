"""Sequences that run chunk by chunk through a GPTModel or HybridModel of one's own, made for whole sequences.

A unit is one chunk of a microbatch in one chunk of the model. Nothing of the model is replaced; around its modules:

- **Data.** The user's forward step reads the same microbatch for every chunk (`Rereading`), and of what it hands to the
  model the rows of the chunk are taken, positions among them.
- **Attention.** Core attention runs on a kernel of `helixpipe.model`, whose queries are the chunk's and whose keys and
  values are those of all chunks so far, from the executor's store, where the gradients of earlier rows are summed.
- **RoPE** gives the angles of the chunk's positions.
- **Loss.** The model returns token losses of all rows: those of earlier chunks without a graph, the chunk's own, and
  zeros for later ones. The user's loss function therefore sees all of the loss mask and divides by all tokens; where it
  is linear in the token losses, as Megatron-LM's are, the gradients of its values for the chunks add up to those of the
  whole microbatch. What it returns for the last chunk is what it would return for a microbatch in one piece.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from helixpipe.common.errors import UserError
from helixpipe.drop_in.checks import unwrapped
from helixpipe.model import UnitContext
from helixpipe.model.attention.kernels import make_attend
from helixpipe.model.attention.kv_store import UnitKeyValues
from helixpipe.model.backends import Machine, choose
from helixpipe.program.program import Program

_OF_ROWS = ("input_ids", "position_ids", "labels", "loss_mask", "padding_mask")
"""Arguments of a GPTModel of shape [b, s], of which a chunk takes its rows."""

_REFUSED_SETTINGS = {
    "multi_latent_attention": "latent attention",
    "mtp_num_layers": "multi-token prediction",
    "experimental_attention_variant": "attention of another kind",
    "qk_clip": "clipping of attention logits",
    "tp_comm_overlap": "tp_comm_overlap, whose buffers have one length",
}
"""Settings of megatron-core's configuration whose modules need a microbatch's whole sequence, and their names."""


def check_sequences(program: Program, config: TransformerConfig, lengths: tuple[int | None, int]) -> None:
    """Check that the sequences of a call can be cut as the program does. lengths: the decoder's and the others' tokens
    a sequence. Raises UserError.
    """
    if lengths[0] not in (None, lengths[1]):
        raise UserError(f"decoder_seq_length must be seq_length, {lengths[1]}, or None, not {lengths[0]}.")
    parts = config.tensor_model_parallel_size if config.sequence_parallel else 1
    workload = program.workload.of_sequences(lengths[1])
    for tokens in sorted({workload.tokens(microbatch) for microbatch in range(len(workload))}):
        if any(each % parts for each in tokens):
            raise UserError(
                f"chunks of {', '.join(map(str, tokens))} tokens must be multiples of {parts}, the ranks that "
                "sequence_parallel shares them over: give other --pipe-sp-splits or --chunk-lengths."
            )


def check_models(chunks: Sequence[torch.nn.Module], config: TransformerConfig) -> None:
    """Check that a user's model can run sequences in chunks. Raises UserError."""
    for name, what in _REFUSED_SETTINGS.items():
        if getattr(config, name, None):
            raise _refused(f"{what} ({name}={getattr(config, name)})")
    if config.context_parallel_size > 1:
        raise _refused(f"context parallelism (context_parallel_size={config.context_parallel_size})")
    if getattr(config, "softmax_type", "vanilla") != "vanilla":
        raise _refused(f"a softmax with an offset (softmax_type={config.softmax_type})")
    if (routing := _routing_by_microbatch(config)) is not None:
        raise _refused(f"experts that are chosen or balanced over a microbatch ({routing})")
    for index, chunk in enumerate(chunks):
        model: Any = unwrapped(chunk)
        layers: Any = getattr(getattr(model, "decoder", None), "layers", (model,))
        if others := {type(layer).__name__ for layer in layers if not _runs_in_chunks(layer)}:
            raise _refused(
                f"model[{index}], a {type(model).__name__}, which is not of self-attention, MLP and experts alone "
                f"({', '.join(sorted(others))})"
            )
        kind = getattr(model, "position_embedding_type", "none")
        if kind not in ("learned_absolute", "rope", "none"):
            raise _refused(f"position embeddings of this kind (position_embedding_type={kind})")
        for attention in map(_attention_of, layers):
            if attention is not None and attention.attn_mask_type is not AttnMaskType.causal:
                raise _refused(f"attention that is not causal ({attention.attn_mask_type})")


def _attention_of(layer: Any) -> SelfAttention | None:
    """Return a layer's self-attention. A HybridModel has layers of an MLP or experts alone."""
    attention = getattr(layer, "self_attention", None)
    return attention if isinstance(attention, SelfAttention) else None


def _runs_in_chunks(layer: Any) -> bool:
    """Return whether a layer treats tokens one by one, but for self-attention."""
    return _attention_of(layer) is not None or (
        isinstance(layer, TransformerLayer) and isinstance(layer.self_attention, IdentityOp)
    )


def _refused(what: str) -> UserError:
    return UserError(
        f"sequences cannot run in chunks through a model of one's own with {what}; choose a schedule that does not cut "
        "them, without --pipe-sp-splits and --chunk-lengths."
    )


def _routing_by_microbatch(config: TransformerConfig) -> str | None:
    """Return the setting by which a router looks at all tokens of a microbatch, None if each is routed alone."""
    if config.num_moe_experts is None:
        return None
    kinds, rates = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    kinds, rates = (each if isinstance(each, list) else [each] for each in (kinds, rates))
    if "sinkhorn" in kinds or (any(rates) and any(kind != "none" for kind in kinds)):
        return f"moe_router_load_balancing_type={config.moe_router_load_balancing_type}"
    for name in ("moe_z_loss_coeff", "moe_expert_capacity_factor"):
        if getattr(config, name, None):
            return f"{name}={getattr(config, name)}"
    return None


class Rereading(Iterator[Any]):
    """An iterator over microbatches, each of which it gives again for every chunk of it. unit: the one that runs."""

    def __init__(self, iterator: Iterator[Any], unit: Callable[[], UnitContext]):
        self._iterator, self._unit = iterator, unit
        self._read: dict[int, Any] = {}

    def __next__(self) -> Any:
        unit = self._unit()
        if unit.chunk == 0:
            self._read[unit.microbatch] = next(self._iterator)
        batch = self._read.pop(unit.microbatch) if is_last(unit) else self._read[unit.microbatch]
        return dict(batch) if isinstance(batch, dict) else batch


def is_last(unit: UnitContext) -> bool:
    """Whether a unit's chunk is the last of its microbatch, or all of it."""
    return unit.row_length is None or unit.tokens.stop == unit.row_length


class ChunkedSequences:
    """The chunks of a user's model on this rank, made to run chunks of sequences while a unit runs (`enter`).

    layers: for each chunk of the model, the numbers of its layers of attention in the store of keys and values.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], config: TransformerConfig):
        self._config = config
        self._unit: UnitContext | None = None
        self._earlier: dict[int, list[Tensor]] = {}  # token losses of a microbatch's chunks so far
        self._undo: list[Callable[[], None]] = []
        self.layers: list[list[int]] = []
        kernel = choose(config, Machine.here()).chunk_attention
        first = 0
        for chunk in chunks:
            model: Any = unwrapped(chunk)
            attentions = [each for each in map(_attention_of, model.decoder.layers) if each is not None]
            self.layers.append(list(range(first, first + len(attentions))))
            for number, attention in zip(self.layers[-1], attentions, strict=True):
                self._wrap_attention(attention, number, kernel)
            for module in model.modules():
                if isinstance(module, RotaryEmbedding):
                    self._replace(module, partial(self._angles, module.forward))
            rows = partial(self._rows, inspect.signature(model.forward))
            self._undo.append(model.register_forward_pre_hook(rows, with_kwargs=True).remove)
            if getattr(model, "post_process", True):
                self._undo.append(model.register_forward_hook(self._all_rows).remove)
            first += len(attentions)

    def enter(self, unit: UnitContext) -> None:
        """Let the model run this unit's chunk from here on, forward or backward."""
        self._unit = unit

    def leave(self) -> None:
        """Let the model run whole sequences again, as before the step."""
        self._unit = None
        self._earlier.clear()

    def close(self) -> None:
        """Leave the model as it was."""
        while self._undo:
            self._undo.pop()()

    def reader(self, iterator: Iterator[Any] | None) -> Iterator[Any] | None:
        """Return the iterator for the user's forward step."""
        return None if iterator is None else Rereading(iterator, self._running)

    def again_in_backward(self, output: Tensor, unit: UnitContext) -> None:
        """Have the unit entered when its backward begins, in which the model's configuration may recompute layers."""
        output.register_hook(lambda gradient: self.enter(unit))

    def _running(self) -> UnitContext:
        assert self._unit is not None, "no unit runs"
        return self._unit

    def _replace(self, module: torch.nn.Module, forward: Callable[..., Any]) -> None:
        module.forward = forward
        self._undo.append(partial(delattr, module, "forward"))

    def _wrap_attention(self, attention: SelfAttention, number: int, kernel: str) -> None:
        config, core = self._config, attention.core_attention
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, attention.layer_number)
        left = config.window_size[0] if windowed and config.window_size is not None else None
        attend = make_attend(kernel, config, left=None if left == -1 else left)
        assert config.kv_channels is not None  # TransformerConfig fills it in
        scale = config.softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        whole = core.forward

        def forward(query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **others: Any) -> Tensor:
            """[n, b, heads, d] query and [n, b, groups, d] key and value of the chunk to [n, b, heads * d]."""
            unit = self._unit
            if unit is None or unit.keys_values is None:
                output: Tensor = whole(query, key, value, attention_mask, **others)
                return output
            assert isinstance(unit.keys_values, UnitKeyValues)
            keys, values = unit.keys_values.join(number, key, value)
            dropout = config.attention_dropout if core.training else 0.0
            fork = dropout > 0 and not config.sequence_parallel  # with it, all of a layer runs in such a state
            with get_cuda_rng_tracker().fork() if fork else nullcontext():
                return attend(query.contiguous(), keys, values, scale, dropout)

        self._replace(core, forward)

    def _angles(self, whole: Callable[..., Tensor], max_seq_len: int, *others: Any, **named: Any) -> Tensor:
        """Return the angles of a chunk's positions, `max_seq_len` of them, in place of a sequence's first."""
        if self._unit is None:
            return whole(max_seq_len, *others, **named)
        return whole(self._unit.offset + max_seq_len, *others, **named)[self._unit.offset :]

    def _rows(self, signature: inspect.Signature, model: Any, given: Any, named: Any) -> tuple[Any, Any] | None:
        """Take the chunk's rows of the model's arguments."""
        if self._unit is None or self._unit.row_length is None:
            return None
        arguments = dict(signature.bind(*given, **named).arguments)
        for name, value in arguments.items():
            if value is None or isinstance(value, bool):
                continue
            if name in _OF_ROWS:
                arguments[name] = value[:, self._unit.tokens]
            elif name != "attention_mask":
                raise _refused(f"an argument {name} of its forward")
            elif self._unit.chunk == 0 and value[..., -1, :].any():
                raise _refused("an attention mask that is not causal (--reset-attention-mask)")
        return (), arguments | {"attention_mask": None}

    def _all_rows(self, model: Any, given: Any, output: Tensor) -> Tensor:
        """[b, n, …] losses of a chunk's tokens, or logits, to those of all tokens of its microbatch."""
        unit = self._unit
        if unit is None or unit.row_length is None:
            return output
        earlier = self._earlier.setdefault(unit.microbatch, [])
        later = output.new_zeros((output.size(0), unit.row_length - unit.tokens.stop, *output.shape[2:]))
        rows = torch.cat((*earlier, output, later), dim=1)
        earlier.append(output.detach())
        if is_last(unit):
            del self._earlier[unit.microbatch]
        return rows
