"""The next token of a distribution over all of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from helixpipe.common.flags import option


@dataclass(frozen=True)
class SamplingOptions:
    """Options of how the next token is drawn."""

    greedy: bool = option(False, "Always the likeliest token.")
    temperature: float = option(1.0, "Logits are divided by it: below 1 likelier tokens win more often.", more_than=0)
    top_k: int = option(0, "Draw from the so many likeliest tokens; 0: from all.", at_least=0)
    top_p: float = option(
        1.0,
        "Draw from the fewest likeliest tokens that have this probability together (Holtzman et al., 2020).",
        more_than=0,
        at_most=1,
    )


def pick(logits: Tensor, options: SamplingOptions, generator: torch.Generator | None = None) -> Tensor:
    """Return the next token of each row, [rows] int64, of logits [rows, vocabulary]."""
    if options.greedy:
        return logits.argmax(dim=-1)
    return torch.multinomial(kept(logits, options), 1, generator=generator).squeeze(-1)


def kept(logits: Tensor, options: SamplingOptions) -> Tensor:
    """Return the probabilities [rows, vocabulary] of the tokens that may be drawn; 0 for the others, not normalised."""
    probabilities = torch.softmax(logits.float() / options.temperature, dim=-1)
    ordered, tokens = probabilities.sort(dim=-1, descending=True, stable=True)
    if options.top_k:
        ordered[:, options.top_k :] = 0
    before = ordered.cumsum(dim=-1) - ordered
    total = ordered.sum(dim=-1, keepdim=True)
    ordered[before >= options.top_p * total] = 0
    return torch.zeros_like(probabilities).scatter_(-1, tokens, ordered)
