"""What modules of a layer compute, without calling them: the same expressions on the same parameters.

It is for the host alone, for which a call of megatron-core's module, with its hooks, ranges for profilers and questions
to the configuration, takes longer than the kernels of a short chunk. A linear layer of one tensor-parallel rank whose
weight's gradient is not put off is torch's own product, whose backward needs no Python. Kernels, their order, and what
is saved are those of the modules, so results are equal to the last bit.

A module is left out only while it is as it was made: of exactly megatron-core's or torch's class, without hooks, and
with no `forward` of its own. Any other (a library's norm, an adapter, a subclass) is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_gelu import bias_gelu_impl
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP
from torch import Tensor

from helixpipe.model.linear import product

OutputAndBias = tuple[Tensor, Tensor | None]

_KINDS = (torch.nn.RMSNorm, torch.nn.LayerNorm, ColumnParallelLinear, RowParallelLinear, MLP)
_FORWARDS: Mapping[type, Any] = MappingProxyType({kind: kind.forward for kind in _KINDS})
"""What is computed here, unless somebody has replaced it since."""


def call(module: Any, *arguments: Any) -> Any:
    """What calling a module gives."""
    return module(*arguments) if _watched(module) else module.forward(*arguments)


def _as_made(module: torch.nn.Module) -> bool:
    """Whether calling a module is calling its class's `forward`, which is the one that is known here."""
    return type(module).forward is _FORWARDS[type(module)] and "forward" not in module.__dict__ and not _watched(module)


def _watched(module: torch.nn.Module) -> bool:
    """Whether calling a module is more than calling its `forward`."""
    own: dict[str, Any] = module.__dict__
    return bool(
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or module._compiled_call_impl is not None
        or torch.nn.modules.module._has_any_global_hook()
    )


def norm(module: Any, hidden: Tensor) -> Tensor:
    """LayerNorm or RMSNorm of the last dimension."""
    kind, own = type(module), module.__dict__
    if kind is torch.nn.RMSNorm and _as_made(module):
        normed = torch.rms_norm(hidden, own["normalized_shape"], own["_parameters"]["weight"], own["eps"])
    elif kind is torch.nn.LayerNorm and _as_made(module):
        weights = own["_parameters"]
        normed = torch.layer_norm(hidden, own["normalized_shape"], weights["weight"], weights["bias"], own["eps"])
    else:
        normed = module(hidden)
    return normed


def column(module: Any, rows: Tensor) -> OutputAndBias:
    """A column-parallel layer: (output [n, b, out / tp], the bias if the caller adds it)."""
    if type(module) is not ColumnParallelLinear or not _as_made(module):
        result: OutputAndBias = module(rows)
        return result
    bias = module._parameters["bias"]
    output = product(module, rows, module.allreduce_dgrad, module.sequence_parallel)
    if bias is None or module.skip_bias_add:
        return output, bias
    return output + bias, None


def row(module: Any, inputs: Tensor) -> OutputAndBias:
    """A row-parallel layer, likewise; of several tensor-parallel ranks the module sums over them."""
    alone = type(module) is RowParallelLinear and module.explicit_expert_comm and _as_made(module)
    if not alone or not module.skip_bias_add:
        result: OutputAndBias = module(inputs)
        return result
    return product(module, inputs, False, False), module._parameters["bias"]


def mlp(module: Any, normed: Tensor) -> OutputAndBias:
    """An MLP: (output [n, b, h], the bias, which the caller adds)."""
    if type(module) is not MLP or not _computes(module) or not _as_made(module):
        result: OutputAndBias = module(normed)
        return result
    layers = module._modules
    return row(layers["linear_fc2"], _activated(module.config, *column(layers["linear_fc1"], normed)))


def _computes(module: MLP) -> bool:
    """Whether the activation function is one of `_activated`."""
    config = module.config
    if module.activation_func is not config.activation_func:
        return False
    if config.use_te_activation_func or config.cpu_offloading or config.activation_func_fp8_input_store:
        return False
    if config.bias_activation_fusion:
        return config.activation_func is (F.silu if config.gated_linear_unit else F.gelu)
    return config.activation_func_clamp_value is None


def _activated(config: TransformerConfig, inner: Tensor, bias: Tensor | None) -> Tensor:
    """The first layer's output, [n, b, ffn or 2 ffn], and its bias to [n, b, ffn]."""
    activated: Tensor
    if config.bias_activation_fusion:
        activated = bias_swiglu_impl(inner, bias) if config.gated_linear_unit else bias_gelu_impl(inner, bias)
        return activated
    inner = inner if bias is None else inner + bias
    if config.gated_linear_unit:
        gate, linear = inner.chunk(2, dim=-1)
        activated = config.activation_func(gate) * (linear + config.glu_linear_offset)
    else:
        activated = config.activation_func(inner)
    return activated
