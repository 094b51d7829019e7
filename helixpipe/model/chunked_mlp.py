"""megatron-core's MLP over slices of the sequence, so that inner activations are those of one slice.

The forward keeps nothing but its input. The backward makes the inner activations of a slice again, computes all of its
gradients, and drops them before the next slice. Tensor-parallel ranks communicate once for all slices, as for the whole
MLP: with sequence parallelism the input and the output's gradient are gathered and sums scattered, else sums are
reduced. What is gathered, and the sums before they are scattered, lie in two buffers that all layers share.

The weights' gradients are computed with the slice, in I where I and W are apart: nothing waits for W. Putting them off
would keep the output's gradient until W, gather twice more, and make the inner activations a second time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from torch import Tensor

from helixpipe.model.linear import add_weight_gradient

_INPUT, _OUTPUT = "mpu", "chunked mlp"
"""Names of the two buffers: megatron-core's linear layers gather into the first as well."""


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
        self._chunk_size = chunk_size
        self.sequence_parallel: bool = self.linear_fc1.sequence_parallel

    def forward(
        self, hidden_states: Tensor, per_token_scale: None = None, **unused: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states [s, b, h], with sequence parallelism [s / tp, b, h], to (output of the same shape, its bias,
        which the caller adds)."""
        output: Tensor = _Slices.apply(hidden_states, self)
        return output, self.linear_fc2.bias

    def slices(self, tokens: int) -> Iterator[slice]:
        """Rows of each slice of a sequence."""
        for start in range(0, tokens, self._chunk_size):
            yield slice(start, start + self._chunk_size)

    def inner(self, tokens: Tensor) -> Tensor:
        """First linear layer and activation function, as megatron-core computes them: [n, b, h] to [n, b, ffn / tp]."""
        output, _ = MLP.forward(cast(Any, _FirstHalf(self)), tokens)
        return cast(Tensor, output)

    def output_into(self, target: Tensor, tokens: Tensor) -> None:
        """This rank's share of a slice's output, without the bias."""
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

    def gathered(self, part: Tensor, name: str) -> Tensor:
        """The whole sequence, in a buffer of that name if this rank holds a part of it."""
        if not self.sequence_parallel:
            return part
        whole = self.buffer((part.size(0) * self.tp_group.size(), *part.shape[1:]), part.dtype, name)
        dist.all_gather_into_tensor(whole, part.contiguous(), group=self.tp_group)
        return whole

    def summed(self, shares: Tensor) -> Tensor:
        """Sums over the tensor-parallel ranks: with sequence parallelism this rank's part, else in place."""
        if self.sequence_parallel:
            part = shares.new_empty((shares.size(0) // self.tp_group.size(), *shares.shape[1:]))
            dist.reduce_scatter_tensor(part, shares, group=self.tp_group)
            return part
        if self.tp_group.size() > 1:
            dist.all_reduce(shares, group=self.tp_group)
        return shares

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> Tensor:
        """Memory that every layer uses in turn: megatron-core's."""
        return cast(Tensor, get_global_memory_buffer().get_tensor(shape, dtype, name))


class _FirstHalf:
    """Stands for an MLP in megatron-core's `MLP.forward`: its first linear layer on this rank alone, no second one."""

    def __init__(self, mlp: ChunkedMLP):
        self.config, self.activation_func = mlp.config, mlp.activation_func
        self._layer = mlp.linear_fc1

    def linear_fc1(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        return torch.matmul(tokens, self._layer.weight.t()), self._layer.bias

    def linear_fc2(self, inner: Tensor) -> tuple[Tensor, None]:
        return inner, None


class _Slices(torch.autograd.Function):
    """All slices of an MLP. Gradients of its weights are added to theirs directly, slice by slice."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, mlp: ChunkedMLP) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.mlp = mlp
        whole = mlp.gathered(hidden, _INPUT)
        if mlp.sequence_parallel:
            output = mlp.buffer(tuple(whole.shape), whole.dtype, _OUTPUT)
        else:
            output = torch.empty_like(whole)
        for rows in mlp.slices(whole.size(0)):
            mlp.output_into(output[rows], whole[rows])
        return mlp.summed(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        mlp, (hidden,) = ctx.mlp, ctx.saved_tensors
        whole = mlp.gathered(hidden, _INPUT)
        output_gradient = mlp.gathered(gradients[0], _OUTPUT)
        # A slice of the gathered input is not needed once its gradient is there, which takes its place.
        input_gradient = whole if mlp.sequence_parallel else torch.empty_like(whole)
        for rows in mlp.slices(whole.size(0)):
            input_gradient[rows] = mlp.backward_slice(whole[rows], output_gradient[rows])
        return mlp.summed(input_gradient), None
