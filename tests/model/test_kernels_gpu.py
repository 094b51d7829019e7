"""Every kernel on a GPU against the same written out in float64: attention forward and backward, norms, gradients."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend

from helixpipe.model.attention.core_attention import CoreAttention
from helixpipe.model.attention.log_sums import hidden_scores
from helixpipe.model.backends import LIBRARIES, Kernels, Machine, choose
from helixpipe.model.linear import add_weight_gradient
from helixpipe.model.norms import make_norm
from tests.fakes import lower_right
from tests.model.common import make_config

pytestmark = pytest.mark.gpu

HEADS, BATCH = 8, 2
SHAPES = [(0, 128), (0, 129), (70, 93), (1000, 37), (64, 1)]
"""Tokens before, tokens of the chunk."""

TORCH = ["torch flash", "torch cuDNN", "torch efficient", "torch math"]
OF_LIBRARIES = ["flash-attn", "flash-attn-3"]
CASES = [
    (kernel, earlier, length)
    for kernel in (*TORCH, *OF_LIBRARIES)
    for earlier, length in SHAPES
    if kernel != "torch cuDNN" or not earlier  # it has no mask for chunks, and is not chosen there
]


def need(library: str) -> None:
    if not all(find_spec(module) for module in LIBRARIES[library].modules):
        pytest.skip(f"{library} is not installed")


def config(**changes: Any) -> Any:
    settings = {"num_attention_heads": HEADS, "hidden_size": 64 * HEADS, "params_dtype": torch.bfloat16}
    return make_config("llama", **{**settings, "transformer_impl": "local", **changes})


def tensors(earlier: int, length: int, groups: int, channels: int) -> list[torch.Tensor]:
    """Query, key, value, and a gradient for the output, float64 on the GPU but of values bfloat16 has."""
    generator = torch.Generator().manual_seed(earlier)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16().double().cuda()

    keys, values = (draw(earlier + length, BATCH, groups, channels) for _ in range(2))
    return [draw(length, BATCH, HEADS, channels), keys, values, draw(length, BATCH, HEADS * channels)]


def run(attention: Any, dtype: torch.dtype, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Output and the three gradients, float64."""
    leaves = [tensor.to(dtype, copy=True).requires_grad_() for tensor in inputs[:3]]
    output = attention(*leaves, training=True)
    output.backward(inputs[3].to(dtype))
    return [tensor.detach().double() for tensor in (output, *(leaf.grad for leaf in leaves)) if tensor is not None]


def written_out(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, training: bool) -> torch.Tensor:
    scale = query.size(-1) ** -0.5
    query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
    return lower_right(query, key, value, scale).transpose(0, 1).flatten(2)


def assert_close(ours: list[torch.Tensor], theirs: list[torch.Tensor], tolerance: float) -> None:
    for mine, expected in zip(ours, theirs, strict=True):
        assert (mine - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("channels", [64, 128, 40])
@pytest.mark.parametrize("groups", [1, 2, HEADS])
@pytest.mark.parametrize(("kernel", "earlier", "length"), CASES)
def test_attention(kernel: str, earlier: int, length: int, groups: int, channels: int) -> None:
    if kernel in OF_LIBRARIES:
        need(kernel)
    inputs = tensors(earlier, length, groups, channels)
    expected = run(written_out, torch.float64, inputs)
    attention = CoreAttention(config(num_query_groups=groups, kv_channels=channels), Kernels(kernel, kernel, "torch"))
    assert_close(run(attention, torch.bfloat16, inputs), expected, 2e-2)
    if kernel in ("torch efficient", "torch math"):
        assert_close(run(attention, torch.float32, inputs), expected, 5e-3)


@pytest.mark.parametrize("left", [0, 5, 63, 200])
@pytest.mark.parametrize("groups", [2, HEADS])
@pytest.mark.parametrize(("kernel", "earlier", "length"), CASES)
def test_attention_to_a_window(kernel: str, earlier: int, length: int, groups: int, left: int) -> None:
    if kernel in OF_LIBRARIES:
        need(kernel)
    inputs = tensors(earlier, length, groups, 64)
    hidden = hidden_scores(length, earlier + length, earlier, left - earlier, inputs[0].device)

    def masked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, training: bool) -> torch.Tensor:
        key, value = (each.repeat_interleave(HEADS // groups, dim=2) for each in (key, value))
        scores = torch.einsum("nbhd,mbhd->bhnm", query, key) * query.size(-1) ** -0.5
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
        return torch.einsum("bhnm,mbhd->nbhd", weights, value).flatten(2)

    attention = CoreAttention(
        config(num_query_groups=groups, kv_channels=64), Kernels(kernel, kernel, "torch"), left=left
    )
    assert_close(run(attention, torch.bfloat16, inputs), run(masked, torch.float64, inputs), 2e-2)


@pytest.mark.parametrize("groups", [2, HEADS])
def test_attention_of_transformer_engine(groups: int) -> None:
    need("transformer-engine")
    inputs = tensors(0, 129, groups, 64)
    attention = CoreAttention(
        config(num_query_groups=groups, attention_backend=AttnBackend.auto),
        Kernels("transformer-engine", "torch flash", "torch"),
    )
    assert_close(run(attention, torch.bfloat16, inputs), run(written_out, torch.float64, inputs), 2e-2)


@pytest.mark.parametrize("kernel", ["torch flash", "torch efficient", "torch math", "flash-attn"])
@pytest.mark.parametrize(("earlier", "length"), [(0, 512), (300, 212)])
def test_deterministic_attention_repeats_to_the_bit(
    kernel: str, earlier: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if kernel in OF_LIBRARIES:
        need(kernel)
    inputs = tensors(earlier, length, 2, 64)
    attention = CoreAttention(config(num_query_groups=2, deterministic_mode=True), Kernels(kernel, kernel, "torch"))
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (run(attention, torch.bfloat16, inputs) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


@pytest.mark.parametrize("backend", ["auto", "flash", "fused", "unfused", "local"])
@pytest.mark.parametrize("dropout", [0.0, 0.125])
def test_what_is_chosen_here_runs(backend: str, dropout: float) -> None:
    chosen = config(attention_backend=AttnBackend[backend], attention_dropout=dropout)
    kernels = choose(chosen, Machine.here())
    attention = CoreAttention(chosen, kernels)
    for earlier, length in SHAPES:
        output, *gradients = run(attention, torch.bfloat16, tensors(earlier, length, 2, 64))
        assert all(tensor.isfinite().all() for tensor in (output, *gradients))


@pytest.mark.parametrize("style", ["gpt", "llama"])
@pytest.mark.parametrize("kernel", ["apex", "transformer-engine"])
def test_norms(kernel: str, style: str) -> None:
    need(kernel)
    settings = make_config(style, hidden_size=1024, params_dtype=torch.bfloat16, use_cpu_initialization=False)
    results = []
    for each in ("torch", kernel):
        norm = make_norm(settings, each).cuda()
        hidden = torch.randn(37, 2, 1024, generator=torch.Generator().manual_seed(0)).bfloat16().cuda().requires_grad_()
        output = norm(hidden)
        (output * torch.linspace(-1, 1, 1024, device="cuda")).sum().backward()
        results.append([output.detach(), hidden.grad, *(parameter.grad for parameter in norm.parameters())])
    assert_close(results[0], results[1], 2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_weight_gradients(dtype: torch.dtype) -> None:
    need("fused_weight_gradient_mlp_cuda")
    weight: Any = torch.nn.Parameter(torch.empty(96, 64, dtype=torch.bfloat16, device="cuda"))
    inputs, gradient = (torch.randn(33, 2, size, device="cuda").bfloat16() for size in (64, 96))
    sums = []
    for fused in (False, True):
        weight.main_grad = torch.ones(96, 64, dtype=dtype, device="cuda")
        add_weight_gradient(weight, inputs, gradient, fused)
        sums.append([weight.main_grad])
    assert_close(sums[0], sums[1], 2e-2)
