"""A stand-in for CUDA graphs on the CPU: what is captured is a list of torch's ops, each replayed into the very memory
that it wrote when it was captured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helixpipe.model.graphs import Graphs, Result


class _Recorded(TorchDispatchMode):
    """The ops of a capture. made: the tensors that it allocates; changed: others that it writes to, with their values
    before, since a capture of CUDA computes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.made: dict[int, Tensor] = {}
        self.changed: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = dict(zip((argument.name for argument in function._schema.arguments), args, strict=False)) | kwargs
        written = [
            each
            for argument in function._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
            for each in tree_leaves(given[argument.name])
        ]
        for each in written:
            where = each.untyped_storage().data_ptr()
            if where not in self.made and where not in self.changed:
                self.changed[where] = each.detach(), each.detach().clone()
        result = function(*args, **kwargs)
        viewing = any(each.alias_info is not None for each in function._schema.returns)
        own = [] if viewing else [each.detach() for each in tree_leaves(result) if isinstance(each, Tensor)]
        self.made.update((each.untyped_storage().data_ptr(), each) for each in own)
        if own or written:
            self.ops.append((function, args, kwargs, own))
        return result

    def undo(self) -> None:
        for tensor, before in self.changed.values():
            tensor.copy_(before)


class RecordedEngine:
    """Captures on the CPU. A replay first spoils all that graphs of its pool have made, as memory that they share may
    hold anything. replays: how many there have been."""

    def __init__(self) -> None:
        self.replays = self._newest = 0
        self._pools: dict[int, list[Tensor]] = defaultdict(list)

    def pool(self) -> int:
        self._newest += 1
        return self._newest

    def capture(self, function: Callable[[], Result], pool: int) -> tuple[Callable[[], None], Result]:
        with _Recorded() as recorded:
            result = function()
        with torch.no_grad():
            recorded.undo()
        self._pools[pool] += [each for each in recorded.made.values() if each.is_floating_point()]

        def replay() -> None:
            self.replays += 1
            with torch.no_grad():
                for each in self._pools[pool]:
                    each.fill_(float("nan"))
                for op, args, kwargs, own in recorded.ops:
                    again = op(*args, **kwargs)
                    for old, new in zip(own, tree_leaves(again) if own else (), strict=True):
                        old.copy_(new)

        return replay, result

    def timed(self, function: Callable[[], Result]) -> tuple[Result, Callable[[], bool | None]]:
        return function(), lambda: True


class RecordedGraphs(Graphs):
    """Graphs of a model on the CPU, captured at once, whose gradients are summed as megatron-core's DDP does."""

    def __init__(self, model: Any):
        super().__init__(RecordedEngine(), model.weights_of, often=1, earlier=0)
        self._parameters = list(model.parameters())
        for each in self._parameters:
            each.main_grad = torch.zeros_like(each)
            each.register_post_accumulate_grad_hook(_to_main)

    def finish(self) -> None:
        """Leave the mean of two steps' gradients where autograd would have left it."""
        for each in self._parameters:
            each.grad = each.main_grad / 2
            each.main_grad.zero_()


def _to_main(parameter: Any) -> None:
    if parameter.grad is not None:  # not put off
        parameter.main_grad.add_(parameter.grad)
    parameter.grad = None
