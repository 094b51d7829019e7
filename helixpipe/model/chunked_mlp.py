"""megatron-core's MLP over slices of the sequence, so that inner activations are those of one slice.

The forward keeps nothing but its input. The backward makes the inner activations of a slice again, computes all of its
gradients, and drops them before the next slice. Tensor-parallel ranks communicate once for all slices, as for the whole
MLP: with sequence parallelism the input and the output's gradient are gathered and sums scattered, else sums are
reduced. What is gathered, and the sums before they are scattered, lie in two buffers that all layers share.

The weights' gradients are computed with the slice, in I where I and W are apart: nothing waits for W. Putting them off
would keep the output's gradient until W, gather twice more, and make the inner activations a second time.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from torch import Tensor

from helixpipe.model.linear import add_weight_gradient
from helixpipe.model.slices import Slices

_OUTPUT = "chunked mlp"
"""Name of the second buffer; the first is where inputs are gathered."""


def make_mlp(config: TransformerConfig, chunk_size: int, tp_group: dist.ProcessGroup) -> MLP:
    """The MLP of a layer, over slices of `chunk_size` tokens; 0: the whole sequence at once."""
    submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    if not chunk_size:
        return MLP(config, submodules, ffn_hidden_size=config.ffn_hidden_size, tp_group=tp_group)
    return ChunkedMLP(config, submodules, chunk_size, tp_group)


class ChunkedMLP(MLP):
    """MLP with the same weights, names and checkpoint entries, over slices of `chunk_size` tokens; the last slice, and
    one of a shorter sequence, is what there is. Tokens are those of the whole chunk, also with sequence parallelism."""

    def __init__(
        self, config: TransformerConfig, submodules: MLPSubmodules, chunk_size: int, tp_group: dist.ProcessGroup
    ):
        super().__init__(config, submodules, ffn_hidden_size=config.ffn_hidden_size, tp_group=tp_group)
        self.slices = Slices(chunk_size, self.linear_fc1.sequence_parallel, tp_group)
        self._first_half = FirstHalf(self, _OnThisRank(self.linear_fc1))

    def forward(
        self, hidden_states: Tensor, per_token_scale: None = None, **unused: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states [s, b, h], with sequence parallelism [s / tp, b, h], to (output of the same shape, its bias,
        which the caller adds)."""
        output: Tensor = _SlicedMLPFunction.apply(hidden_states, self)
        return output, self.linear_fc2.bias

    def inner(self, tokens: Tensor) -> Tensor:
        """First linear layer and activation function, as megatron-core computes them: [n, b, h] to [n, b, ffn / tp]."""
        return self._first_half(tokens)

    def output_into(self, target: Tensor, tokens: Tensor) -> None:
        """Compute this rank's share of a slice's output, without the bias."""
        inner = self.inner(tokens)
        torch.mm(inner.flatten(0, 1), self.linear_fc2.weight.t(), out=target.flatten(0, 1))

    def backward_slice(self, tokens: Tensor, output_gradient: Tensor) -> Tensor:
        """Add a slice's gradients to those of the weights; returns this rank's share of its input's."""
        tokens = tokens.detach().requires_grad_()
        with torch.enable_grad():
            inner = self.inner(tokens)
        weight = self.linear_fc2.weight
        add_weight_gradient(weight, inner.detach(), output_gradient, self.config.gradient_accumulation_fusion)
        torch.autograd.backward(inner, output_gradient.matmul(weight))
        assert tokens.grad is not None
        return tokens.grad


class FirstHalf:
    """Stands for an MLP in megatron-core's `MLP.forward`: its first linear layer as `first_layer` computes it and its
    activation function, no second layer."""

    def __init__(self, mlp: MLP, first_layer: torch.nn.Module):
        self.config, self.activation_func = mlp.config, mlp.activation_func
        self.linear_fc1, self.linear_fc2 = first_layer, _NoLayer()

    def __call__(self, tokens: Tensor) -> Tensor:
        output, _ = MLP.forward(cast(Any, self), tokens)
        return cast(Tensor, output)


class _OnThisRank(torch.nn.Module):
    """A linear layer without what its ranks communicate. It is a module, as megatron-core 0.19 asks, in name
    alone: hooks on modules are for those that a user sees, and do not run."""

    def __init__(self, layer: ColumnParallelLinear):
        super().__init__()
        self._layers = (layer,)  # in a tuple, so that its parameters are not those of a second module

    def __call__(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        (layer,) = self._layers
        return torch.matmul(tokens, layer.weight.t()), layer.bias


class _NoLayer(torch.nn.Module):
    """Stands for the second linear layer, likewise."""

    def __call__(self, inner: Tensor) -> tuple[Tensor, None]:
        return inner, None


class _SlicedMLPFunction(torch.autograd.Function):
    """All slices of an MLP. Gradients of its weights are added to theirs directly, slice by slice."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, mlp: ChunkedMLP) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.mlp, slices = mlp, mlp.slices
        whole = slices.gathered(hidden)
        if slices.sequence_parallel:
            output = slices.buffer(tuple(whole.shape), whole, _OUTPUT)
        else:
            output = torch.empty_like(whole)
        for rows in slices.rows(whole.size(0)):
            mlp.output_into(output[rows], whole[rows])
        return slices.summed(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        mlp, slices, (hidden,) = ctx.mlp, ctx.mlp.slices, ctx.saved_tensors
        whole = slices.gathered(hidden)
        output_gradient = slices.gathered(gradients[0], _OUTPUT)
        # A slice of the gathered input is not needed once its gradient is there, which takes its place.
        input_gradient = whole if slices.sequence_parallel else torch.empty_like(whole)
        for rows in slices.rows(whole.size(0)):
            input_gradient[rows] = mlp.backward_slice(whole[rows], output_gradient[rows])
        return slices.summed(input_gradient), None
