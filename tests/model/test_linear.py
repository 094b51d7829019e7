"""What a linear layer's backward computes beside its collectives, with stand-ins that deliver when they are waited for.

That gradients equal those of one process is tested with real collectives, in test_chunks.py and under every schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from helixpipe.model.linear import WeightGradients
from tests.fakes import WeightGradientKernels, installed

ROWS, BATCH, IN, OUT = 6, 2, 3, 5
"""Of the whole sequence; two tensor-parallel ranks have half the rows each with sequence parallelism."""
GROUP: Any = SimpleNamespace(size=lambda: 2)

GATHER, SUM = ["gather", "input product", "gathered"], ["scatter", "scattered"]
ORDERS = {  # (sequence parallel, deferred): (backward, W)
    (True, False): ([*GATHER, "scatter", "weight product", "scattered"], []),
    (True, True): ([*GATHER, *SUM], ["weight product"]),
    (False, False): (["input product", "reduce", "weight product", "reduced"], []),
    (False, True): (["input product", "reduce", "reduced"], ["weight product"]),
}


class Products(TorchDispatchMode):
    """Adds to `events` which product a matrix product is, by its shape."""

    def __init__(self, events: list[str]):
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            names = {(ROWS * BATCH, IN): "input product", (OUT, IN): "weight product"}
            self.events.append(names[tuple(result.shape)])
        return result


class Collectives:
    """Rank 0's of two. An asynchronous one reads and writes when it is waited for, and until then its result is NaN.

    rows: the other rank's part of the input; gradient: the other rank's share of the input's gradient.
    """

    def __init__(self, events: list[str], rows: Tensor, gradient: Tensor):
        self.events, self.rows, self.gradient = events, rows, gradient

    def _start(self, name: str, done: str, result: Tensor, deliver: Callable[[], Any], async_op: bool) -> Any:
        if not async_op:
            deliver()
            return None
        self.events.append(name)
        if name != "reduce":
            result.fill_(float("nan"))

        def wait() -> None:
            deliver()
            self.events.append(done)

        return SimpleNamespace(wait=wait)

    def all_gather_into_tensor(self, whole: Tensor, part: Tensor, group: Any, async_op: bool = False) -> Any:
        return self._start("gather", "gathered", whole, lambda: whole.copy_(torch.cat([part, self.rows])), async_op)

    def reduce_scatter_tensor(self, part: Tensor, shares: Tensor, group: Any, async_op: bool = False) -> Any:
        def deliver() -> None:
            part.copy_((shares + self.gradient)[: part.size(0)])

        return self._start("scatter", "scattered", part, deliver, async_op)

    def all_reduce(self, shares: Tensor, group: Any, async_op: bool = False) -> Any:
        return self._start("reduce", "reduced", shares, lambda: shares.add_(self.gradient), async_op)


@pytest.mark.parametrize(("sequence_parallel", "deferred"), ORDERS)
@pytest.mark.parametrize("frozen", [False, True])
def test_collectives_run_beside_products(
    sequence_parallel: bool, deferred: bool, frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started before the product and waited for after it; what each gives is used after that, and no sooner."""
    torch.manual_seed(0)
    whole, weight, bias = (torch.randn(shape, dtype=torch.float64) for shape in ((ROWS, BATCH, IN), (OUT, IN), (OUT,)))
    output_gradient, others = (torch.randn(ROWS, BATCH, size, dtype=torch.float64) for size in (OUT, IN))
    half = ROWS // 2
    events: list[str] = []
    stand_ins = Collectives(events, whole[half:], others)
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"):
        monkeypatch.setattr(dist, name, getattr(stand_ins, name))
    leaf = (whole[:half] if sequence_parallel else whole).clone().requires_grad_()
    parameter, offset = torch.nn.Parameter(weight, requires_grad=not frozen), torch.nn.Parameter(bias)
    store = WeightGradients()
    output = store.linear(
        leaf,
        parameter,
        offset,
        gradient_accumulation_fusion=False,
        allreduce_dgrad=not sequence_parallel,
        sequence_parallel=sequence_parallel,
        tp_group=GROUP,
    )
    torch.testing.assert_close(output, whole @ weight.t() + bias)
    with Products(events):
        if deferred:
            with store.keep("unit"):
                output.backward(output_gradient)
        else:
            output.backward(output_gradient)
    backward, later = ORDERS[sequence_parallel, deferred]
    if frozen:  # nothing needs the other rank's input
        backward = [event for event in backward if event not in ("gather", "gathered", "weight product")]
    assert events == backward
    events.clear()
    with Products(events):
        if deferred:
            store.compute("unit")
    assert events == ([] if frozen else later)

    expected = output_gradient @ weight + others
    torch.testing.assert_close(leaf.grad, expected[:half] if sequence_parallel else expected)
    torch.testing.assert_close(offset.grad, output_gradient.sum((0, 1)))
    if frozen:
        assert parameter.grad is None
    else:
        torch.testing.assert_close(parameter.grad, torch.einsum("sbo,sbi->oi", output_gradient, whole))


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("buffer", [False, True])
def test_apex_adds_weight_gradients_in_b_and_in_w(deferred: bool, buffer: bool) -> None:
    """Once, to the sum; where there is none, as of a copy that travels, autograd delivers the gradient."""
    torch.manual_seed(0)
    leaf = torch.randn(ROWS, BATCH, IN, requires_grad=True)
    weight: Any = torch.nn.Parameter(torch.randn(OUT, IN))
    output_gradient = torch.randn(ROWS, BATCH, OUT)
    before, expected = torch.ones(OUT, IN), torch.einsum("sbo,sbi->oi", output_gradient, leaf.detach())
    if buffer:
        weight.main_grad = before.clone()
    store, kernels = WeightGradients(), WeightGradientKernels()
    output = store.linear(
        leaf,
        weight,
        None,
        gradient_accumulation_fusion=True,
        allreduce_dgrad=False,
        sequence_parallel=False,
        tp_group=None,
    )
    with installed(fused_weight_gradient_mlp_cuda=kernels):
        with store.keep("unit") if deferred else nullcontext():
            output.backward(output_gradient)
        if deferred:
            store.compute("unit")
    assert kernels.calls == buffer
    torch.testing.assert_close(leaf.grad, output_gradient @ weight.detach())
    if buffer:
        torch.testing.assert_close(weight.main_grad, before + expected)
        assert weight.grad is None
    else:
        torch.testing.assert_close(weight.grad, expected)
