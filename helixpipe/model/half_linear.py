"""Linear layers of half of the tokens: their collectives run while the other half computes.

A collective is started where its input is there and waited for where its output is needed; between the two is other
work. In the backward the same two places stand in reverse order, and the collective is the one that mirrors it: the sum
of input gradients where an input was gathered, a gather of output gradients where outputs were summed.

    rows ── begin_column ──► column ──► …        …  row ──► end_row ── rows
              gather starts    waits                sum starts   waits
    backward  waits            sum starts           waits        gather starts

With sequence parallelism the rows outside are this rank's part of the half's; without, they are all of the half's, what
would be gathered is there already, and sums are all-reduces.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from helixpipe.model.collectives import Begun, ForwardBeside, Started, UnderWay
from helixpipe.model.linear import WeightGradients, gather, weight_part


class Collective(UnderWay):
    """One of a linear layer's: a gather before a column-parallel one, a sum after a row-parallel one."""

    def __init__(self, group: dist.ProcessGroup, sequence_parallel: bool, beside: ForwardBeside | None = None):
        super().__init__(beside)
        self.group, self.sequence_parallel = group, sequence_parallel

    def gather(self, part: Tensor) -> None:
        """Start to gather all ranks' parts; with one rank, or without sequence parallelism, they are there."""
        self.start(Started(*gather(part, self.group, True), part) if self.sequence_parallel else Started(part))

    def sum(self, shares: Tensor) -> Tensor:
        """Start to sum over the ranks, and return where this rank's part of the sum, or all of it, will be."""
        if self.group.size() == 1:
            return self.start(Started(shares))
        shares = shares.contiguous()
        if self.sequence_parallel:
            part = shares.new_empty((shares.size(0) // self.group.size(), *shares.shape[1:]))
            work = dist.reduce_scatter_tensor(part, shares, group=self.group, async_op=True)
        else:
            part = shares
            work = dist.all_reduce(part, group=self.group, async_op=True)
        return self.start(Started(part, work, shares))


def begin_column(layer: ColumnParallelLinear, rows: Tensor, beside: ForwardBeside | None = None) -> Begun:
    """Start the collective of rows [r, b, h] that a column-parallel layer is to multiply."""
    collective = Collective(layer.tp_group, layer.sequence_parallel, beside)
    return Begun(_BeginColumn.apply(rows, collective), collective)


def column(layer: ColumnParallelLinear, begun: Begun, store: WeightGradients) -> tuple[Tensor, Tensor | None]:
    """Return what the layer's own forward returns: (output [n, b, out / tp], the bias if the caller adds it)."""
    bias = None if layer.skip_bias_add else layer.bias
    fused = layer.gradient_accumulation_fusion
    output: Tensor = _Column.apply(begun.rows, layer.weight, bias, begun.collective, store, fused)
    return output, layer.bias if layer.skip_bias_add else None


def begin_row(
    layer: RowParallelLinear, inputs: Tensor, store: WeightGradients, beside: ForwardBeside | None = None
) -> Begun:
    """Multiply [n, b, in / tp] by a row-parallel layer's weight, and start to sum the products over the ranks."""
    collective = Collective(layer.tp_group, layer.sequence_parallel, beside)
    return Begun(_Row.apply(inputs, layer.weight, collective, store, layer.gradient_accumulation_fusion), collective)


def end_row(layer: RowParallelLinear, begun: Begun) -> tuple[Tensor, Tensor | None]:
    """Return what the layer's own forward returns: (output [r, b, h], the bias, which the caller adds)."""
    return _EndRow.apply(begun.rows, begun.collective), layer.bias


class _BeginColumn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, collective: Collective) -> Tensor:
        ctx.collective = collective
        collective.gather(rows)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.collective.wait_in_backward(), None


class _Column(torch.autograd.Function):
    """Keeps this rank's rows and gathers them again for the weight's gradient, as megatron-core does."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: torch.nn.Parameter,
        bias: Tensor | None,
        collective: Collective,
        store: WeightGradients,
        fused: bool,
    ) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.weight, ctx.with_bias, ctx.collective = weight, bias is not None, collective
        ctx.store, ctx.fused = store, fused
        output = torch.matmul(collective.wait(), weight.t())
        return output + bias if bias is not None else output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (output_gradient,), (rows,), collective = gradients, ctx.saved_tensors, ctx.collective
        again = Collective(collective.group, collective.sequence_parallel)
        again.gather(rows)
        input_gradient = collective.sum(output_gradient.matmul(ctx.weight))
        weight_gradient = weight_part(ctx, again.wait(), output_gradient)
        bias_gradient = output_gradient.flatten(0, -2).sum(dim=0) if ctx.with_bias else None
        return input_gradient, weight_gradient, bias_gradient, None, None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: torch.nn.Parameter,
        collective: Collective,
        store: WeightGradients,
        fused: bool,
    ) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.weight, ctx.collective, ctx.store, ctx.fused = weight, collective, store, fused
        return collective.sum(torch.matmul(inputs, weight.t()))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (inputs,), output_gradient = ctx.saved_tensors, ctx.collective.wait_in_backward()
        input_gradient = output_gradient.matmul(ctx.weight)
        return input_gradient, weight_part(ctx, inputs, output_gradient), None, None, None


class _EndRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, collective: Collective) -> Tensor:
        ctx.collective = collective
        return collective.wait().view_as(part)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.collective.gather(gradients[0])
        return gradients[0], None
