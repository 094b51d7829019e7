"""Activations that leave the device after a unit's forward and are back before its backward.

While an F runs whose unit offloads, every tensor that autograd saves is kept as a `SavedTensor`: where it lies in which
storage. The storages that the unit is the first to save, and whose pieces are to leave, are copied to the host's
memory; when the copy has ended nothing here refers to them any more, and their memory is free unless somebody
else uses it. Before the backward they come back in memory of their own, and autograd, when it asks, finds its tensors
there. So whatever else may use a storage, no one ever sees it change: what is moved wrongly costs memory, never a wrong
number.

What does not leave: weights, borrowed or not; keys and values of chunks and their gradients, which other chunks use;
the batch; what the model keeps anyway (`constants`: tables of rotary embeddings); what has crossed a cut and belongs to
two units (see `costs.saved.staying`); storages that are empty, because their data will be recomputed; and tensors
smaller than the program's `min_offloaded_bytes`. A storage that is saved twice moves once, and a view moves all of it.

The inputs of a segment that is recomputed are data, not saved tensors: they leave and come back as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from helixpipe.costs.saved import leaving_share
from helixpipe.program.program import Unit
from helixpipe.program.stages import Piece
from helixpipe.runtime.arena import Allocation, Arena
from helixpipe.runtime.copies import CopyEngine, Copying, Timed
from helixpipe.runtime.segments import SegmentGraph


class Offloading(NamedTuple):
    """Says what of a unit is offloaded.

    groups: of each segment, its pieces in runs that are treated alike, each with the number of its run in `shares`, -1
    for what stays. shares: of each run's bytes. stays: the numbers of the unit's inputs that are the unit's before,
    too. min_bytes: of a storage that leaves.
    """

    groups: tuple[tuple[tuple[int, tuple[Piece, ...]], ...], ...]
    shares: tuple[float, ...]
    stays: tuple[int, ...]
    min_bytes: int


class _Storage:
    """A storage that autograd saved something of. data: None while it is away. run: that may take it away; -1: none."""

    def __init__(self, data: torch.UntypedStorage, run: int, device: torch.device):
        self.data: torch.UntypedStorage | None = data
        self.run, self.device, self.nbytes = run, device, data.nbytes()

    def bytes(self) -> Tensor:
        """Return the whole storage, [bytes] of uint8."""
        assert self.data is not None, "the storage is not on the device"
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(self.data)


class SavedTensor:
    """A handle that autograd holds in place of a saved tensor."""

    def __init__(self, tensor: Tensor, storage: _Storage):
        self.storage = storage
        self._place = tensor.storage_offset(), tensor.size(), tensor.stride()
        self._dtype = tensor.dtype

    def tensor(self) -> Tensor:
        data = self.storage.data
        assert data is not None, "autograd asks for what is not on the device"
        empty = torch.empty(0, dtype=self._dtype, device=self.storage.device)
        return empty.set_(data, *self._place)


@dataclass
class _Away:
    """The offloaded part of a unit.

    inputs: of its segments, that lie in these storages, and whether a recomputation needs them again. parts: of the
    host's memory. back: the device memory it is copied back to. leaving, coming: the copies.
    """

    storages: list[_Storage]
    inputs: list[tuple[Tensor, SavedTensor, bool]]
    parts: list[Allocation] = field(default_factory=list)
    back: list[Tensor] = field(default_factory=list)
    leaving: Copying | None = None
    coming: Copying | None = None


class Offloader:
    """Copies activations of this rank, step after step.

    engine: what copies. host_bytes: of the host's memory to take at once, when the first copy needs it; more is taken
    when that is used up. `moved`: bytes that left since the run began.
    """

    def __init__(self, engine: CopyEngine, host_bytes: int = 0):
        self.engine = engine
        self.arena = Arena(host_bytes, engine.host_memory)
        self.moved = 0
        self._away: dict[Unit, _Away] = {}

    def leave(self, unit: Unit, saving: UnitSaving, graphs: Sequence[SegmentGraph], stays: Iterable[Tensor]) -> None:
        """Decide, after the F, what is offloaded. stays: tensors that are not, whoever saves them."""
        storages = saving.leaving({tensor.untyped_storage()._cdata for tensor in stays})
        gone = {storage.key: storage.storage for storage in storages}
        inputs = []
        for graph in graphs:
            for tensor in graph.inputs:
                storage = gone.get(tensor.untyped_storage()._cdata)
                if storage is not None:
                    inputs.append((tensor, SavedTensor(tensor, storage), graph.segment.recomputed))
        self._away[unit] = _Away([storage.storage for storage in storages], inputs)

    def offload(self, unit: Unit, task: int, mark: Callable[[], Any] | None) -> None:
        away = self._away[unit]
        away.parts = [self.arena.take(storage.nbytes) for storage in away.storages]
        pairs = [(part.tensor, storage.bytes()) for part, storage in zip(away.parts, away.storages, strict=True)]
        self.moved += sum(storage.nbytes for storage in away.storages)
        away.leaving = self.engine.start(pairs, False, None, task, mark)

    def gone(self, unit: Unit) -> None:
        away = self._away[unit]
        assert away.leaving is not None
        away.leaving.wait()
        for storage in away.storages:
            storage.data = None
        for tensor, _, _ in away.inputs:
            tensor.data = tensor.new_empty(1).expand(tensor.shape)  # autograd asks for the shape
            tensor.untyped_storage().resize_(0)

    def fetch(self, unit: Unit, task: int, mark: Callable[[], Any] | None) -> None:
        away = self._away[unit]
        away.back = [torch.empty(each.nbytes, dtype=torch.uint8, device=each.device) for each in away.storages]
        pairs = [(tensor, part.tensor) for tensor, part in zip(away.back, away.parts, strict=True)]
        away.coming = self.engine.start(pairs, True, away.leaving, task, mark)

    def back(self, unit: Unit) -> None:
        away = self._away.pop(unit)
        assert away.coming is not None
        away.coming.wait()
        for storage, tensor in zip(away.storages, away.back, strict=True):
            storage.data = tensor.untyped_storage()
        for part in away.parts:
            self.arena.give_back(part)
        for tensor, saved, recomputed in away.inputs:
            if recomputed:
                tensor.data = saved.tensor()

    def timed(self) -> list[Timed]:
        """Return the copies that were timed since the last call."""
        timed, self.engine.timed = self.engine.timed, []
        return timed

    def give_up(self) -> None:
        """Forget a step, when nothing is being copied."""
        self.engine.finish()
        for away in self._away.values():
            for part in away.parts:
                self.arena.give_back(part)
        self._away.clear()


@runtime_checkable
class KeepsConstants(Protocol):
    """A model that keeps tensors of its own on the device, which its units save as well."""

    def constants(self) -> Iterable[Tensor]: ...


class _KeyedStorage(NamedTuple):
    key: int
    storage: _Storage


class UnitSaving:
    """Collects what the F of a unit saves, as it runs."""

    def __init__(self, offloading: Offloading):
        self.offloading = offloading
        self._shared: set[int] = set()  # storages that belong to the unit before, too
        self._inputs: list[tuple[int, Tensor]] = []  # with the storage of each when it came
        self._saved: set[int] = set()  # storages that autograd holds
        self._run = -1
        self._storages: dict[int, _Storage] = {}

    def take_inputs(self, segment: int, graph: SegmentGraph) -> None:
        """Record a segment's inputs before it runs: they are kept as those of its first piece."""
        run, _ = self.offloading.groups[segment][0]
        tensors = list(graph.inputs)
        if segment == 0:  # a residual that passes by, too: a later segment may need it
            self._shared |= {tensors[number].untyped_storage()._cdata for number in self.offloading.stays}
        if graph.segment.inputs_again:
            return
        if graph.segment.passes_residual:
            tensors.pop()
        for tensor in tensors:
            self._inputs.append((self._add(tensor, run), tensor))

    @contextmanager
    def by(self, run: int) -> Iterator[None]:
        """Save the tensors of the pieces of a run during their forward."""
        self._run = run
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            yield

    def leaving(self, stays: set[int]) -> list[_KeyedStorage]:
        """Return the storages to offload, without those that stay."""
        moved = {key for key, tensor in self._inputs if tensor.untyped_storage()._cdata != key}  # to a chunk's store
        stays |= self._shared | (moved - self._saved)
        by_run: list[list[_KeyedStorage]] = [[] for _ in self.offloading.shares]
        for key, storage in self._storages.items():
            data = storage.data
            if storage.run < 0 or key in stays or data is None:
                continue
            if data.nbytes() == storage.nbytes and storage.nbytes >= max(self.offloading.min_bytes, 1):
                by_run[storage.run].append(_KeyedStorage(key, storage))
        chosen: list[_KeyedStorage] = []
        for run, share in zip(by_run, self.offloading.shares, strict=True):
            chosen += [run[place] for place in leaving_share([each.storage.nbytes for each in run], share)]
        return chosen

    def _pack(self, tensor: Tensor) -> Any:
        base = tensor if tensor._base is None else tensor._base
        if isinstance(base, torch.nn.Parameter):
            return tensor
        key = self._add(tensor, self._run)
        self._saved.add(key)
        return SavedTensor(tensor, self._storages[key])

    def _add(self, tensor: Tensor, run: int) -> int:
        data = tensor.untyped_storage()
        key = data._cdata
        if key not in self._storages:
            self._storages[key] = _Storage(data, run, tensor.device)
        return key


def _unpack(saved: Any) -> Tensor:
    return saved.tensor() if isinstance(saved, SavedTensor) else saved
