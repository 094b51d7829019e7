"""Text generation by a model, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from helixpipe.common.errors import DataError, UserError
from helixpipe.common.flags import option
from helixpipe.model.attention.kv_store import KeyValueStore
from megatron.pretrain.data.boundaries import end_of_document
from megatron.pretrain.data.conversations import token_ids
from megatron.pretrain.inference.model import ForwardModel


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


@dataclass(frozen=True)
class GenerationOptions(SamplingOptions):
    """Options of generation: prompts, and how much to write."""

    prompt: tuple[str, ...] = option((), "Text to go on with; several run one after another.", nargs="+")
    prompt_file: str | None = option(None, "A file whose text is a prompt.", metavar="FILE")
    max_new_tokens: int = option(100, "Tokens to write, unless a document ends before.", at_least=1)
    num_samples: int = option(1, "Continuations of each prompt, side by side.", at_least=1)
    sampling_seed: int = option(1234, "Of what is drawn.", at_least=0)
    prefill_chunk: int = option(2048, "Tokens of a prompt that run at once.", at_least=1)


def generate(model: ForwardModel, prompt: Sequence[int], options: GenerationOptions) -> Iterator[Tensor]:
    """Yield the next token of each sample, [samples] int64, on every rank; ends when all have ended, or at the most.

    prompt: token ids, at least one. The keys and values of what has run are kept. Collective over all ranks.

    Raises UserError for a row longer than the model has positions.
    """
    total = len(prompt) + options.max_new_tokens
    if model.longest is not None and total > model.longest:
        raise UserError(
            f"{len(prompt)} tokens of prompt and --max-new-tokens {options.max_new_tokens} are more than the "
            f"{model.longest} positions that the model has learned."
        )
    tokens = torch.zeros((options.num_samples, total), dtype=torch.int64, device=model.device)
    tokens[:, : len(prompt)] = torch.tensor(list(prompt), dtype=torch.int64)
    ended = torch.zeros(options.num_samples, dtype=torch.bool, device=model.device)
    generator = torch.Generator(model.device).manual_seed(options.sampling_seed)
    store, done, eod = KeyValueStore(), 0, _end(model)
    for position in range(len(prompt), total):
        while done < position:
            length = min(options.prefill_chunk, position - done)
            hidden = model.hidden(tokens, done, length, store)
            done += length
        following = torch.zeros(options.num_samples, dtype=torch.int64, device=model.device)
        if hidden is not None:
            following = pick(model.logits(hidden[-1:])[0], options, generator)
        dist.broadcast(following, group_src=model.parallel.pp_size - 1, group=model.parallel.pp_group)
        tokens[:, position] = following
        yield following
        ended |= following == eod
        if bool(ended.all()):
            return


def continuation(model: ForwardModel, prompt: str, options: GenerationOptions) -> list[str]:
    """Return the continuations of a prompt, one text for each sample, each up to its end of document. Collective over
    all ranks.
    """
    eod = _end(model)
    try:
        ids = token_ids(model.tokenizer, prompt) or ([eod] if eod >= 0 else [])
    except DataError as error:
        raise UserError(f"--prompt {prompt[:40]!r}: {error}.") from None
    if not ids:
        raise UserError("--prompt must have a token: the tokenizer has none for the end of a document, to begin with.")
    columns = list(generate(model, ids, options))
    texts = []
    for row in torch.stack(columns, dim=1).tolist():
        texts.append(_text(model.tokenizer, row[: row.index(eod)] if eod in row else row))
    return texts


def _end(model: ForwardModel) -> int:
    """Return the end-of-document token, -1 if the tokenizer has none."""
    eod = end_of_document(model.tokenizer)
    return -1 if eod is None else eod


def _text(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of the tokens. Tokens without text, which a poorly trained model also draws, are left out."""
    try:
        return str(tokenizer.detokenize(list(ids)))
    except (ValueError, IndexError, KeyError):
        return str(tokenizer.detokenize([each for each in ids if _stands_for_text(tokenizer, each)]))


def _stands_for_text(tokenizer: Any, token: int) -> bool:
    try:
        tokenizer.detokenize([token])
    except (ValueError, IndexError, KeyError):
        return False
    return True
