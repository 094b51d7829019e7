"""The meter of what a step keeps for its backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.accounting import SavedBytes
from helixpipe.model import KeyValueStore, linear
from helixpipe.runtime import offload, step_run
from helixpipe.runtime.segments import SegmentGraph
from helixpipe.watch.position import Position


class _Counted(linear._Deferred):
    """A weight gradient put off, and in `held` what keeps its tensors in the account for as long."""

    held: tuple[object, object]


class _OnDevice:
    """Counts what is saved by units that offload, as long as it is on the device; autograd's own hooks do not see
    it.
    """

    def __init__(self, account: SavedBytes):
        self._account, self.peak = account, 0
        self._storages: weakref.WeakSet[offload._Storage] = weakref.WeakSet()
        self._coming: list[weakref.ref[Tensor]] = []

    def add(self, saving: Any, tensor: Tensor, run: int) -> int:
        key = self._add(saving, tensor, run)
        self._storages.add(saving._storages[key])
        return key

    def fetch(self, offloader: offload.Offloader, unit: Any, *more: Any) -> None:
        self._fetch(offloader, unit, *more)
        self._coming += map(weakref.ref, offloader._away[unit].back)

    def look(self) -> None:
        """Between two instructions."""
        self._coming = [each for each in self._coming if each() is not None]
        there = [tensor for each in self._coming if (tensor := each()) is not None]
        there += [storage.bytes() for storage in self._storages if storage.data is not None]
        self.peak = max(self.peak, self._account.with_others(there))

    _add, _fetch = staticmethod(offload.UnitSaving._add), staticmethod(offload.Offloader.fetch)


class _CountedGraph(SegmentGraph):
    """A segment of a unit, with its inputs in the account."""

    held: list[object]


def peak_kept(
    step: Callable[[], Any], weights: Iterable[Tensor], copies: Callable[[], Iterable[Tensor]] = lambda: ()
) -> int:
    """Most bytes that a step keeps at once for a backward: by autograd, among them the keys and values of chunks; the
    inputs of segments, which are all that is left of one that is recomputed; from I to W by the linear layers; and the
    gradients of keys and values that later chunks leave to earlier ones. Weights, and copies of others', do not count.
    """
    account = SavedBytes(ignore=weights, passing=copies)
    gradients: weakref.WeakKeyDictionary[Any, list[object]] = weakref.WeakKeyDictionary()
    make_gradients = KeyValueStore.make_gradients

    def put_off(weight: torch.nn.Parameter, inputs: Tensor, output_gradient: Tensor, fused: bool) -> _Counted:
        deferred = _Counted(weight, inputs, output_gradient, fused)
        deferred.held = account.hold(inputs), account.hold(output_gradient)
        return deferred

    def make_and_count(store: KeyValueStore, sequence: Any, rows: int) -> None:
        make_gradients(store, sequence, rows)
        gradients[sequence] = [account.hold(gradient) for gradient in sequence.gradients]

    def graph(segment: Any, inputs: tuple[Tensor, ...], roots: Any) -> _CountedGraph:
        made = _CountedGraph(segment, inputs, roots)
        made.held = [account.hold(tensor) for tensor in inputs]
        return made

    on_device, at = _OnDevice(account), Position.at

    def look_at(position: Position, instruction: int) -> None:
        on_device.look()
        at(position, instruction)

    def add(saving: Any, tensor: Tensor, run: int) -> int:
        return on_device.add(saving, tensor, run)

    def fetch(offloader: offload.Offloader, unit: Any, *more: Any) -> None:
        on_device.fetch(offloader, unit, *more)

    patches = (
        mock.patch.object(linear, "_Deferred", put_off),
        mock.patch.object(step_run, "SegmentGraph", graph),
        mock.patch.object(KeyValueStore, "make_gradients", make_and_count),
        mock.patch.object(offload.UnitSaving, "_add", add),
        mock.patch.object(offload.Offloader, "fetch", fetch),
        mock.patch.object(Position, "at", look_at),
    )
    with account, ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        step()
    assert account.now == 0, f"{account.now} bytes are still kept after the step"
    return max(account.peak, on_device.peak)
