"""Linear layers whose weight gradient can be computed later than their input gradient: what ops I and W need.

megatron-core's own function computes both at once. This one is the same mathematics (forward, tensor-parallel
communication and rounding alike), but while a unit's I runs it leaves the weight's part, with the tensors it needs, in
a `WeightGradients` store, from which the unit's W takes it. Biases and norms stay with I: they cost next to nothing.

Collectives run beside a matrix product that does not need them, as in megatron-core: with sequence parallelism the
input's all-gather beside the input gradient's, and the sum of input gradients over ranks beside the weight gradient's.
In I there is no weight gradient to hide that sum. The gathered input is kept until W, which waits for no other rank:
gathering in W would keep the part alone, but the first gather of each W would have nothing to run beside. What waits is
counted as such (`PieceKind.deferred`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor


class _Deferred(NamedTuple):
    """One weight's gradient to come: output_gradient^T @ inputs, over all leading dimensions. fused: as in
    `add_weight_gradient`."""

    weight: torch.nn.Parameter
    inputs: Tensor
    output_gradient: Tensor
    fused: bool


class _Known(NamedTuple):
    """A gradient, of a bias or norm, that is only to be added."""

    weight: torch.nn.Parameter
    gradient: Tensor


class WeightGradients:
    """Weight gradients put off, by unit. `keep` collects them during a unit's I; `compute` is its W."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, list[_Deferred | _Known]] = {}
        self._current: list[_Deferred | _Known] | None = None

    @contextmanager
    def keep(self, unit: Hashable) -> Iterator[None]:
        """While active, backward passes leave weight gradients here instead of computing them."""
        self._current = self._waiting.setdefault(unit, [])
        try:
            yield
        finally:
            self._current = None

    @torch.no_grad()
    def compute(self, unit: Hashable) -> None:
        """Add the unit's weight gradients to the parameters', and let go of what they needed."""
        deferred = self._waiting.pop(unit)
        deferred.reverse()
        while deferred:  # in the order the backward met them, each released before the next
            each = deferred.pop()
            if isinstance(each, _Known):
                add_gradient(*each)
            else:
                add_weight_gradient(*each)

    def __len__(self) -> int:
        """Units whose W is still to come."""
        return len(self._waiting)

    def tensors(self) -> Iterator[Tensor]:
        """Yield what is kept for them: inputs and output gradients of linear layers."""
        for waiting in self._waiting.values():
            for deferred in waiting:
                yield from (each for each in deferred[1:] if isinstance(each, Tensor))

    def linear(
        self,
        input: Tensor,
        weight: torch.nn.Parameter,
        bias: Tensor | None,
        *,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: dist.ProcessGroup | None,
        **unused: Any,
    ) -> Tensor:
        """Stands where a linear layer of megatron-core calls its own function; same arguments, same result."""
        fused = gradient_accumulation_fusion
        output: Tensor = _Linear.apply(input, weight, bias, allreduce_dgrad, sequence_parallel, tp_group, self, fused)
        return output

    def put_off(self, weight: torch.nn.Parameter, inputs: Tensor, output_gradient: Tensor, fused: bool) -> bool:
        """Keep one weight's gradient for later, if a unit's I is running; else say so."""
        if self._current is None:
            return False
        self._current.append(_Deferred(weight, inputs, output_gradient, fused))
        return True

    def put_off_sum(self, weight: torch.nn.Parameter, gradient: Tensor) -> None:
        """Let the unit's W add a gradient that its I has found."""
        assert self._current is not None
        self._current.append(_Known(weight, gradient))


class ReplicatedLinear(MegatronModule):
    """A linear layer, without bias, whose weights every tensor-parallel rank has; each computes its own rows."""

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int):
        super().__init__(config)
        on = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype, device=on))
        if config.perform_initialization:
            drawn = torch.empty(outputs, inputs, device=on)  # in float32, as megatron-core draws others
            assert config.init_method is not None  # TransformerConfig fills it in
            config.init_method(drawn)
            self.weight.data.copy_(drawn)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._forward_impl: Any = linear_with_grad_accumulation_and_async_allreduce

    def get_extra_state(self) -> None:
        """Return nothing, under the name that megatron-core's linear layers have for it."""

    def set_extra_state(self, state: Any) -> None:
        """Ignore it, as they do."""

    def forward(self, rows: Tensor) -> Tensor:
        output: Tensor = self._forward_impl(
            input=rows,
            weight=self.weight,
            bias=None,
            gradient_accumulation_fusion=self.config.gradient_accumulation_fusion,
            allreduce_dgrad=False,
            sequence_parallel=False,
            tp_group=None,
        )
        return output


def output_projection(config: TransformerConfig, channels: int, tp_group: dist.ProcessGroup) -> RowParallelLinear:
    """From so many channels of all heads' attention to the hidden size."""
    return RowParallelLinear(
        channels,
        config.hidden_size,
        config=config,
        init_method=config.output_layer_init_method,
        bias=config.add_bias_linear,
        input_is_parallel=True,
        skip_bias_add=True,
        tp_group=tp_group,
    )


def defer_weight_gradients(model: torch.nn.Module) -> WeightGradients:
    """Let every linear layer of `model` put off its weight gradient while the returned store keeps them."""
    store = WeightGradients()
    for module in model.modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear)):
            module._forward_impl = partial(_call, store)
    return store


def product(module: ColumnParallelLinear | RowParallelLinear, rows: Tensor, allreduce: bool, gathers: bool) -> Tensor:
    """What a parallel layer's own forward multiplies: rows [n, b, in] times its weight [out, in] transposed. gathers:
    rows are this rank's part of them. allreduce: the rows' gradient is to be summed over ranks."""
    own, fused = module.__dict__, module.gradient_accumulation_fusion
    weight, call = own["_parameters"]["weight"], own.get("_forward_impl")
    output: Tensor
    if isinstance(call, partial) and call.func is _call:
        output = _Linear.apply(rows, weight, None, allreduce, gathers, module.tp_group, call.args[0], fused)
    elif call is None and not (fused or allreduce or gathers or hasattr(weight, "whole_shape")):
        output = F.linear(rows, weight)  # keeps the weight's memory until the backward: none that moves meanwhile
    else:
        output = module._forward_impl(
            input=rows,
            weight=weight,
            bias=None,
            gradient_accumulation_fusion=fused,
            allreduce_dgrad=allreduce,
            sequence_parallel=gathers,
            tp_group=module.tp_group,
        )
    return output


def leave_out_mappings(model: torch.nn.Module) -> None:
    """Leave out the autograd functions in which tensor-parallel ranks would communicate: of one rank they do nothing,
    but take time of the host."""
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear) and module.tp_group.size() == 1:
            module.disable_grad_reduce = True
        elif isinstance(module, RowParallelLinear) and module.tp_group.size() == 1 and module.skip_bias_add:
            module.explicit_expert_comm = True


def _call(store: WeightGradients, **arguments: Any) -> Tensor:
    return store.linear(**arguments)


def add_weight_gradient(
    weight: torch.nn.Parameter, inputs: Tensor, output_gradient: Tensor, fused: bool = False
) -> None:
    """Add output_gradient^T @ inputs, over all leading dimensions, to the weight's gradient.

    fused: in the matrix product itself, by apex's kernel, where there is a buffer (`gradient_accumulation_fusion`).
    """
    buffer = _buffer(weight)
    if not fused or buffer is None:
        add_gradient(weight, _weight_gradient(inputs, output_gradient))
        return
    import fused_weight_gradient_mlp_cuda as kernels

    in_float32 = buffer.dtype == torch.float32
    add = kernels.wgrad_gemm_accum_fp32 if in_float32 else kernels.wgrad_gemm_accum_fp16
    add(inputs.flatten(0, -2).contiguous(), output_gradient.flatten(0, -2).contiguous(), buffer)


def add_gradient(weight: torch.nn.Parameter, gradient: Tensor) -> None:
    """Add to the weight's gradient, of the same shape."""
    buffer = _buffer(weight)
    if buffer is not None:
        buffer.add_(gradient)
    elif hasattr(weight, "main_grad"):  # borrowed, in an I: the sum is its W's, see `BorrowedWeights.leave_to_w`
        weight.main_grad = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    elif weight.grad is None:
        weight.grad = gradient.to(weight.dtype)
    else:
        weight.grad.add_(gradient)


def _buffer(weight: torch.nn.Parameter) -> Tensor | None:
    """DDP's, which its hook adds to when autograd delivers a gradient."""
    buffer: Tensor | None = getattr(weight, "main_grad", None)
    return buffer


def _weight_gradient(inputs: Tensor, output_gradient: Tensor) -> Tensor:
    return output_gradient.flatten(0, -2).t().matmul(inputs.flatten(0, -2))


def weight_part(ctx: Any, inputs: Tensor, output_gradient: Tensor) -> Tensor | None:
    """A linear function's gradient of its weight, its second input, for autograd; None where it is not asked for, is
    put off, or has been added by a fused kernel. ctx: with `weight`, `store` and `fused`."""
    weight = ctx.weight
    if not ctx.needs_input_grad[1] or ctx.store.put_off(weight, inputs, output_gradient, ctx.fused):
        return None
    if ctx.fused and _buffer(weight) is not None:
        add_weight_gradient(weight, inputs, output_gradient, ctx.fused)
        return None
    return _weight_gradient(inputs, output_gradient)


class _Linear(torch.autograd.Function):
    """input [s, b, in] (with sequence parallelism [s / tp, b, in]) times weight [out, in] transposed, plus bias."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: torch.nn.Parameter,
        bias: Tensor | None,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: dist.ProcessGroup | None,
        store: WeightGradients,
        fused: bool,
    ) -> Tensor:
        ctx.save_for_backward(input)
        ctx.weight = weight  # the parameter itself, for its gradient buffer
        ctx.with_bias = bias is not None
        ctx.allreduce_dgrad, ctx.sequence_parallel, ctx.tp_group = allreduce_dgrad, sequence_parallel, tp_group
        ctx.store, ctx.fused = store, fused
        output = torch.matmul(gather(input, tp_group)[0] if sequence_parallel else input, weight.t())
        return output + bias if bias is not None else output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (output_gradient,) = gradients
        (input,) = ctx.saved_tensors
        weight, group = ctx.weight, ctx.tp_group
        inputs, gathering, summing = input, None, None
        if ctx.sequence_parallel and ctx.needs_input_grad[1]:
            inputs, gathering = gather(input, group, async_op=True)
        input_gradient = output_gradient.matmul(weight)
        if gathering is not None:
            gathering.wait()
        if ctx.allreduce_dgrad:
            summing = dist.all_reduce(input_gradient, group=group, async_op=True)
        elif ctx.sequence_parallel:
            shares, input_gradient = input_gradient, input.new_empty(input.shape)
            summing = dist.reduce_scatter_tensor(input_gradient, shares, group=group, async_op=True)
        weight_gradient = weight_part(ctx, inputs, output_gradient)
        bias_gradient = output_gradient.flatten(0, -2).sum(dim=0) if ctx.with_bias else None
        if summing is not None:
            summing.wait()
        return input_gradient, weight_gradient, bias_gradient, None, None, None, None, None


def gather(part: Tensor, group: dist.ProcessGroup | None, async_op: bool = False) -> tuple[Tensor, dist.Work | None]:
    """The whole sequence from the tensor-parallel ranks' parts; with `async_op` once what is returned with it has been
    waited for."""
    assert group is not None
    whole = part.new_empty((part.size(0) * group.size(), *part.shape[1:]))
    return whole, dist.all_gather_into_tensor(whole, part.contiguous(), group=group, async_op=async_op)
