"""Copies between device and host, measured: what is copied, that both directions are in use, what the times say."""

from __future__ import annotations

import threading

import pytest
import torch

from helixpipe.costs.profile_costs import CopyTimes
from helixpipe.profile.copy_times import Direction, copy_times, seconds_at_once


@pytest.mark.parametrize("inward", [False, True])
def test_a_direction_copies_as_many_bytes_as_it_is_told(inward: bool) -> None:
    way = Direction(inward, 64, torch.device("cpu"))
    assert way.source.eq(way.target).sum() == 0
    way.copy(40)
    assert torch.equal(way.target[:40], way.source[:40]) and way.source.eq(way.target).sum() == 40


def test_each_goes_on_until_all_were_made_often_enough() -> None:
    """The second is made only once the first has been made seven times since: neither is alone while it counts."""
    made, turn = [0, 0], threading.Condition()

    def quick() -> None:
        with turn:
            made[0] += 1
            turn.notify_all()

    def slow() -> None:
        with turn:
            before = made[0]
            assert turn.wait_for(lambda: made[0] >= before + 7, timeout=60)
            made[1] += 1

    assert all(seconds > 0 for seconds in seconds_at_once([quick, slow], count=5))
    assert made[1] >= 5 and made[0] >= 35


def test_an_error_ends_all_of_them() -> None:
    def fails() -> None:
        raise ValueError("no memory")

    with pytest.raises(ValueError, match="no memory"):
        seconds_at_once([lambda: None, fails])


def test_the_times_of_copies() -> None:
    """1 and 3 s before the first byte, 4 and 2 bytes a second; 8 bytes take 10 and 6 s when both are in use."""
    out = [(size, 1.0 + size / 4) for size in (4.0, 8.0)]
    inward = [(size, 3.0 + size / 2) for size in (4.0, 8.0)]
    measured = copy_times([out, inward], [(8.0, 10.0), (8.0, 6.0)])
    assert measured.latency == pytest.approx(2.0)
    assert (measured.out, measured.inward) == (pytest.approx((4.0, 1.0)), pytest.approx((2.0, 2.0)))
    assert isinstance(measured, CopyTimes)
