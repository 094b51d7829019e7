"""The two ends of the model: the embedding (`embed`) and the output layer with its loss (`head`)."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import (
    VocabParallelEmbedding,
    scatter_to_sequence_parallel_region,
    vocab_parallel_cross_entropy,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from helixpipe.model.options import GPTOptions, Microbatch, UnitContext


class Embedding(MegatronModule):
    """Word embedding and learned positions, with the weights of megatron-core's LanguageModelEmbedding.

    That class draws its dropout from megatron-core's random state tracker; here the caller seeds it.
    """

    def __init__(self, config: TransformerConfig, gpt: GPTOptions, tp_group: torch.distributed.ProcessGroup):
        super().__init__(config)
        self.tp_group = tp_group
        learned = gpt.position_embedding_type == "learned_absolute"
        self._scatter = config.sequence_parallel and learned  # else the word embedding returns its part of the sequence
        self.word_embeddings = VocabParallelEmbedding(
            gpt.vocab_size,
            config.hidden_size,
            init_method=config.embedding_init_method,
            reduce_scatter_embeddings=config.sequence_parallel and not learned,
            config=config,
            tp_group=tp_group,
        )
        self.position_embeddings: torch.nn.Embedding | None = None
        if learned:
            self.position_embeddings = torch.nn.Embedding(gpt.max_sequence_length, config.hidden_size)
            if config.perform_initialization:
                config.embedding_init_method(self.position_embeddings.weight)

    def forward(self, batch: Microbatch, context: UnitContext) -> Tensor:
        """The chunk's hidden states, [s, b, h], with sequence parallelism [s / tp, b, h]."""
        tokens = batch.tokens[:, context.tokens]
        hidden = self.word_embeddings(tokens)
        if not self.word_embeddings.reduce_scatter_embeddings:
            hidden = hidden.transpose(0, 1).contiguous()
        if self.position_embeddings is not None:
            if batch.position_ids is None:
                first = context.offset
                positions = torch.arange(first, first + tokens.size(1), device=tokens.device)[:, None]
            else:
                positions = batch.position_ids[:, context.tokens].t()
            hidden = hidden + self.position_embeddings(positions)
        if self._scatter:
            hidden = scatter_to_sequence_parallel_region(hidden, group=self.tp_group)
            if self.config.clone_scatter_output_in_embedding:
                hidden = hidden.clone()  # the part is a view that would keep the whole in memory
        return torch.nn.functional.dropout(hidden, self.config.hidden_dropout, context.training)


def loss_sum(logits: Tensor, batch: Microbatch, context: UnitContext) -> Tensor:
    """Sum over the chunk of token losses times loss mask, a float32 scalar; logits are [s, b, vocabulary / tp].

    megatron-core's loss computes in float32. It may overwrite float32 logits.
    """
    labels = batch.labels[:, context.tokens].t().contiguous()
    token_losses = vocab_parallel_cross_entropy(logits, labels)
    return torch.sum(token_losses * batch.loss_mask[:, context.tokens].t())
