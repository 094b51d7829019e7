"""The meter of what a step keeps for its backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from helixpipe.model import KeyValueStore, linear
from helixpipe.profile.accounting import SavedBytes
from helixpipe.runtime import step_run
from helixpipe.runtime.segments import SegmentGraph


class _Counted(linear._Deferred):
    """A weight gradient put off, and in `held` what keeps its tensors in the account for as long."""

    held: tuple[object, object]


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

    deferred = mock.patch.object(linear, "_Deferred", put_off)
    graphs = mock.patch.object(step_run, "SegmentGraph", graph)
    with account, deferred, graphs, mock.patch.object(KeyValueStore, "make_gradients", make_and_count):
        step()
    assert account.now == 0, f"{account.now} bytes are still kept after the step"
    return account.peak
