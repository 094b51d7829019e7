"""Bytes that there really are: those that autograd keeps, and all that ops have made; each storage once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class SavedBytes:
    """Context that counts what autograd saves for backward while it is active; `now` and `peak` are bytes.

    Weights, and anything else in `ignore`, are kept anyway and do not count; nor does what `passing` gives at the time,
    such as weights that travel. A tensor saved twice, or two views of one
    storage, count once, with the bytes the storage has now: it may be emptied and filled again, or let go of.
    What was saved goes on counting until autograd lets go of it, also after the context.
    """

    def __init__(self, ignore: Iterable[torch.Tensor] = (), passing: Callable[[], Iterable[torch.Tensor]] = lambda: ()):
        self._passing = passing
        self._ignored = {_key(tensor) for tensor in ignore}
        self._users: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self.peak = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def hold(self, tensor: torch.Tensor) -> object:
        """Count a tensor that is kept elsewhere, for as long as the returned object lives."""
        return self._pack(tensor)

    @property
    def now(self) -> int:
        storages = [storage() for _, storage in self._users.values()]
        return sum(storage.nbytes() for storage in storages if storage is not None)

    def with_others(self, tensors: Iterable[torch.Tensor]) -> int:
        """Bytes kept now by autograd and `tensors` together, each storage once."""
        others = {_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
        return self.now + sum(size for key, size in others.items() if key not in self._users)

    def _pack(self, tensor: torch.Tensor) -> Any:
        key = _key(tensor)
        if key in self._ignored or key in map(_key, self._passing()) or tensor.untyped_storage().nbytes() == 0:
            return tensor
        users, _ = self._users.get(key, (0, None))
        self._users[key] = users + 1, weakref.ref(tensor.untyped_storage())  # another may have had this key
        self.peak = max(self.peak, self.now)
        return _Saved(tensor, self, key)

    def release(self, key: int) -> None:
        """One saved tensor of a storage is gone."""
        users, storage = self._users.pop(key)
        if users > 1:
            self._users[key] = users - 1, storage


class _Saved:
    """Held by autograd in place of a tensor; dies with the graph's node."""

    def __init__(self, tensor: torch.Tensor, account: SavedBytes, key: int):
        self.tensor = tensor
        self._account, self._key = account, key

    def __del__(self) -> None:
        self._account.release(self._key)


def _key(tensor: torch.Tensor) -> int:
    """The storage's, also when its memory has moved."""
    return tensor.untyped_storage()._cdata


def _unpack(saved: Any) -> torch.Tensor:
    return saved.tensor if isinstance(saved, _Saved) else saved


class AliveBytes(TorchDispatchMode):
    """Context that counts the storages that ops have made while it is active; `now` and `peak` are bytes. What a kernel
    uses inside itself does not count."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak = 0

    @property
    def now(self) -> int:
        storages = {key: storage() for key, storage in self._made.items()}
        self._made = {key: self._made[key] for key, storage in storages.items() if storage is not None}
        return sum(storage.nbytes() for storage in storages.values() if storage is not None)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage._cdata for storage in _storages((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage._cdata not in given and storage.nbytes():
                self._made[storage._cdata] = weakref.ref(storage)
        self.peak = max(self.peak, self.now)
        return result


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
