"""Every op that torch dispatches, as a kernel of the current stream.

What is computed here is computed at once and in memory of the host; of each kernel it is kept which memory it reads and
writes. An op on pinned memory alone is done by the thread itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.runtime.happens_before.clocks import World
from tests.runtime.happens_before.memory import Memories, Memory

READS = frozenset({"_local_scalar_dense", "equal"})
"""Ops whose result the host waits for."""


class _Kind(NamedTuple):
    """Of an op. places, names: of the arguments that it writes to."""

    name: str
    allocates: bool
    places: tuple[int, ...]
    names: frozenset[str]


class Kernels(TorchDispatchMode):
    """While it is active, in the thread that has entered it."""

    def __init__(self, world: World, memories: Memories):
        super().__init__()
        self.world, self.memories = world, memories
        self._kinds: dict[Any, _Kind] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # no compiler is told to leave each op alone: that takes longer than the op

    def alike(self) -> Kernels:
        """One for another thread."""
        return Kernels(self.world, self.memories)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = _kind(func)
        if kind.allocates:
            for tensor in tensors((result,)):
                self.memories.of(tensor.untyped_storage())
            return result
        given = tensors(args, kwargs.values())
        inputs = {storage._cdata: storage for storage in [tensor.untyped_storage() for tensor in given]}
        changed = [args[at] for at in kind.places if at < len(args)]
        changed += [kwargs[name] for name in kind.names & kwargs.keys()]
        written = {tensor.untyped_storage()._cdata for tensor in tensors(changed)} if changed else frozenset()
        made = [tensor.untyped_storage() for tensor in tensors((result,))]
        made = [storage for storage in made if storage._cdata not in inputs]
        if written or made or kind.name in READS:
            waits = kind.name != "copy_" or not (kwargs.get("non_blocking") or args[2:3] == (True,))
            self.kernel(kind.name, inputs, written, made, waits)
        return result

    def kernel(
        self, name: str, inputs: dict[int, Any], written: Set[int], made: list[Any], waits: bool, copies: bool = False
    ) -> None:
        """One kernel. waits: the host waits for it, should it copy from or to the host. copies: from the host to new
        memory of the device."""
        world, memories = self.world, self.memories
        with world.lock:
            used = [(memories.of(storage), key in written) for key, storage in inputs.items()]
            pinned = [memory for memory, _ in used if memory.home is None]
            if pinned and len(pinned) == len(used) and not copies:
                used += [(memories.allocated(storage, pinned=True), True) for storage in made]
                self._on_host(name, used)
                return
            stream = world.stream
            used += [(memories.of(storage), True) for storage in made]
            world.launch(stream)
            for memory, write in used:
                memories.access(stream, memory, write, name)
            if name in READS or (pinned and waits):
                world.thread.learn(stream.known)

    def _on_host(self, name: str, used: list[tuple[Memory, bool]]) -> None:
        thread = self.world.thread
        thread.step()
        for memory, write in used:
            self.memories.access(thread, memory, write, name)


def _kind(func: Any) -> _Kind:
    name = func._schema.name.removeprefix("aten::")
    written = [
        (place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if name in ("set_", "resize_"):  # of a tensor, not of memory
        written = []
    allocates = name.startswith(("empty", "new_empty"))
    return _Kind(name, allocates, tuple(place for place, _ in written), frozenset(each for _, each in written))


def tensors(*trees: Iterable[Any]) -> list[torch.Tensor]:
    """All tensors in sequences, and in lists and tuples in them."""
    found = []
    for tree in trees:
        for each in tree:
            if isinstance(each, torch.Tensor):
                found.append(each)
            elif isinstance(each, (list, tuple)):
                found += tensors(each)
    return found
