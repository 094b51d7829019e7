"""Collectives of a divided head in a step that is forgotten."""

from __future__ import annotations

from typing import Any

import torch

from helixpipe.runtime.head_traffic import HeadTraffic


class Work:
    """A collective that ends when it is waited for."""

    def __init__(self) -> None:
        self.ended = False

    def wait(self) -> None:
        self.ended = True


def test_what_a_forgotten_step_has_started_is_waited_for() -> None:
    """Or it would still write into memory that the step run in its place has been given."""
    unused: Any = None
    traffic = HeadTraffic(0, unused, unused, unused, unused, {}, unused)
    works = [Work(), Work()]
    for number, work in enumerate(works):
        traffic._started[number] = work, torch.zeros(1), ()
    traffic.give_up()
    assert all(work.ended for work in works) and not traffic._started
