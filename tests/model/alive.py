"""How much memory tensors have on the CPU: storages of the results of torch's ops, from when they are made to when they
go."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """While active: bytes alive now, and at most (`peak`), of storages made meanwhile. What a kernel uses inside itself
    does not count."""

    def __init__(self) -> None:
        super().__init__()
        self._known: set[int] = set()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):  # made before, unless it is known already
                self._known.add(tensor.untyped_storage()._cdata)
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor):
                self._made(tensor.untyped_storage())
        self.peak = max(self.peak, self.now)
        return results

    def _made(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.now += nbytes
        weakref.finalize(storage, self._gone, key, nbytes)

    def _gone(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes
