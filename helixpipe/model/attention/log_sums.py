"""Attention kernels that give the logarithm of every row's sum of exponentials beside the output, and take both back in
the backward: what attention over parts of the keys is merged with.

All tensors are [b, heads, n, d], keys and values [b, groups, m, d] in any strides; log-sums [b, heads, n].
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_cuda = torch.ops.aten._scaled_dot_product_flash_attention
_cuda_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
_cuda_window = torch.ops.aten._flash_attention_forward
_cuda_window_backward = torch.ops.aten._flash_attention_backward


class Gradients(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor


class LogSumKernel(Protocol):
    """causal: as many keys as queries, of which the i-th query sees the first i; else each query sees all keys.
    reach: the i-th query sees none of the first i - reach keys; None: it sees them. Each query sees one key at
    least."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float, reach: int | None = None
    ) -> tuple[Tensor, Tensor]: ...

    def backward(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        log_sum: Tensor,
        causal: bool,
        scale: float,
        reach: int | None = None,
    ) -> Gradients:
        """output, log_sum: over all keys; the result is the share of these keys."""
        ...


class FlashOnCPU:
    """torch's flash kernel for the CPU."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float, reach: int | None = None
    ) -> tuple[Tensor, Tensor]:
        mask = _mask(query, key, causal, reach)
        output, log_sum = _cpu(query, key, value, 0.0, causal and mask is None, attn_mask=mask, scale=scale)
        return output, log_sum

    def backward(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        log_sum: Tensor,
        causal: bool,
        scale: float,
        reach: int | None = None,
    ) -> Gradients:
        tensors, mask = (gradient, query, key, value, output, log_sum), _mask(query, key, causal, reach)
        return Gradients(*_cpu_backward(*tensors, 0.0, causal and mask is None, attn_mask=mask, scale=scale))


class FlashOnCUDA:
    """torch's own flash-attn 2: half precision, grouped queries as they are, no dropout."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float, reach: int | None = None
    ) -> tuple[Tensor, Tensor]:
        if reach is not None:
            rows, sizes, window = (
                _rows(query, key, value),
                (query.size(2), key.size(2)),
                _window(query, key, causal, reach),
            )
            output, log_sum, *_ = _cuda_window(*rows, None, None, *sizes, 0.0, causal, False, scale=scale, **window)
            return output.transpose(1, 2), log_sum
        output, log_sum, *_ = _cuda(query, key, value, 0.0, causal, False, scale=scale)
        return output, log_sum

    def backward(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        log_sum: Tensor,
        causal: bool,
        scale: float,
        reach: int | None = None,
    ) -> Gradients:
        tensors = gradient, query, key, value, output, log_sum
        # No starts of sequences, which are all as long; no state of the random numbers that dropout would draw.
        state = torch.zeros((), dtype=torch.int64, device=query.device)
        if reach is not None:
            rows, window = _rows(*tensors[:-1]), _window(query, key, causal, reach)
            sizes = query.size(2), key.size(2)
            found = _cuda_window_backward(
                *rows, log_sum, None, None, *sizes, 0.0, causal, state, state, scale=scale, **window
            )
            return Gradients(*(gradient.transpose(1, 2) for gradient in found))
        return Gradients(
            *_cuda_backward(*tensors, None, None, query.size(2), key.size(2), 0.0, causal, state, state, scale=scale)
        )


class Plain:
    """Products that are written out, in the type of the log-sums: for what no fused kernel takes."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float, reach: int | None = None
    ) -> tuple[Tensor, Tensor]:
        scores = _scores(query, key, causal, scale, reach)
        log_sum = torch.logsumexp(scores, dim=-1)
        output = torch.exp(scores - log_sum[..., None]) @ _wide(value)[:, :, None]
        return output.flatten(1, 2).to(query.dtype), log_sum.flatten(1, 2)

    def backward(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        log_sum: Tensor,
        causal: bool,
        scale: float,
        reach: int | None = None,
    ) -> Gradients:
        groups = key.size(1)
        gradient, output = (_wide(tensor).unflatten(1, (groups, -1)) for tensor in (gradient, output))
        weights = torch.exp(_scores(query, key, causal, scale, reach) - log_sum.unflatten(1, (groups, -1))[..., None])
        along = gradient @ _wide(value)[:, :, None].transpose(-1, -2)
        scores = weights * (along - (gradient * output).sum(-1, keepdim=True)) * scale
        grouped = _wide(query).unflatten(1, (groups, -1))
        gradients = (
            (scores @ _wide(key)[:, :, None]).flatten(1, 2),
            (scores.transpose(-1, -2) @ grouped).sum(2),
            (weights.transpose(-1, -2) @ gradient).sum(2),
        )
        return Gradients(*(tensor.to(query.dtype) for tensor in gradients))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _scores(query: Tensor, key: Tensor, causal: bool, scale: float, reach: int | None) -> Tensor:
    """[b, groups, heads / groups, n, m]."""
    scores = _wide(query).unflatten(1, (key.size(1), -1)) @ _wide(key)[:, :, None].transpose(-1, -2) * scale
    if causal or reach is not None:
        hidden = hidden_scores(query.size(2), key.size(2), 0 if causal else None, reach, scores.device)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores


def hidden_scores(rows: int, columns: int, ahead: int | None, reach: int | None, on: torch.device) -> Tensor:
    """[rows, columns] bool: where the i-th query does not see a key, which is one after the (i + ahead)-th, or before
    the (i - reach)-th; None: there are none such."""
    every = torch.ones((rows, columns), dtype=torch.bool, device=on)
    hidden = torch.zeros_like(every) if ahead is None else every.triu(ahead + 1)
    return hidden if reach is None else hidden | every.tril(-reach - 1)


def _mask(query: Tensor, key: Tensor, causal: bool, reach: int | None) -> Tensor | None:
    """Return what is added to scores; None where the kernel knows itself what is hidden."""
    if reach is None:
        return None
    hidden = hidden_scores(query.size(2), key.size(2), 0 if causal else None, reach, query.device)
    return torch.zeros(hidden.shape, dtype=query.dtype, device=query.device).masked_fill_(hidden, -torch.inf)


def _window(query: Tensor, key: Tensor, causal: bool, reach: int) -> dict[str, int]:
    """As flash-attn counts: from the diagonal that ends in the lower right corner."""
    return {
        "window_size_left": key.size(2) - query.size(2) + reach,
        "window_size_right": 0 if causal else -1,
    }


def _rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """[b, heads, n, d] to [b, n, heads, d]."""
    return tuple(tensor.transpose(1, 2) for tensor in tensors)


def has_cpu_kernel(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> bool:
    """Whether torch's fused kernel for the CPU can do this, [n, b, heads, d] and [m, b, groups, d]: not with dropout,
    nor grouped queries in older versions."""
    query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    gqa = query.size(1) != key.size(1)
    choice = torch._fused_sdp_choice(query, key, value, None, dropout, False, enable_gqa=gqa)
    return bool(choice == SDPBackend.FLASH_ATTENTION.value)


def choose_kernel(query: Tensor, key: Tensor) -> LogSumKernel:
    """The fastest that takes these tensors, [n, b, heads, d] and [m, b, groups, d]."""
    if query.device.type == "cpu":
        return FlashOnCPU() if has_cpu_kernel(query, key, key, 0.0) else Plain()
    half = query.dtype in (torch.float16, torch.bfloat16)
    channels = query.size(3)
    modern = torch.cuda.get_device_capability(query.device) >= (8, 0)
    fits = half and modern and channels % 8 == 0 and channels <= 256
    return FlashOnCUDA() if fits and torch.backends.cuda.is_flash_attention_available() else Plain()
