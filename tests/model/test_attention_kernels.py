"""How each kernel of core attention is called, and that all give the same: torch's here, libraries' through fakes."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend

from helixpipe.common.errors import UserError
from helixpipe.model.attention.core_attention import CoreAttention
from helixpipe.model.backends import Kernels
from tests import fakes
from tests.distributed import run_ranks
from tests.model import kernels
from tests.model.common import make_config

HEADS, CHANNELS, BATCH = 4, 8, 2
SHAPES = [(0, 6), (5, 1), (3, 9), (70, 93)]
"""Tokens before, tokens of the chunk."""

NVTE = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


def tensors(earlier: int, length: int, groups: int) -> list[torch.Tensor]:
    """Query, key, value, and a gradient for the output, float64."""
    generator = torch.Generator().manual_seed(earlier)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    keys, values = (draw(earlier + length, BATCH, groups, CHANNELS) for _ in range(2))
    return [draw(length, BATCH, HEADS, CHANNELS), keys, values, draw(length, BATCH, HEADS * CHANNELS)]


def run(attention: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, gradient: torch.Tensor) -> Any:
    """Output and the three gradients."""
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    output = attention(*leaves, training=True)
    output.backward(gradient)
    return [output.detach(), *(leaf.grad for leaf in leaves)]


def reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, training: bool) -> torch.Tensor:
    """Scores, mask and softmax written out."""
    query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
    return fakes.lower_right(query, key, value, CHANNELS**-0.5).transpose(0, 1).flatten(2)


def make(kernel: str, groups: int, **changes: Any) -> CoreAttention:
    return CoreAttention(make_config("llama", num_query_groups=groups, **changes), Kernels(kernel, kernel, "torch"))


def assert_equals_reference(attention: CoreAttention, earlier: int, length: int, groups: int) -> None:
    inputs = tensors(earlier, length, groups)
    for ours, theirs in zip(run(attention, *inputs), run(reference, *inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("earlier", "length"), SHAPES)
@pytest.mark.parametrize("kernel", ["torch CPU", "torch math", "torch flash"])
def test_torchs_kernels(kernel: str, earlier: int, length: int, groups: int) -> None:
    """Pinned kernels as on a GPU: torch's kernel for the CPU stands for its flash kernel."""
    assert_equals_reference(make(kernel, groups), earlier, length, groups)


def test_a_pinned_kernel_is_the_one_that_runs() -> None:
    """With the math kernel autograd keeps the scores, with the flash kernel nothing that large."""
    query, *others, _ = tensors(0, 40, HEADS)
    assert largest_kept("torch math", query, *others) >= 40 * 40 * BATCH * HEADS
    assert largest_kept("torch flash", query, *others) == query.numel()


def largest_kept(kernel: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        make(kernel, HEADS)(query.requires_grad_(), key, value, training=True)
    return max(tensor.numel() for tensor in kept)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("earlier", "length"), SHAPES)
def test_flash_attn(earlier: int, length: int, groups: int) -> None:
    library = fakes.FlashAttention()
    with fakes.installed(flash_attn=library):
        assert_equals_reference(make("flash-attn", groups), earlier, length, groups)
    shapes = (BATCH, length, HEADS, CHANNELS), (BATCH, earlier + length, groups, CHANNELS)
    assert library.calls == [{"dropout_p": 0.0, "deterministic": False, "shapes": shapes}]


def test_flash_attn_is_told_of_dropout_and_determinism() -> None:
    library = fakes.FlashAttention()
    query, key, value, _ = tensors(3, 5, 2)
    with fakes.installed(flash_attn=library):
        attention = make("flash-attn", 2, attention_dropout=0.25, deterministic_mode=True)
        for training in (True, False):
            assert attention(query, key, value, training=training).is_contiguous()
    assert [(call["dropout_p"], call["deterministic"]) for call in library.calls] == [(0.25, True), (0.0, True)]


@pytest.mark.parametrize("as_tuple", [False, True])
@pytest.mark.parametrize(("earlier", "length"), SHAPES)
def test_flash_attn_3(earlier: int, length: int, as_tuple: bool) -> None:
    library = fakes.FlashAttention3(as_tuple)
    with fakes.installed(flash_attn_interface=library):
        assert_equals_reference(make("flash-attn-3", 2), earlier, length, 2)
    assert library.calls == [((BATCH, length, HEADS, CHANNELS), (BATCH, earlier + length, 2, CHANNELS))]


def test_a_softmax_scale_of_ones_own_reaches_every_kernel() -> None:
    inputs = tensors(3, 5, 2)
    with fakes.installed(flash_attn=fakes.FlashAttention(), flash_attn_interface=fakes.FlashAttention3()):
        results = [
            run(make(kernel, 2, softmax_scale=0.7), *inputs)
            for kernel in ("torch CPU", "torch math", "torch flash", "flash-attn", "flash-attn-3")
        ]
    for result in results[1:]:
        for ours, theirs in zip(result, results[0], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_chunks_have_a_kernel_of_their_own_from_the_first_one_on() -> None:
    query, key, value, _ = tensors(0, 6, 2)
    library = fakes.FlashAttention()
    with fakes.installed(flash_attn=library):
        attention = CoreAttention(make_config("llama"), Kernels("torch math", "flash-attn", "torch"))
        attention(query, key, value, training=True)
        assert len(library.calls) == 0
        attention(query, key, value, training=True, chunked=True)
        attention(query[4:], key, value, training=True)
    assert len(library.calls) == 2


# --------------------------------------------------------------------------------------- whole models on each library


@pytest.fixture(scope="module")
def differences() -> dict[str, Any]:
    return run_ranks(kernels.compare, 1)[0]


@pytest.mark.parametrize("what", ["whole", "chunks", "split"])
@pytest.mark.parametrize("library", list(kernels.LIBRARIES))
@pytest.mark.parametrize("style", ["gpt", "llama"])
def test_models_on_a_library_have_the_gradients_of_those_on_torch(
    differences: dict[str, Any], style: str, library: str, what: str
) -> None:
    difference, name = differences[f"{style}-{library}-{what}"]
    assert difference < 1e-9, name


@pytest.mark.parametrize("style", ["gpt", "llama"])
@pytest.mark.parametrize("library", list(kernels.LIBRARIES))
def test_weights_and_checkpoints_do_not_know_the_library(differences: dict[str, Any], style: str, library: str) -> None:
    assert differences[f"{style}-{library}-state"] == differences[f"{style}-torch-state"]


def test_the_library_that_is_named_runs(differences: dict[str, Any]) -> None:
    """Each in the whole run, in the chunks, in their backward where it recomputes nothing: counts of the forward."""
    layers, norms, units = 2, 5, 3 * 2
    for style in ("gpt", "llama"):
        assert differences[f"{style}-flash-attn-calls"] == layers * (1 + 2 * units)
        assert differences[f"{style}-flash-attn-3-calls"] == layers * (1 + 2 * units)
        assert differences[f"{style}-apex-calls"] == ["RMSNorm" if style == "llama" else "LayerNorm"] * norms
        rotated = 2 * layers * (1 + 2 * units) if style == "llama" else 0  # queries and keys
        assert differences[f"{style}-transformer-engine-calls"] == (layers, norms * (1 + 2 * units), rotated)


def test_transformer_engine_is_made_as_megatron_core_makes_it() -> None:
    """And told by the environment what to choose from, as megatron-core does."""
    engine = fakes.TransformerEngine()
    config = make_config("llama", attention_backend=AttnBackend.fused)
    with mock.patch.dict(os.environ), fakes.installed(**fakes.engine_modules(engine)):
        for name in NVTE:
            os.environ.pop(name, None)
        make_engine(config, layer=1)
        (made,) = engine.made
        assert (made["layer_number"], made["attn_mask_type"].name, made["attention_type"]) == (2, "causal", "self")
        assert [os.environ[name] for name in NVTE] == ["0", "1", "0"]
        os.environ["NVTE_FLASH_ATTN"] = "1"
        with pytest.raises(UserError, match="NVTE_FLASH_ATTN=1 in the environment contradicts --attention-backend fus"):
            make_engine(config)


def make_engine(config: TransformerConfig, layer: int = 0) -> CoreAttention:
    return CoreAttention(config, Kernels("transformer-engine", "torch CPU", "torch"), layer)
