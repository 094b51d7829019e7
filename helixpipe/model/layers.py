"""The weights of one transformer layer, or of the pieces of it that a rank holds, and what each piece computes.

Modules and parameters carry megatron-core's names (its local layer spec), so weights and checkpoints interchange.
Hidden states are [s, b, h], with sequence parallelism [s / tp, b, h] outside attention and MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.utils import apply_prefix_mapping
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from helixpipe.common.alternate import finished
from helixpipe.common.errors import UserError
from helixpipe.model import direct
from helixpipe.model.attention.block_attention import BlockAttention, block_attention
from helixpipe.model.attention.context_parallel import ALONE, ContextParallel, rows_of, to_heads, to_rows
from helixpipe.model.attention.core_attention import CoreAttention
from helixpipe.model.attention.gate import gated
from helixpipe.model.attention.kv_blocks import UnitBlocks
from helixpipe.model.attention.kv_store import UnitKeyValues
from helixpipe.model.attention.latent_attention import LatentAttention
from helixpipe.model.attention.log_sums import choose_kernel
from helixpipe.model.attention.ring_attention import Ring, ring_attention, ring_rounds
from helixpipe.model.attention.rotary import Rotary
from helixpipe.model.attention.sinks import LEARNABLE, VANILLA, SoftmaxOffset
from helixpipe.model.backends import Kernels
from helixpipe.model.chunked_mlp import make_mlp
from helixpipe.model.collectives import ForwardBeside, pause
from helixpipe.model.documents import Documents, Spans
from helixpipe.model.experts.layer import ExpertLayer
from helixpipe.model.experts.router import Half
from helixpipe.model.halving import Halving
from helixpipe.model.latent import LATENT_CHECKPOINT_NAMES, LatentSelfAttention
from helixpipe.model.linear import output_projection
from helixpipe.model.norms import make_norm
from helixpipe.model.options import Microbatch, RunPiece, State, UnitContext, window_of
from helixpipe.model.real_tokens import RealRows
from helixpipe.program.stages import EXPERTS, HEAD_NORM, HEAD_PART, NO_ROPE, WINDOWS, Piece

DrawWeights = Callable[[str], AbstractContextManager[None]]
"""Gives the context in which the weights of the named part are drawn (`randomness.initial_weights`)."""

CHECKPOINT_NAMES = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""In megatron-core's checkpoints a norm belongs to the linear layer that follows it, as in its fused modules; not so
that before experts."""

_PIECES = {
    "embedding": "embed",
    "input_layernorm": "norm",
    "linear_qkv": "qkv",
    "q_layernorm": "qkv",
    "k_layernorm": "qkv",
    "linear_q_proj": "qkv",
    "linear_q_down_proj": "qkv",
    "linear_q_up_proj": "qkv",
    "linear_kv_down_proj": "qkv",
    "kv_layernorm": "qkv",
    "linear_kv_up_proj": "attn",
    "core_attention": "attn",
    "linear_proj": "proj",
    "pre_mlp_layernorm": "mlp",
    "mlp": "mlp",
    "final_layernorm": "head",
    "output_layer": "head",
}
"""The role of the piece that a module's parameters belong to."""

_PARTS_OF_HEAD = {"final_layernorm": HEAD_NORM, "output_layer": HEAD_PART}
"""Where the head is divided, the kind of piece that a module of it is."""


def plain_piece_of(parameter: str) -> Piece:
    """The piece of a model's parameter, from its name, as if its layer, or its head, were a plain one."""
    parts = parameter.split(".")
    if parts[0] == "mtp":
        return Piece("head")
    role = next(_PIECES[part] for part in parts if part in _PIECES)
    return Piece(role, int(parts[2])) if parts[1] == "layers" else Piece(role)


def part_of_head(parameter: str) -> Piece:
    """The piece of a parameter of the head, from its name, as if the head were divided, without the part's number."""
    return Piece(next((_PARTS_OF_HEAD[part] for part in parameter.split(".") if part in _PARTS_OF_HEAD), ""))


class SelfAttention(MegatronModule):
    """The projections around core attention, the norms of each head's query and key, and learned sinks; `qkv`, `attn`
    and `proj` may be on different ranks. norm: the kernel of norms."""

    def __init__(
        self,
        config: TransformerConfig,
        index: int,
        kinds: Collection[str],
        tp_group: torch.distributed.ProcessGroup,
        draw: DrawWeights,
        norm: str,
    ):
        super().__init__(config)
        self.tp_group = tp_group
        assert config.kv_channels is not None and config.num_query_groups is not None  # TransformerConfig fills them in
        channels, heads, groups = config.kv_channels, config.num_attention_heads, config.num_query_groups
        if "qkv" in kinds:
            with draw(str(Piece("qkv", index))):
                self.linear_qkv = ColumnParallelLinear(
                    config.hidden_size,
                    channels * (heads * (1 + config.attention_output_gate) + 2 * groups),
                    config=config,
                    init_method=config.init_method,
                    bias=config.add_bias_linear or config.add_qkv_bias,
                    gather_output=False,
                    skip_bias_add=False,
                    tp_group=tp_group,
                )
            if config.qk_layernorm:
                self.q_layernorm = make_norm(config, norm, channels)
                self.k_layernorm = make_norm(config, norm, channels)
        if "attn" in kinds and config.softmax_type == LEARNABLE:
            with draw(str(Piece("attn", index))):
                self.core_attention = SoftmaxOffset(config, tp_group)
        if "proj" in kinds:
            with draw(str(Piece("proj", index))):
                self.linear_proj = output_projection(config, channels * heads, tp_group)
        self.groups, self.channels = groups // tp_group.size(), channels
        self._split = [channels * (heads // groups)] * (1 + config.attention_output_gate) + [channels, channels]

    def query_key_value(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what `linear_qkv` gives to [s, b, heads / tp, d] query, [s, b, groups / tp, d] key and value; the
        weight's rows lie group by group. With an output gate it is beside the query, which has 2 * d channels then."""
        query, *gate, key, value = mixed.unflatten(-1, (self.groups, -1)).split(self._split, dim=-1)
        query = query.reshape(*query.shape[:2], -1, self.channels)
        if self.config.qk_layernorm:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        if gate:
            query = torch.cat((query, gate[0].reshape(query.shape)), dim=-1)
        return query, key, value


class Layer(MegatronModule):
    """Pieces of one transformer layer, with the weights of exactly these pieces, each drawn on its own.

    kinds: of the pieces, by their roles.
    kernels: what norms and attention run on. mlp_chunk: tokens of a slice of the MLP; 0: whole. context: the ranks that
    share every chunk's rows.
    """

    def __init__(
        self,
        config: TransformerConfig,
        index: int,
        kinds: Mapping[str, str],
        rotary: Rotary | None,
        tp_group: torch.distributed.ProcessGroup,
        draw: DrawWeights,
        kernels: Kernels,
        mlp_chunk: int = 0,
        context: ContextParallel = ALONE,
    ):
        super().__init__(config)
        self.tp_group = tp_group
        self._index = index
        self._rotary = None if kinds.get("qkv") == NO_ROPE else rotary
        self._context = context
        if "norm" in kinds:
            self.input_layernorm = make_norm(config, kernels.norm)
        self._latent = isinstance(config, MLATransformerConfig)
        weighted = self._latent or config.softmax_type == LEARNABLE
        if "qkv" in kinds or "proj" in kinds or (weighted and "attn" in kinds):
            kind: Any = LatentSelfAttention if self._latent else SelfAttention
            self.self_attention: Any = kind(config, index, kinds, tp_group, draw, kernels.norm)
        if "attn" in kinds and self._latent:
            dropping = CoreAttention(config, kernels, index, tp_group) if config.attention_dropout else None
            self.core_attention: Any = LatentAttention(config, self.self_attention.expansion, dropping)
        elif "attn" in kinds:
            left = window_of(config) if kinds["attn"] in WINDOWS else None
            self.core_attention = CoreAttention(config, kernels, index, tp_group, left)
        if "mlp" in kinds:
            self.pre_mlp_layernorm = make_norm(config, kernels.norm)
            name = str(Piece("mlp", index))
            self._mixed = kinds["mlp"] == EXPERTS
            with draw(name):
                if self._mixed:
                    self.mlp: Any = ExpertLayer(config, index, lambda number: draw(f"{name}.expert[{number}]"))
                else:
                    self.mlp = make_mlp(config, mlp_chunk, tp_group)

    @property
    def _attention(self) -> Mapping[str, Any]:
        """Modules of attention by name: as attributes of modules, each takes the host as long as a small kernel."""
        attention: Any = self._modules["self_attention"]
        modules: Mapping[str, Any] = attention._modules
        return modules

    def piece(self, role: str) -> RunPiece:
        """What runs the piece of a role."""
        calls = {"norm": self.norm, "qkv": self.qkv, "attn": self.attn, "proj": self.proj, "mlp": self.ffn}
        return calls[role]

    def norm(self, state: State, batch: Microbatch, unit: UnitContext) -> State:
        """Hidden state to (norm output, residual)."""
        (hidden,) = state
        return direct.norm(self._modules["input_layernorm"], hidden), hidden

    def qkv(self, state: State, batch: Microbatch, unit: UnitContext) -> State:
        """(norm output, residual) to (query, key, value, residual), rotated for the chunk's tokens, each at its place
        in its document."""
        normed, residual = state
        if self._latent:
            query, key, latent = self.self_attention.query_key_latent(normed)
            return (*self._rotated_latent(query, key, unit.offset, batch.documents), latent, residual)
        mixed, _ = direct.column(self._attention["linear_qkv"], normed)
        rows = mixed.size(0)
        return (*self.heads(mixed, unit.offset, batch.documents, range(rows), rows), residual)

    def heads(
        self, mixed: Tensor, offset: int, documents: Documents | None, rows: range, of: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the QKV layer gives to query, key and value, rotated. rows: those of the `of` rows that this rank
        has of the chunk."""
        attention: Any = self._modules["self_attention"]
        if self._rotary is None:
            own: tuple[Tensor, Tensor, Tensor] = attention.query_key_value(mixed)
            return own
        runs = rows_of(self._context.runs(offset, of * self._context.size), rows)
        if not self.config.qk_layernorm:  # which would keep what the QKV layer gives in any case
            gate = self.config.attention_output_gate
            return self._rotary.heads(mixed, attention.groups, attention.channels, runs, documents, gate)
        query, key, value = attention.query_key_value(mixed)
        return self._rotary.rotate(query, runs, documents), self._rotary.rotate(key, runs, documents), value

    def _rotated_latent(
        self, query: Tensor, key: Tensor, offset: int, documents: Documents | None
    ) -> tuple[Tensor, Tensor]:
        """Rotate the channels that are for positions: the last of each query, and the key that all heads share."""
        assert self._rotary is not None
        runs, shared = (range(offset, offset + query.size(0)),), key.size(-1)
        own, turned = query.split([query.size(-1) - shared, shared], dim=-1)
        turned, key = (self._rotary.rotate(tensor, runs, documents) for tensor in (turned, key))
        return torch.cat((own, turned), dim=-1), key

    def attn(self, state: State, batch: Microbatch, unit: UnitContext) -> State:
        """(query, key, value, residual) to (attention output [s, b, heads / tp * d], residual)."""
        query, key, value, residual = state
        if self._context.size > 1 or unit.keys_values is not None or self.config.attention_output_gate:
            return finished(self.attn_in_steps(query, key, value, batch, unit)), residual
        # Whole sequences of one rank: what is left of the steps.
        end = unit.offset + query.size(0)
        attention = self.attend(
            query,
            key,
            value,
            training=unit.training,
            offset=unit.offset,
            end=end,
            chunked=False,
            documents=batch.documents,
        )
        return attention, residual

    def attn_in_steps(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch: Microbatch,
        unit: UnitContext,
        beside: ForwardBeside | None = None,
    ) -> Generator[None, None, Tensor]:
        """Attend; yields while context-parallel ranks exchange something, and at the end.

        Where the unit has keys and values of earlier chunks, they come before those given. The query is then copied if
        it is a view, since attention saves it and with it the memory of the key and value beside it.
        """
        training, offset, keys_values, documents = unit.training, unit.offset, unit.keys_values, batch.documents
        context, chunked = self._context, keys_values is not None
        stays = self.config.attention_output_gate or not context.swaps  # else what is exchanged is copied in any case
        query, gate = self.without_gate(query.contiguous() if chunked and stays else query)
        if isinstance(keys_values, UnitBlocks):
            if context.size > 1 or (training and self.config.attention_dropout):
                raise UserError("keys and values in blocks go without context parallelism and attention dropout.")
            core = self.core_attention
            expansion = core.expansion() if self._latent else None
            blocks = BlockAttention(
                keys_values, self._index, documents, core.scale, core.left, expansion, self._sinks(query)
            )
            attention = block_attention(query, key, value, blocks)
        elif context.rings:
            yield
            attention = yield from self._ring(query, key, value, offset, keys_values, documents, beside)
        else:
            query, key, value = yield from self.to_own_heads(query, key, value, beside)
            end = offset + query.size(0)
            if chunked and context.swaps:
                query = query.contiguous()
            key, value = self.all_keys(key, value, offset, keys_values, documents)
            attention = self.attend(
                query, key, value, training=training, offset=offset, end=end, chunked=chunked, documents=documents
            )
        attention = (yield from self.to_own_rows(attention, beside)) if self.pauses else attention
        return self.with_gate(attention, gate)

    def without_gate(self, query: Tensor) -> tuple[Tensor, Tensor | None]:
        """The query, and the gate that came beside it; None where there is none."""
        if not self.config.attention_output_gate:
            return query, None
        own, gate = query.chunk(2, dim=-1)
        return own, gate

    def with_gate(self, attention: Tensor, gate: Tensor | None) -> Tensor:
        """Attention of this rank's rows as its gate lets it through."""
        return attention if gate is None else gated(attention, gate)

    def _sinks(self, query: Tensor) -> Tensor | None:
        """The logits [heads] of softmax beside those of the keys of a query [n, b, heads, d]; None: there are none."""
        if self.config.softmax_type == VANILLA:
            return None
        if self.config.softmax_type != LEARNABLE:
            return query.new_zeros(query.size(2))
        every: Tensor = self.self_attention.core_attention.softmax_offset
        return every.chunk(self._context.size)[self._context.rank] if self._context.swaps else every

    @property
    def pauses(self) -> bool:
        """Whether a run for which another unit's backward pauses does so in the middle of what computes longest: beside
        tensor- and context-parallel ranks, but not where tokens that travel to experts are all that is to be hidden."""
        return max(self.tp_group.size(), self._context.size) > 1

    def to_own_heads(
        self, query: Tensor, key: Tensor, value: Tensor, beside: ForwardBeside | None = None
    ) -> Generator[None, None, tuple[Tensor, Tensor, Tensor]]:
        """Query, key and value of this rank's rows to those of its heads, where context-parallel ranks swap these."""
        if not self._context.swaps:
            return query, key, value
        assert self._context.group is not None
        return (yield from to_heads(self._context.group, query, key, value, beside))

    def to_own_rows(self, attention: Tensor, beside: ForwardBeside | None = None) -> Generator[None, None, Tensor]:
        """The attention of this rank's heads to that of its rows; one pause in any case."""
        if not self._context.swaps:
            attention = pause(attention, beside)
            yield
            return attention
        assert self._context.group is not None
        return (yield from to_rows(self._context.group, attention, beside))

    @property
    def swapping_ranks(self) -> int:
        """Context-parallel ranks whose rows each of them has in core attention."""
        return self._context.size if self._context.swaps else 1

    def attends_by_rows(self, keys_values: UnitKeyValues | UnitBlocks | None) -> bool:
        """Whether queries of some rows of a chunk can attend apart from those of others, by `all_keys` and `attend`."""
        return not self._context.rings and not isinstance(keys_values, UnitBlocks)

    def all_keys(
        self,
        key: Tensor,
        value: Tensor,
        offset: int,
        keys_values: UnitKeyValues | UnitBlocks | None,
        documents: Documents | None,
    ) -> tuple[Tensor, Tensor]:
        """The keys and values of a chunk from `offset` on, after those of earlier chunks that it sees."""
        if keys_values is None:
            return key, value
        assert not isinstance(keys_values, UnitBlocks)
        since = self._since(offset, self._spans(offset, key.size(0), documents))
        return keys_values.join(self._index, key, value, since)

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        training: bool,
        offset: int,
        end: int,
        chunked: bool,
        documents: Documents | None,
    ) -> Tensor:
        """Core attention of queries from token `offset` on; keys and values are `all_keys` of their chunk, which ends
        at `end`."""
        spans = self._spans(offset, query.size(0), documents)
        begin, last = end - keys.size(0), offset + query.size(0)
        since = begin if spans is None else spans.since
        if since > begin or last < end:
            keys, values = (tensor[since - begin : last - begin] for tensor in (keys, values))
        core, sinks = self._modules["core_attention"], self._sinks(query)
        attention: Tensor = direct.call(core, query, keys, values, training, chunked, spans, sinks)
        return attention

    def _spans(self, offset: int, length: int, documents: Documents | None) -> Spans | None:
        return None if documents is None else documents.spans(offset, length, self.core_attention.left)

    def _ring(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        offset: int,
        keys_values: UnitKeyValues | None,
        documents: Documents | None,
        beside: ForwardBeside | None,
    ) -> Generator[None, None, Tensor]:
        """Attention of this rank's rows, whose keys and values go round the context-parallel ranks."""
        length, chunks, core = query.size(0) * self._context.size, tuple[int, ...]([0]), self.core_attention
        if keys_values is not None:
            # Chunks that end before the first token that one of this one sees are of use to no rank, and stay at home.
            since = self._since(offset, self._spans(offset, length, documents))
            since = keys_values.chunk_of(self._index, since)
            key, value = keys_values.join(self._index, key, value, since // self._context.size)
            chunks = tuple(start for start in keys_values.chunks(self._index) if start >= since)
        rounds = ring_rounds(self._context, chunks, offset + length, documents, core.left)
        kernel = choose_kernel(query, key)
        ring = Ring(self._context, rounds, kernel, core.scale)
        return (yield from ring_attention(query, key, value, ring, beside, self._sinks(query)))

    def _since(self, offset: int, spans: Spans | None) -> int:
        """The first token of the microbatch that one of a chunk from `offset` on sees."""
        if spans is not None:
            return spans.since
        left = self.core_attention.left
        return 0 if left is None else max(offset - left, 0)

    def proj(self, state: State, batch: Microbatch, unit: UnitContext) -> State:
        """(attention output, residual) to one hidden state."""
        attention, residual = state
        return (self.add(direct.row(self._attention["linear_proj"], attention), residual, unit.training),)

    def ffn(self, state: State, batch: Microbatch, unit: UnitContext) -> State:
        """The `mlp` piece (norm, MLP or experts, residual): hidden state to hidden state."""
        (hidden,) = state
        normed = direct.norm(self._modules["pre_mlp_layernorm"], hidden)
        output = (
            self.mlp(normed, unit, self.real_rows(normed, batch, unit))
            if self._mixed
            else direct.mlp(self._modules["mlp"], normed)
        )
        return (self.add(output, hidden, unit.training),)

    def real_rows(
        self, hidden: Tensor, batch: Microbatch, unit: UnitContext, half: Half | None = None
    ) -> RealRows | None:
        """Return the rows of hidden states [s, b, h] that are no padding; None: all. half: of the unit; None: all."""
        if batch.real is None:
            return None
        rows, ranks, rank = hidden.size(0), 1, 0
        if self.config.sequence_parallel:
            ranks, rank = self.tp_group.size(), self.tp_group.rank()
        tokens = ranks * (rows if half is None else half.rows)
        own = range(tokens) if half is None else Halving(tokens, ranks).half(half.which)
        runs = self._context.runs(unit.offset, tokens * self._context.size)
        return batch.real.rows(rows_of(runs, own[rank * rows : (rank + 1) * rows]))

    def add(self, output_and_bias: tuple[Tensor, Tensor | None], residual: Tensor, training: bool) -> Tensor:
        """Bias, dropout and residual connection."""
        output, bias = output_and_bias
        if not (training and self.config.hidden_dropout) and (bias is None or not self.config.bias_dropout_fusion):
            return residual + (output if bias is None else output + bias)
        bias_dropout_add = get_bias_dropout_add(training, self.config.bias_dropout_fusion)
        return bias_dropout_add(output_and_bias, residual, self.config.hidden_dropout)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return this rank's part of the layer in a checkpoint, under megatron-core's checkpoint names."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        names = dict(LATENT_CHECKPOINT_NAMES if self._latent else CHECKPOINT_NAMES)
        if "mlp" in self._modules and self._mixed:
            del names["pre_mlp_layernorm."]
        apply_prefix_mapping(state, {prefix + name: prefix + saved for name, saved in names.items()})
        return state


def emptied(module: torch.nn.Module) -> torch.nn.Module:
    """Let go of every weight's data, but not of its shape."""
    for parameter in module.parameters():
        parameter.whole_shape = parameter.shape  # type: ignore[attr-defined]
        parameter.data = parameter.new_empty(0)
    return module
