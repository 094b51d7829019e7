"""Core attention (the `attn` piece).

megatron-core's own unfused attention keeps the s x s scores in memory; here they exist only where someone asks for them
(`--attention-backend unfused`) or no fused kernel can be had, as for dropout on the CPU. Which kernel runs is decided
in `backends.py`, how it is called in `kernels.py`.
"""

from __future__ import annotations

import math

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from helixpipe.model.attention.document_attention import make_attend_documents, part_by_part
from helixpipe.model.attention.kernels import make_attend
from helixpipe.model.attention.tiled_attention import attend_in_tiles, attend_with_dropout
from helixpipe.model.backends import Kernels, Machine, choose
from helixpipe.model.documents import Spans


class CoreAttention(torch.nn.Module):
    """Causal attention of a sequence, or of its last tokens; no weights, so a module only to carry its kernels.

    kernels: which to run on; None: those for this machine. layer: index of the layer; tp_group: of the ranks that share
    its heads. left: tokens before its own that a token sees; None: all.
    """

    def __init__(
        self,
        config: TransformerConfig,
        kernels: Kernels | None = None,
        layer: int = 0,
        tp_group: torch.distributed.ProcessGroup | None = None,
        left: int | None = None,
    ):
        super().__init__()
        self.left = left
        kernels = kernels if kernels is not None else choose(config, Machine.here())
        self._dropout = config.attention_dropout
        assert config.kv_channels is not None  # TransformerConfig fills it in
        self.scale = config.softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self._whole = make_attend(kernels.attention, config, layer, tp_group, left)
        self._chunk = make_attend(kernels.chunk_attention, config, layer, tp_group, left)
        self._documents = make_attend_documents(kernels.chunk_attention, config, self._chunk, left)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        training: bool,
        chunked: bool = False,
        spans: Spans | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """[n, b, heads, d] query and [c + n, b, groups, d] key and value to [n, b, heads * d].

        The queries are those of the last n of the c + n tokens; c = 0 for a whole sequence. chunked: the sequence runs
        chunk by chunk, also where this is its first one. spans: the parts of documents that the chunk is made of; None:
        one document. sinks: logits [heads] beside those of the keys; None: there are none.
        """
        if sinks is not None:
            return self._with_sinks(query, key, value, self._dropout if training else 0.0, spans, sinks)
        if spans is not None:
            dropout = self._dropout if training else 0.0
            return self._documents(query, key, value, spans, self.scale, dropout)
        attend = self._chunk if chunked or query.size(0) != key.size(0) else self._whole
        return attend(query, key, value, self.scale, self._dropout if training else 0.0)

    def _with_sinks(
        self, query: Tensor, key: Tensor, value: Tensor, dropout: float, spans: Spans | None, sinks: Tensor
    ) -> Tensor:
        if not dropout:
            return attend_in_tiles(query, key, value, self.left, self.scale, spans, sinks)

        def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float) -> Tensor:
            return attend_with_dropout(query, key, value, self.left, scale, dropout, sinks)

        if spans is None:
            return attend(query, key, value, self.scale, dropout)
        return part_by_part(attend)(query, key, value, spans, self.scale, dropout)
