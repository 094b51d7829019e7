"""What of a unit's saved tensors leaves the device, how often, and what others see of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from helixpipe.costs.saved import leaving_share
from helixpipe.program.program import Unit
from helixpipe.program.stages import Piece
from helixpipe.runtime.copies import ThreadEngine
from helixpipe.runtime.offload import Offloader, Offloading, UnitSaving

UNIT = Unit(0, 0)


def moved(
    forward: Callable[[], Tensor], share: float = 1.0, min_bytes: int = 0, stays: Sequence[Tensor] = ()
) -> int:  # fmt: skip
    """Bytes that leave after a forward; they come back, and then its backward runs."""
    offloader = Offloader(ThreadEngine())
    saving = UnitSaving(Offloading((((0, (Piece("mlp", 0),)),),), (share,), (), min_bytes))
    with saving.by(0):
        output = forward()
    offloader.leave(UNIT, saving, (), stays)
    del saving
    offloader.offload(UNIT, 0, None)
    offloader.gone(UNIT)
    offloader.fetch(UNIT, 1, None)
    offloader.back(UNIT)
    output.backward()
    offloader.engine.close()
    assert offloader.arena.used == 0
    return offloader.moved


def test_views_of_a_storage_move_it_once_and_whole() -> None:
    data, first, second = torch.randn(20), torch.nn.Parameter(torch.ones(8)), torch.nn.Parameter(torch.ones(8))
    assert moved(lambda: (data[2:10] * first).sum() + (data[12:] * second).sum()) == 20 * 4
    assert first.grad is not None and torch.equal(first.grad, data[2:10])
    assert second.grad is not None and torch.equal(second.grad, data[12:])


def test_who_else_has_a_storage_sees_no_change() -> None:
    data, weight = torch.randn(20), torch.nn.Parameter(torch.ones(20))
    before, there = data.clone(), data.data_ptr()
    assert moved(lambda: (data * weight).sum()) == 20 * 4
    assert torch.equal(data, before) and data.data_ptr() == there


def test_strides_come_back() -> None:
    data, weight = torch.randn(6, 4), torch.nn.Parameter(torch.ones(3, 4))
    moved(lambda: (data[1:].t()[:, ::2].t() * weight).sum())
    assert weight.grad is not None and torch.equal(weight.grad, data[1::2])


def test_weights_and_their_views_stay() -> None:
    weight, data = torch.nn.Parameter(torch.randn(4, 4)), torch.randn(3, 4, requires_grad=True)
    assert moved(lambda: (data @ weight.t()).sum() + (data @ weight).sum()) == data.nbytes
    assert moved(lambda: (data @ weight.t()).sum(), stays=(data,)) == 0


@pytest.mark.parametrize(("least", "leaves"), [(0, 120), (40, 120), (41, 80), (80, 80), (81, 0)])
def test_only_smaller_tensors_than_the_least_stay(least: int, leaves: int) -> None:
    small, large = torch.randn(10), torch.randn(20)
    weights = [torch.nn.Parameter(torch.ones(each.shape)) for each in (small, large)]
    assert moved(lambda: (small * weights[0]).sum() + (large * weights[1]).sum(), min_bytes=least) == leaves


@pytest.mark.parametrize(
    ("sizes", "share", "places"),
    [
        ((3, 7, 5), 1.0, [1, 2, 0]),
        ((3, 7, 5), 0.5, [1]),
        ((3, 7, 5), 7 / 15, [1]),
        ((3, 7, 5), 0.46, [2]),
        ((1,) * 10, 0.3, [0, 1, 2]),
        ((1,) * 10, 0.1 + 0.2, [0, 1, 2]),
        ((7,) * 7, 1 / 7, [0]),
        ((4, 4), 0.4, []),
        ((), 1.0, []),
    ],
)
def test_of_a_share_the_largest_leave_while_they_are_within_it(
    sizes: tuple[int, ...], share: float, places: list[int]
) -> None:
    assert leaving_share(sizes, share) == places
