"""Runs on the ranks of test_halves.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from helixpipe.costs.models import HALVES, OFF
from helixpipe.model import PipelineModel
from helixpipe.program.stages import Piece
from tests.model.common import CHAIN, CONTEXT, gradients_of, make_batch, make_config, make_options, set_parallel, worst

INNER = CHAIN[1:-1]


def model_in_halves(style: str, sequence_parallel: bool, overlap: str = HALVES, **changes: Any) -> PipelineModel:
    config = make_config(style, 2, sequence_parallel=sequence_parallel, **changes)
    return PipelineModel(config, replace(make_options(style, False), overlap_tp_comm=overlap), CHAIN, seed=7)


def model_over_context(how: str, overlap: str = HALVES, **changes: Any) -> PipelineModel:
    options = replace(make_options("llama", False), overlap_tp_comm=overlap, cp_comm_type=how)
    return PipelineModel(make_config("llama", **changes), options, CHAIN, seed=7)


_PRODUCTS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)


class Products(TorchDispatchMode):
    """Adds each matrix product, and attention, to `events`."""

    def __init__(self, events: list[str]):
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS:
            self.events.append("product")
        return func(*args, **(kwargs or {}))


class _Late:
    """A collective under way whose result is there when it has been waited for, and NaN until then."""

    def __init__(self, number: int, events: list[str], work: Any, result: Tensor, found: Tensor):
        self._number, self._events, self._work, self._result, self._found = number, events, work, result, found
        events.append(f"start {number}")
        result.fill_(torch.nan)

    def wait(self) -> None:
        self._work.wait()
        self._result.copy_(self._found)
        self._events.append(f"end {self._number}")


class _LateMessages:
    """A pass of a ring likewise."""

    def __init__(self, number: int, events: list[str], works: list[Any], results: list[tuple[Tensor, Tensor]]):
        self._number, self._events, self._works, self._results = number, events, works, results
        events.append(f"start {number}")
        for result, _ in results:
            result.fill_(torch.nan)

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        for result, found in self._results:
            result.copy_(found)
        self._events.append(f"end {self._number}")


@contextmanager
def late_collectives(events: list[str]) -> Iterator[None]:
    """Deliver asynchronous collectives when they are waited for, and write their starts and ends to `events`."""
    started = [0]

    def two(real: Callable[..., Any]) -> Callable[..., Any]:
        def run(result: Tensor, given: Tensor, group: Any = None, async_op: bool = False, **others: Any) -> Any:
            if not async_op:
                return real(result, given, group=group, **others)
            found = torch.empty_like(result)
            started[0] += 1
            return _Late(started[0], events, real(found, given, group=group, async_op=True), result, found)

        return run

    def in_place(real: Callable[..., Any]) -> Callable[..., Any]:
        def run(result: Tensor, group: Any = None, async_op: bool = False, **others: Any) -> Any:
            if not async_op:
                return real(result, group=group, **others)
            found = result.clone()
            started[0] += 1
            return _Late(started[0], events, real(found, group=group, async_op=True), result, found)

        return run

    real_pass = dist.batch_isend_irecv

    def passed(ops: list[Any]) -> list[Any]:
        results = []
        for op in ops:
            if op.op == dist.irecv:
                results.append((op.tensor, torch.empty_like(op.tensor)))
                op.tensor = results[-1][1]
        started[0] += 1
        return [_LateMessages(started[0], events, real_pass(ops), results)]

    with (
        patch.object(dist, "all_gather_into_tensor", two(dist.all_gather_into_tensor)),
        patch.object(dist, "reduce_scatter_tensor", two(dist.reduce_scatter_tensor)),
        patch.object(dist, "all_reduce", in_place(dist.all_reduce)),
        patch.object(dist, "all_to_all_single", two(dist.all_to_all_single)),
        patch.object(dist, "batch_isend_irecv", passed),
    ):
        yield


def step(model: PipelineModel, pieces: tuple[Piece, ...], events: list[str]) -> tuple[list[str], list[str]]:
    """One forward and backward of the layers, as (events of the forward, events of the backward)."""
    rows = model.payload_shapes(CHAIN[0], 2, 12)[0]
    generator = torch.Generator().manual_seed(5 + model.tp_group.rank() * model.config.sequence_parallel)
    hidden = torch.randn(rows, generator=generator, dtype=torch.float64).requires_grad_()
    with late_collectives(events), Products(events):
        (output,) = model.run(pieces, (hidden,), make_batch(), CONTEXT)
        forward = events.copy()
        events.clear()
        output.square().sum().backward()
    return forward, events.copy()


def watched(rank: int, world_size: int, split: bool) -> dict[tuple[str, bool], Any]:
    """By style and sequence parallelism, the events of a step of the layers and whether all gradients are numbers."""
    set_parallel(tp=2)
    found: dict[tuple[str, bool], Any] = {}
    for style, sequence_parallel in (("llama", True), ("gpt", False)):
        model = model_in_halves(style, sequence_parallel)
        if split:
            with model.weight_gradients().keep("unit"):
                found[style, sequence_parallel] = step(model, INNER, [])
            model.weight_gradients().compute("unit")
        else:
            found[style, sequence_parallel] = step(model, INNER, [])
        finite = all(torch.isfinite(p.grad).all() for p in model.decoder.layers.parameters() if p.grad is not None)
        found[style, sequence_parallel] += (finite,)
    return found


def watched_over_context(rank: int, world_size: int) -> tuple[list[str], list[str], bool]:
    """Of context-parallel ranks that swap rows for heads, the same."""
    set_parallel(cp=2)
    model = model_over_context("a2a")
    found = step(model, INNER, [])
    return *found, all(torch.isfinite(p.grad).all() for p in model.decoder.layers.parameters() if p.grad is not None)


def logits_of(rank: int, world_size: int) -> list[float]:
    """The largest difference of halves' logits, in the order of the tokens, from those of whole chunks."""
    set_parallel(tp=2)
    found = []
    for sequence_parallel in (True, False):
        models = [model_in_halves("llama", sequence_parallel, overlap) for overlap in (HALVES, OFF)]
        with torch.no_grad():
            logits = [model.logits(*model.run(CHAIN[:-1], (), make_batch(), CONTEXT)) for model in models]
        found.append(float((logits[0] - logits[1]).abs().max()))
    return found


def with_dropout(rank: int, world_size: int) -> list[dict[str, Any]]:
    """Errors of the gradients and the loss of each piece in a graph of its own beside those of all pieces in one, and
    whether both halves dropped the same."""
    set_parallel(tp=2)
    results = []
    for sequence_parallel in (True, False):
        expected: dict[str, Tensor] = {}
        for parts in (1, len(CHAIN)):
            model = model_in_halves("llama", sequence_parallel, hidden_dropout=0.3, attention_dropout=0.3)
            state: tuple[Tensor, ...] = ()
            if parts == 1:
                state = model.run(CHAIN, (), make_batch(), CONTEXT)
            else:
                for piece in CHAIN:
                    state = model.run((piece,), state, make_batch(), CONTEXT)
            state[0].backward()
            found = gradients_of(model) | {"loss": state[0].detach().double()}
            if parts > 1:
                results.append({"error": worst(found, expected)})
            expected = found
    return results
