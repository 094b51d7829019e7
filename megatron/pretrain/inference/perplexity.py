"""Measures how well a model predicts tokens near the beginning of a document and far from it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from helixpipe.common.errors import UserError
from helixpipe.common.flags import option
from helixpipe.draw.table import right_aligned
from helixpipe.model.attention.kv_store import KeyValueStore
from helixpipe.model.ends import Targets, token_losses
from megatron.pretrain.inference.model import ForwardModel


@dataclass(frozen=True)
class PerplexityOptions:
    """Options of the documents whose losses are measured."""

    documents: str | None = option(
        None, "Prefix of the .bin/.idx pair whose documents are predicted, each by itself.", metavar="PREFIX"
    )
    text: str | None = option(None, "A file of text, one document, in place of --documents.", metavar="FILE")
    context: int | None = option(None, "Tokens of a document that count (default: the model's sequence).", at_least=2)
    max_documents: int = option(100, "The longest so many documents.", at_least=1)
    buckets: tuple[int, ...] = option(
        (), "Positions at which a new bucket begins (default: 1024, 2048, 4096, ...).", nargs="+", at_least=1
    )
    chunk: int = option(1024, "Tokens that run at once.", at_least=1)
    json: str | None = option(None, "Write the table to this file as well.", flags=("--json",), metavar="FILE")


class PositionLoss(NamedTuple):
    """Tokens at positions begin to end - 1 of their documents; loss: the mean, in nats a token."""

    begin: int
    end: int
    tokens: int
    loss: float

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))


def context_of(model: ForwardModel, options: PerplexityOptions) -> int:
    """Return the tokens of a document that count. Raises UserError for more than the model has positions."""
    context = options.context or model.config.model.seq_length or 0
    if model.longest is not None and context > model.longest:
        raise UserError(f"--context {context} is more than the {model.longest} positions that the model has learned.")
    return context


def edges(context: int, asked: Sequence[int]) -> list[int]:
    """Return the boundaries of the buckets, from 0 to the context: [0, 1024, 2048, 4096, ..., context].

    Raises UserError for positions that do not increase or lie beyond the context.
    """
    if asked:
        if list(asked) != sorted(set(asked)) or asked[-1] >= context:
            raise UserError(f"--buckets {' '.join(map(str, asked))} must increase and stay below {context}.")
        return [0, *asked, context]
    first = 1024 if context >= 2048 else max(1, context // 8)
    bounds, edge = [0], first
    while context - edge > edge // 4:  # fewer join those before
        bounds.append(edge)
        edge *= 2
    return [*bounds, context]


def losses(model: ForwardModel, tokens: Tensor, chunk: int) -> Iterable[Tensor]:
    """Yield the losses of tokens 1 to n - 1 of a document [1, n] int64, as float32 parts, on the pipeline's last rank;
    nothing on the others. Collective over all ranks.
    """
    store, last = KeyValueStore(), tokens.size(1) - 1
    for offset in range(0, last, chunk):
        length = min(chunk, last - offset)
        hidden = model.hidden(tokens, offset, length, store)
        if hidden is not None:
            labels = tokens[:, offset + 1 : offset + 1 + length].t()
            with torch.no_grad():
                logits = model.model.logits(hidden)
                yield token_losses(logits, Targets(labels, torch.ones_like(labels, dtype=torch.float32)))[:, 0]


def perplexity(
    model: ForwardModel, documents: Iterable[Any], options: PerplexityOptions
) -> tuple[list[PositionLoss], int]:
    """Return (the buckets, documents read); losses are known on the last rank of the pipeline only. Collective.

    documents: token ids of each; those of one token count for nothing.
    """
    context = context_of(model, options)
    begins = edges(context, options.buckets)
    sums = torch.zeros((2, len(begins) - 1), dtype=torch.float64)
    count = 0
    for ids in documents:
        tokens = torch.as_tensor(ids[:context].astype("int64"), device=model.device)[None]
        count += 1
        position = 1
        for part in losses(model, tokens, options.chunk) if tokens.size(1) > 1 else ():
            positions = torch.arange(position, position + part.numel())
            bucket = torch.bucketize(positions, torch.tensor(begins[1:-1]), right=True)
            sums[0].index_add_(0, bucket, torch.ones_like(bucket, dtype=torch.float64))
            sums[1].index_add_(0, bucket, part.double().cpu())
            position += part.numel()
    rows = zip(begins, begins[1:], *sums.tolist(), strict=False)
    return [PositionLoss(low, high, int(n), total / n if n else math.nan) for low, high, n, total in rows], count


def table(buckets: Sequence[PositionLoss], documents: int) -> str:
    """Return a line for each bucket, and one for all of them."""
    tokens = sum(bucket.tokens for bucket in buckets)
    mean = sum(bucket.tokens * bucket.loss for bucket in buckets if bucket.tokens) / max(tokens, 1)
    rows = [
        (
            f"{each.begin:>8,} – {each.end - 1:>8,}",
            f"{each.tokens:,}",
            *((f"{each.loss:.4f}", f"{each.perplexity:.3f}") if each.tokens else ("-", "-")),
        )
        for each in buckets
    ]
    whole = PositionLoss(0, 0, tokens, mean)
    rows.append((f"{documents:,} documents", f"{tokens:,}", f"{mean:.4f}", f"{whole.perplexity:.3f}"))
    return "\n".join(right_aligned(("position", "tokens", "loss", "perplexity"), rows, (19, 10, 8, 10)))
