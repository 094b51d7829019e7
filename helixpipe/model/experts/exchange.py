"""The tokens' way between the ranks of an expert-parallel group: begun in one place and ended in another, so that other
work runs meanwhile (`collectives.begin`, `end`).

What travels, and how a dispatcher prepares it, is megatron-core's. Its dispatchers wait for their exchange where they
start it; so that part alone is done here: an all-to-all of each token to the ranks of its experts, or a gather of all
tokens of the tensor- and expert-parallel ranks, whose mirror image is a sum scattered over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from torch import Tensor

from helixpipe.model.collectives import Begun, ForwardBeside, Started, begin, end


class Way(Protocol):
    """What one unit's tokens pass on their way to the experts and back."""

    def begin_dispatch(self, tokens: Tensor, probs: Tensor, beside: ForwardBeside | None) -> None:
        """Start to send what `dispatch_preprocess` gave."""
        ...

    def end_dispatch(self) -> tuple[Tensor, Tensor]:
        """Return what `dispatch_postprocess` takes: tokens and their probabilities."""
        ...

    def begin_combine(self, tokens: Tensor, beside: ForwardBeside | None) -> None:
        """Start to send what `combine_preprocess` gave."""
        ...

    def end_combine(self) -> Tensor:
        """Return what `combine_postprocess` takes."""
        ...


def way_of(dispatcher: Any) -> Way:
    """Return the way of a dispatcher's tokens; there is nothing to send where each rank has all experts."""
    if isinstance(dispatcher, MoEAllGatherTokenDispatcher):
        return _Gathered(dispatcher) if dispatcher.tp_ep_group.size() > 1 else _Here()
    return _Swapped(dispatcher) if dispatcher.ep_size > 1 else _Here(dispatcher)


class _Here:
    """Nothing travels."""

    def __init__(self, dispatcher: Any = None):
        self._dispatcher = dispatcher

    def begin_dispatch(self, tokens: Tensor, probs: Tensor, beside: ForwardBeside | None) -> None:
        _splits(self._dispatcher)
        self._dispatched = tokens, probs

    def end_dispatch(self) -> tuple[Tensor, Tensor]:
        return self._dispatched

    def begin_combine(self, tokens: Tensor, beside: ForwardBeside | None) -> None:
        self._combined = tokens

    def end_combine(self) -> Tensor:
        return self._combined


class _Swapped:
    """Each token goes to the ranks of its experts."""

    def __init__(self, dispatcher: Any):
        self._dispatcher = dispatcher

    def begin_dispatch(self, tokens: Tensor, probs: Tensor, beside: ForwardBeside | None) -> None:
        sent, received = _splits(self._dispatcher)
        self._exchange = exchange = AllToAll(self._dispatcher.ep_group, sent, received)
        # In the backward the tokens' gradients are waited for first, after the forward beside has taken its step.
        self._begun = [begin(probs, exchange), begin(tokens, exchange, beside)]

    def end_dispatch(self) -> tuple[Tensor, Tensor]:
        return end(self._begun.pop()), end(self._begun.pop())  # and keep nothing that has come

    def begin_combine(self, tokens: Tensor, beside: ForwardBeside | None) -> None:
        self._begun.append(begin(tokens, self._exchange.back, beside))

    def end_combine(self) -> Tensor:
        return end(self._begun.pop())


class _Gathered:
    """All ranks have all tokens, of which each takes those of its experts."""

    def __init__(self, dispatcher: Any):
        self._dispatcher, self._group = dispatcher, dispatcher.tp_ep_group

    def begin_dispatch(self, tokens: Tensor, probs: Tensor, beside: ForwardBeside | None) -> None:
        exchange = Gather(self._group)
        self._map = exchange.forward(self._dispatcher.routing_map.view(torch.uint8))
        self._probs = begin(probs, exchange)
        self._tokens = begin(tokens, exchange, beside)

    def end_dispatch(self) -> tuple[Tensor, Tensor]:
        assert self._map.work is not None
        self._map.work.wait()
        self._dispatcher.routing_map = self._map.result.view(torch.bool)
        return end(self._tokens), end(self._probs)

    def begin_combine(self, tokens: Tensor, beside: ForwardBeside | None) -> None:
        self._dtype = tokens.dtype
        self._sum: Begun = begin(tokens.to(self._dispatcher.local_probs.dtype), Scatter(self._group), beside)

    def end_combine(self) -> Tensor:
        return end(self._sum).to(self._dtype)


class AllToAll(NamedTuple):
    """An all-to-all. sent, received: rows to and from each rank; None: equally many."""

    group: dist.ProcessGroup
    sent: Sequence[int] | None
    received: Sequence[int] | None

    @property
    def back(self) -> AllToAll:
        return AllToAll(self.group, self.received, self.sent)

    def forward(self, tensor: Tensor) -> Started:
        rows = tensor.size(0) if self.received is None else sum(self.received)
        output = tensor.new_empty((rows, *tensor.shape[1:]))
        received, sent = (None if each is None else list(each) for each in (self.received, self.sent))
        tensor = tensor.contiguous()
        work = dist.all_to_all_single(output, tensor, received, sent, group=self.group, async_op=True)
        return Started(output, work, tensor)

    def backward(self, gradient: Tensor) -> Started:
        return self.back.forward(gradient)


class Gather(NamedTuple):
    """The rows of all ranks, one rank's after another's."""

    group: dist.ProcessGroup

    def forward(self, tensor: Tensor) -> Started:
        output = tensor.new_empty((tensor.size(0) * self.group.size(), *tensor.shape[1:]))
        tensor = tensor.contiguous()
        return Started(output, dist.all_gather_into_tensor(output, tensor, group=self.group, async_op=True), tensor)

    def backward(self, gradient: Tensor) -> Started:
        return Scatter(self.group).forward(gradient)


class Scatter(NamedTuple):
    """This rank's rows of the sum over all ranks."""

    group: dist.ProcessGroup

    def forward(self, tensor: Tensor) -> Started:
        output = tensor.new_empty((tensor.size(0) // self.group.size(), *tensor.shape[1:]))
        tensor = tensor.contiguous()
        return Started(output, dist.reduce_scatter_tensor(output, tensor, group=self.group, async_op=True), tensor)

    def backward(self, gradient: Tensor) -> Started:
        return Gather(self.group).forward(gradient)


def _splits(dispatcher: Any) -> tuple[Sequence[int] | None, Sequence[int] | None]:
    """The rows of a dispatcher's all-to-all, sent and received, once they are on the host; its own are lists after."""
    if dispatcher is None:
        return None, None
    # megatron-core copies counts to the host in several places of its own, one of them where it starts the exchange
    dispatcher.tokens_per_expert = dispatcher._maybe_dtoh_and_synchronize(
        "before_ep_alltoall", dispatcher.tokens_per_expert
    )
    for name in ("input_splits", "output_splits"):  # arrays where they came from a device, tensors on the CPU
        if (splits := getattr(dispatcher, name, None)) is not None:
            setattr(dispatcher, name, [int(each) for each in splits])
    return dispatcher.input_splits, dispatcher.output_splits
