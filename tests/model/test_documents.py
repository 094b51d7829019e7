"""Where documents lie in chunks, and attention and positions that follow them, on every kernel."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helixpipe.model.attention import document_attention
from helixpipe.model.attention.core_attention import CoreAttention
from helixpipe.model.attention.rotary import Rotary
from helixpipe.model.documents import Documents
from tests import fakes
from tests.distributed import run_ranks
from tests.model.common import CHAIN, CONTEXT, make_batch, make_config, make_model, make_options, set_parallel
from tests.model.test_attention_kernels import CHANNELS, HEADS, make

CUTS = [(0, 12), (0, 5), (5, 4), (9, 3), (4, 1)]
"""First row of a chunk, and its tokens."""

LENGTHS = ((2, 6, 4), (12,), (1, 1, 3, 7))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
def test_parts_are_the_tokens_that_a_token_may_see(lengths: list[int], data: Any) -> None:
    tokens = sum(lengths)
    offset = data.draw(st.integers(0, tokens - 1))
    length = data.draw(st.integers(1, tokens - offset))
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    seen = (numbers[:, None] == numbers) & torch.ones(tokens, tokens, dtype=torch.bool).tril()
    documents = Documents([lengths])
    spans = documents.spans(offset, length)
    ours = torch.zeros(length, tokens, dtype=torch.bool)
    for part in spans.parts:
        mask = torch.ones(part.end - part.first, part.key_end - part.key, dtype=torch.bool).tril(part.earlier)
        ours[part.first : part.end, spans.since + part.key : spans.since + part.key_end] = mask
    assert torch.equal(ours, seen[offset : offset + length])
    assert spans.since == int(seen[offset].nonzero()[0])
    positions = torch.cat([torch.arange(each) for each in lengths])
    assert torch.equal(documents.positions()[:, 0], positions)


@pytest.mark.parametrize("lengths", [((3, 4), (3, 3)), ((3, 0), (1, 2)), ((-1, 4), (3,))])
def test_lengths_that_are_none(lengths: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="no lengths of documents"):
        Documents(lengths)


def by_document(query: Any, key: Any, value: Any, documents: Documents, offset: int) -> torch.Tensor:
    """Every row's scores written out over all keys from row 0 on, with a mask."""
    samples = []
    for sample, lengths in enumerate(documents.lengths):
        numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        rows = torch.arange(offset, offset + len(query))
        mask = (numbers[rows, None] == numbers[: len(key)]) & (rows[:, None] >= torch.arange(len(key)))
        keys, values = (tensor[:, sample].repeat_interleave(HEADS // key.size(2), dim=1) for tensor in (key, value))
        scores = torch.einsum("nhd,mhd->hnm", query[:, sample], keys) * CHANNELS**-0.5
        shares = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        samples.append(torch.einsum("hnm,mhd->nhd", shares, values).flatten(1))
    return torch.stack(samples, dim=1)


KERNELS = ["torch CPU", "torch math", "torch flash", "flash-attn", "flash-attn-3"]


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_keeps_documents_apart(kernel: str, groups: int) -> None:
    """In outputs and gradients, with samples whose first documents begin in different rows."""
    generator = torch.Generator().manual_seed(5)
    documents = Documents(LENGTHS)
    with fakes.installed(flash_attn=fakes.FlashAttention(), flash_attn_interface=fakes.FlashAttention3()):
        attention: CoreAttention = make(kernel, groups)
        for offset, length in CUTS:
            shape = (len(LENGTHS), groups, CHANNELS)
            key, value = (torch.randn(offset + length, *shape, generator=generator).double() for _ in range(2))
            query = torch.randn(length, len(LENGTHS), HEADS, CHANNELS, generator=generator).double()
            gradient = torch.randn(length, len(LENGTHS), HEADS * CHANNELS, generator=generator).double()
            spans = documents.spans(offset, length)
            results = []
            for ours in (True, False):
                own_query, keys, values = leaves = [each.clone().requires_grad_() for each in (query, key, value)]
                if ours:
                    given = (own_query, keys[spans.since :], values[spans.since :])
                    output = attention(*given, training=True, chunked=True, spans=spans)
                else:
                    output = by_document(own_query, keys, values, documents, offset)
                output.backward(gradient)
                results.append([output.detach(), *(leaf.grad for leaf in leaves)])
            for ours, theirs in zip(*results, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_the_fused_kernel_is_called_once_for_all_documents_of_a_sample() -> None:
    library = fakes.FlashAttention()
    query, keys = torch.randn(7, 1, HEADS, CHANNELS), torch.randn(12, 1, 2, CHANNELS)
    with fakes.installed(flash_attn=library):
        spans = Documents([(9, 2, 1)]).spans(5, 7)
        make("flash-attn", 2, attention_dropout=0.25, deterministic_mode=True)(query, keys, keys, True, True, spans)
    assert library.calls == [
        {"dropout_p": 0.25, "deterministic": True, "shapes": (query[:, 0].shape, keys[:, 0].shape)}
    ]


def test_torchs_own_kernel_for_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU without flash-attn runs: with as many keys as queries have heads, and a window that ends at each."""
    calls: list[tuple[Any, ...]] = []

    class Module:
        @staticmethod
        def varlen_attn(
            query: Any, key: Any, value: Any, queries: Any, keys: Any, most: int, most_keys: int, *, scale: float,
            window_size: tuple[int, int],
        ) -> torch.Tensor:  # fmt: skip
            calls.append((key.size(1), most, most_keys, window_size))
            return fakes.packed(query, key, value, queries, keys, scale)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib, "import_module", lambda name: Module)
    attend = document_attention._torch_flash()
    assert attend is not None
    documents = Documents([(9, 2, 1)])
    query, key = torch.randn(7, 1, HEADS, CHANNELS).double(), torch.randn(12, 1, 2, CHANNELS).double()
    ours = document_attention._by_sample(attend)(query, key, key, documents.spans(5, 7), CHANNELS**-0.5, 0.0)
    torch.testing.assert_close(ours, by_document(query, key, key, documents, 5))
    assert calls == [(HEADS, 4, 9, (-1, 0))]


def test_what_one_document_says_changes_nothing_for_the_others() -> None:
    """Not a bit of their logits, and of the gradients of their tokens."""
    (found,) = run_ranks(changed_logits, 1)
    assert found == {"seen": True, "logits": True, "gradients": True}


def changed_logits(rank: int, world_size: int) -> dict[str, bool]:
    set_parallel(tp=1)
    lengths = (4, 5, 3)
    model, documents = make_model("llama", False), Documents([lengths, lengths])
    results = []
    for changed in (0, 1):
        batch = replace(make_batch(), documents=documents)
        tokens = batch.tokens.clone()
        tokens[:, 4:9] = (tokens[:, 4:9] + changed) % 48
        batch = replace(batch, tokens=tokens)
        (hidden,) = model.run(CHAIN[:1], (), batch, CONTEXT)
        hidden = hidden.detach().requires_grad_()
        logits = model.logits(*model.run(CHAIN[1:-1], (hidden,), batch, CONTEXT))
        torch.sin(logits).sum().backward()
        assert hidden.grad is not None
        results.append((logits.detach(), hidden.grad))
    others = [0, 1, 2, 3, 9, 10, 11]
    (logits, gradients), (new_logits, new_gradients) = results
    return {
        "seen": not torch.equal(logits[4:9], new_logits[4:9]),
        "logits": torch.equal(logits[others], new_logits[others]),
        "gradients": torch.equal(gradients[others], new_gradients[others]),
    }


def test_dropout_on_the_cpu_keeps_documents_apart_too() -> None:
    documents, generator = Documents([(3, 4)]), torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(7, 1, HEADS, CHANNELS, generator=generator) for _ in range(3))
    attention = make("torch CPU", HEADS, attention_dropout=0.5)
    outputs = []
    for changed in (0.0, 1.0):
        torch.manual_seed(3)
        value[:3] += changed
        outputs.append(attention(query, key, value, True, False, documents.spans(0, 7)))
    assert torch.equal(outputs[0][3:], outputs[1][3:]) and not torch.equal(outputs[0][:3], outputs[1][:3])


@pytest.mark.parametrize("percent", [1.0, 0.5])
def test_rotation_counts_by_document(percent: float) -> None:
    """Forward and back: each document as if it were alone, whatever rows a chunk has."""

    rotary = Rotary(make_config("llama"), replace(make_options("llama", False), rotary_percent=percent))
    documents = Documents(((2, 6, 4), (5, 7)))
    tensor = torch.randn(12, 2, HEADS, CHANNELS, dtype=torch.float64).requires_grad_()
    together = torch.cat([rotary.rotate(tensor[:5], (range(5),), documents),
                          rotary.rotate(tensor[5:], (range(5, 12),), documents)])  # fmt: skip
    alone = torch.cat(
        [
            torch.cat([rotary.rotate(part, (range(len(part)),)) for part in tensor[:, i : i + 1].split(lengths)])
            for i, lengths in enumerate(documents.lengths)
        ],
        dim=1,
    )
    assert torch.equal(together, alone)
    gradient = torch.randn_like(together)
    ours, theirs = (torch.autograd.grad(output, tensor, gradient)[0] for output in (together, alone))
    torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-14)
