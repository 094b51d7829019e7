"""LayerNorm and RMSNorm: torch's, or a library's with torch's parameters.

All have torch's parameter names, and keep the same for the backward: input, weight, and a float32 mean (LayerNorm) and
inverse deviation a token. What `helixpipe.costs.piece_bytes` counts holds for each.
"""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig

from helixpipe.model.backends import APEX, ENGINE, TORCH, load, load_engine


def make_norm(config: TransformerConfig, kernel: str = TORCH) -> torch.nn.Module:
    """A norm of the hidden states; with sequence parallelism its gradients are marked as partial sums over TP.

    kernel: `Kernels.norm`. apex's fused norms and Transformer Engine's run on GPUs only.
    """
    norm: torch.nn.Module
    if kernel == APEX:
        fused = load(APEX, "apex.normalization")
        kind = fused.FusedRMSNorm if config.normalization == "RMSNorm" else fused.FusedLayerNorm
        norm = kind(config.hidden_size, eps=config.layernorm_epsilon).to(config.params_dtype)
    else:
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = kind(config.hidden_size, eps=config.layernorm_epsilon, dtype=config.params_dtype)
        if kernel == ENGINE:
            _run_on_transformer_engine(norm, config)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


def _run_on_transformer_engine(norm: torch.nn.Module, config: TransformerConfig) -> None:
    """Let Transformer Engine's norm compute with the parameters of torch's.

    Its own module stays out of the model: it would bring `_extra_state` (of 8-bit training) into every checkpoint.
    """
    engine = load_engine().TENorm(config, config.hidden_size, eps=config.layernorm_epsilon)
    for name, parameter in norm.named_parameters():
        setattr(engine, name, parameter)
    norm.forward = engine.forward
