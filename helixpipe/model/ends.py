"""The two ends of the model: the embedding (`embed`) and the output layer with its loss (`head`)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel import (
    VocabParallelEmbedding,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
    vocab_parallel_cross_entropy,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor

from helixpipe.model.options import GPTOptions, Microbatch, UnitContext


class PositionEmbedding(torch.nn.Embedding):
    """Learned positions; tensor-parallel ranks hold equally many rows each, or all of them if these cannot be shared.

    Its checkpoint entry is the whole table's, like that of megatron-core's, where every rank holds the table.
    """

    def __init__(self, config: TransformerConfig, rows: int, tp_group: torch.distributed.ProcessGroup):
        super().__init__(rows, config.hidden_size)
        self.tp_group = tp_group
        self.first_row = 0
        self.is_split = tp_group.size() > 1 and rows % tp_group.size() == 0
        if config.perform_initialization:
            assert config.embedding_init_method is not None  # TransformerConfig fills it in
            config.embedding_init_method(self.weight)
        if self.is_split:  # the whole was drawn, so that weights do not depend on the tensor-parallel size
            own = rows // tp_group.size()
            self.first_row = own * tp_group.rank()
            self.weight = torch.nn.Parameter(self.weight.detach()[self.first_row :][:own].clone())
            set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return this rank's rows of the table, or a copy of it."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0} if self.is_split else {},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


class Embedding(MegatronModule):
    """Word embedding and learned positions, with the weights of megatron-core's LanguageModelEmbedding.

    That class draws its dropout from megatron-core's random state tracker; here the caller seeds it. And it has the
    whole table of positions on every tensor-parallel rank; here ranks share it, and one reduction sums both lookups.
    """

    def __init__(self, config: TransformerConfig, gpt: GPTOptions, tp_group: torch.distributed.ProcessGroup):
        super().__init__(config)
        self.tp_group = tp_group
        learned = gpt.position_embedding_type == "learned_absolute"
        self.word_embeddings = VocabParallelEmbedding(
            gpt.vocab_size,
            config.hidden_size,
            init_method=config.embedding_init_method,
            reduce_scatter_embeddings=config.sequence_parallel and not learned,
            config=config,
            tp_group=tp_group,
        )
        self.position_embeddings: PositionEmbedding | None = None
        if learned:
            self.position_embeddings = PositionEmbedding(config, gpt.max_sequence_length, tp_group)

    def forward(self, batch: Microbatch, context: UnitContext) -> Tensor:
        """The chunk's hidden states, [s, b, h], with sequence parallelism [s / tp, b, h]."""
        tokens, table = batch.tokens[:, context.tokens], self.position_embeddings
        if table is None:
            hidden = self.word_embeddings(tokens)
            if not self.word_embeddings.reduce_scatter_embeddings:
                hidden = hidden.transpose(0, 1).contiguous()
        elif table.is_split:
            hidden = self._with_split_positions(table, tokens, _positions(batch, context))
        else:
            hidden = self.word_embeddings(tokens).transpose(0, 1).contiguous()
            hidden = hidden + table(_positions(batch, context))
            if self.config.sequence_parallel:
                hidden = scatter_to_sequence_parallel_region(hidden, group=self.tp_group)
                if self.config.clone_scatter_output_in_embedding:
                    hidden = hidden.clone()  # the part is a view that would keep the whole in memory
        return F.dropout(hidden, self.config.hidden_dropout, context.training)

    def _with_split_positions(self, table: PositionEmbedding, tokens: Tensor, positions: Tensor) -> Tensor:
        """Every word and every position is a row of one rank; the others add zeros."""
        words, deterministic = self.word_embeddings, self.config.deterministic_mode
        own = _own_rows(words.weight, words.vocab_start_index, tokens.t(), deterministic)
        own = own + _own_rows(table.weight, table.first_row, positions, deterministic)
        if self.config.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(own, group=self.tp_group)
        return reduce_from_tensor_model_parallel_region(own, group=self.tp_group)


def _positions(batch: Microbatch, context: UnitContext) -> Tensor:
    """[s, b] of the chunk's tokens; [s, 1] where they are the same in all sequences."""
    if batch.position_ids is not None:
        return batch.position_ids[:, context.tokens].t()
    if batch.documents is not None:
        return batch.documents.positions()[context.tokens]
    length = batch.tokens[:, context.tokens].size(1)
    return torch.arange(context.offset, context.offset + length, device=batch.tokens.device)[:, None]


def _own_rows(weight: Tensor, first: int, indices: Tensor, deterministic: bool) -> Tensor:
    """Rows `indices` of a table of which `weight` has those from `first` on; zeros for the others.

    deterministic: avoid embedding's own backward, as megatron-core does.
    """
    elsewhere = (indices < first) | (indices >= first + weight.size(0))
    own = (indices - first).masked_fill_(elsewhere, 0)
    rows = weight[own] if deterministic else F.embedding(own, weight)
    return rows.masked_fill_(elsewhere[..., None], 0.0)


class Targets(NamedTuple):
    """Of a chunk's tokens, or a slice of them. labels: [s, b] int64. weights: [s, b] float32, of each token's loss in
    the sum: the loss mask."""

    labels: Tensor
    weights: Tensor

    @classmethod
    def read(cls, batch: Microbatch, context: UnitContext) -> Targets:
        return cls(batch.labels[:, context.tokens].t(), batch.loss_mask[:, context.tokens].t())

    def of(self, rows: slice) -> Targets:
        return Targets(self.labels[rows], self.weights[rows])


def loss_sum(logits: Tensor, targets: Targets) -> Tensor:
    """Sum of token losses times their weights, a float32 scalar; logits are [s, b, vocabulary / tp]."""
    return torch.sum(token_losses(logits, targets) * targets.weights)


def token_losses(logits: Tensor, targets: Targets) -> Tensor:
    """[s, b] float32, of logits [s, b, vocabulary / tp].

    megatron-core's loss computes in float32. It may overwrite float32 logits.
    """
    losses: Tensor = vocab_parallel_cross_entropy(logits, targets.labels.contiguous())
    return losses


def mark_ends(embedding: Any, head: Any, *, tied: bool, here: bool) -> None:
    """Set the attributes by which megatron-core's optimizer knows the weights of word embedding and output layer, None
    where a rank has none of its own. here: whether it runs the output layer."""
    for weight in (embedding, head):
        if weight is not None:
            weight.is_embedding_or_output_parameter = True
    if not tied:
        return
    if embedding is not None and here and head is None:
        embedding.zero_out_wgrad = True  # used twice: a fused weight gradient must not leave garbage behind
        return
    for weight in (embedding, head):
        if weight is not None:
            weight.shared_embedding = True
    if head is not None:
        head.shared = True  # counted in norms on the embedding's rank only
