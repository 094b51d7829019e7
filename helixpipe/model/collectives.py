"""Collectives inside a piece, from their start to their end, and what computes meanwhile.

A piece that communicates does so in two places: where the collective is begun and where its result is needed. Between
them the piece's forward, a generator, yields: the other half of its tokens computes (`halves.py`), or another unit's
backward. In the backward the same two places stand in reverse order: the end starts the collective that mirrors the
forward's, the begin waits for it; between them autograd runs the other half, or the begin lets the forward of another
unit take a step (`ForwardBeside`).

    forward    begin: starts  …yield…  end: waits
    backward   begin: waits   …pause…  end: starts

`begin` and `end` are the two places for any exchange that is an object with `forward` and `backward`. Linear layers
have their own, whose collectives also run beside their products (`half_linear.py`).
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Result = TypeVar("Result")


class Started(NamedTuple):
    """A collective that has been started. result: where that will be. work: what to wait for; None if it is there.
    sent: what is read until then, which is kept, whether the backend keeps it or not."""

    result: Tensor
    work: dist.Work | None = None
    sent: Tensor | None = None


class ForwardBeside:
    """The forward of a unit that runs in the pauses of another one's backward; none, mostly.

    leads: it takes its first step before the backward begins. A backward of experts begins with an exchange, which that
    step would else have run beside.

    It goes on in the thread that runs the backward, so kernels and collectives of both are issued in one order, which
    is the same on all ranks that take part in the collectives.
    """

    def __init__(self, leads: bool = True) -> None:
        self._leads = leads
        self._steps: Generator[None, None, None] | None = None

    def begin(self, steps: Generator[None, None, None]) -> None:
        """Take up a forward, each of whose steps ends where it has started a collective."""
        assert self._steps is None, "one forward at a time runs beside a backward"
        self._steps = steps
        if self._leads:
            self.step()

    def step(self) -> None:
        """Take the next one, if there is a forward that has not ended."""
        steps, self._steps = self._steps, None  # what the step itself calls must not take another
        if steps is None:
            return
        with torch.enable_grad():
            try:
                next(steps)
            except StopIteration:
                return
        self._steps = steps

    def finish(self) -> None:
        """Take all that are left."""
        while self._steps is not None:
            self.step()


def without_graph(steps: Generator[None, None, Result]) -> Generator[None, None, Result]:
    """The same steps without a graph, whatever the mode is between them."""
    while True:
        with torch.no_grad():
            try:
                next(steps)
            except StopIteration as ended:
                result: Result = ended.value
                return result
        yield


class UnderWay:
    """One collective at a time, between its start and its end. beside: what takes a step before a backward waits."""

    def __init__(self, beside: ForwardBeside | None = None):
        self.beside = beside
        self._started: Started | None = None

    def start(self, started: Started) -> Tensor:
        """Keep what has been started; returns where its result will be."""
        self._started = started
        return started.result

    def wait(self) -> Tensor:
        """Wait for what was started and return it."""
        started, self._started = self._started, None
        assert started is not None
        if started.work is not None:
            started.work.wait()
        return started.result

    def wait_in_backward(self) -> Tensor:
        """The same, when the forward beside this backward has taken a step."""
        if self.beside is not None:
            self.beside.step()
        return self.wait()


class Begun(NamedTuple):
    """A tensor, and the collective under way from or to it."""

    rows: Tensor
    collective: Any


class TwoWay(Protocol):
    """A collective that can be started, from a tensor to its result, and its mirror image, from the result's gradient
    to the tensor's."""

    def forward(self, tensor: Tensor) -> Started: ...

    def backward(self, gradient: Tensor) -> Started: ...


def begin(tensor: Tensor, exchange: TwoWay, beside: ForwardBeside | None = None) -> Begun:
    """Start an exchange of a tensor. The result may not be read before `end`; yield between the two."""
    way = UnderWay(beside)
    return Begun(_Begin.apply(tensor, exchange, way), (exchange, way))


def end(begun: Begun) -> Tensor:
    """Wait for an exchange and return its result."""
    result: Tensor = _End.apply(begun.rows, *begun.collective)
    return result


def pause(tensor: Tensor, beside: ForwardBeside | None) -> Tensor:
    """The same tensor; in the backward the forward beside it takes a step here."""
    if beside is None or not torch.is_grad_enabled():
        return tensor
    paused: Tensor = _Pause.apply(tensor, beside)
    return paused


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, exchange: TwoWay, way: UnderWay) -> Tensor:
        ctx.way = way
        return way.start(exchange.forward(tensor))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.way.wait_in_backward(), None, None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: Tensor, exchange: TwoWay, way: UnderWay) -> Tensor:
        ctx.exchange, ctx.way = exchange, way
        return way.wait().view_as(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.way.start(ctx.exchange.backward(gradients[0]))
        return gradients[0], None, None  # in place of what is under way: `_Begin` returns that


class _Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, beside: ForwardBeside) -> Tensor:
        ctx.beside = beside
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.beside.step()
        return gradients[0], None
