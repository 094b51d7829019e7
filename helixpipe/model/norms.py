"""LayerNorm and RMSNorm: torch's, or a library's with torch's parameters.

All have torch's parameter names, and keep the same for the backward: input, weight, and a float32 mean (LayerNorm) and
inverse deviation a token. What `helixpipe.costs.piece_bytes` counts holds for each.

With `layernorm_zero_centered_gamma` (--apply-layernorm-1p) a norm's weight is what it scales by less 1: it begins at 0,
near which low precision has more numbers than near 1.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig

from helixpipe.model.backends import APEX, ENGINE, TORCH, load, load_engine


class _CenteredLayerNorm(torch.nn.LayerNorm):
    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            torch.nn.init.zeros_(parameter)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(input, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class _CenteredRMSNorm(torch.nn.RMSNorm):
    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            torch.nn.init.zeros_(parameter)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(input, self.normalized_shape, self.weight + 1, self.eps)


def make_norm(config: TransformerConfig, kernel: str = TORCH, channels: int | None = None) -> torch.nn.Module:
    """A norm of the hidden states; with sequence parallelism its gradients are marked as partial sums over TP.

    channels: what is normed of each token, or of each head; None: the hidden size. With it the norm is one of heads,
    which tensor-parallel ranks share out, so that its gradients are partial sums in any case.
    kernel: `Kernels.norm`. apex's fused norms and Transformer Engine's run on GPUs only.
    """
    norm: torch.nn.Module
    size = channels or config.hidden_size
    rms, centered = config.normalization == "RMSNorm", config.layernorm_zero_centered_gamma
    kind: Any
    if kernel == APEX and not centered:
        fused = load(APEX, "apex.normalization")
        kind = fused.FusedRMSNorm if rms else fused.FusedLayerNorm
        norm = kind(size, eps=config.layernorm_epsilon).to(config.params_dtype)
    else:
        if centered:
            kind = _CenteredRMSNorm if rms else _CenteredLayerNorm
        else:
            kind = torch.nn.RMSNorm if rms else torch.nn.LayerNorm
        norm = kind(size, eps=config.layernorm_epsilon, dtype=config.params_dtype)
        if kernel == ENGINE:
            _run_on_transformer_engine(norm, config, size)
    partial = config.sequence_parallel or (channels is not None and config.tensor_model_parallel_size > 1)
    for parameter in norm.parameters():
        parameter.sequence_parallel = partial  # type: ignore[attr-defined]
    return norm


def _run_on_transformer_engine(norm: torch.nn.Module, config: TransformerConfig, size: int) -> None:
    """Let Transformer Engine's norm compute with the parameters of torch's.

    Its own module stays out of the model: it would bring `_extra_state` (of 8-bit training) into every checkpoint.
    """
    engine = load_engine().TENorm(config, size, eps=config.layernorm_epsilon)
    for name, parameter in norm.named_parameters():
        setattr(engine, name, parameter)
    norm.forward = engine.forward
