"""The simulator does each piece of work once."""

from __future__ import annotations

import sys
from collections import Counter
from heapq import heappush
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest

from helixpipe.costs.by_hand import PieceTimes
from helixpipe.lowering import order as order_module
from helixpipe.lowering.lower import lower
from helixpipe.program.costs import Contents, Load, Work
from helixpipe.simulate.simulator import simulate
from schedules import Shape, build
from tests.simulate.test_simulator import EXAMPLE, run

# ------------------------------------------------------------------------------------------------------- counted work


def count_calls(m: int) -> int:
    """Calls of Python and C functions to build, lower and simulate 1F1B on 8 ranks."""
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        run("1f1b", Shape(8, m, 8))
    finally:
        sys.setprofile(before)
    return calls


def test_work_grows_linearly_with_ops() -> None:
    count_calls(32)  # with what a process does once, as to load the compiled core
    calls = [count_calls(m) for m in (32, 64, 128, 256)]
    first, *growth = (b - a for a, b in pairwise(calls))
    for step in growth:  # steps double with the sizes; a little more is the rounding of caches
        assert step == pytest.approx(2 * first, rel=0.02)
        first = step


def test_each_task_enters_the_queue_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HELIXPIPE_COMPILED", "0")
    pushes: list[Any] = []

    def push(heap: list[Any], item: Any) -> None:
        pushes.append(item)
        heappush(heap, item)

    monkeypatch.setattr(order_module, "heappush", push)
    lowered = lower(build("1f1b", Shape(8, 32, 8)))
    tasks = 8 * 32 * 2 + 7 * 32 * 2
    assert len(pushes) == len(lowered.order) == tasks
    simulate(lowered, EXAMPLE)
    assert len(pushes) == 2 * tasks


def test_equal_work_is_asked_for_once() -> None:
    """Of four stages the two in the middle are alike; messages are between other ranks."""
    asked: list[Work | Load | Contents] = []

    class Counting(PieceTimes):
        def op_time(self, work: Work) -> float:
            asked.append(work)
            return super().op_time(work)

        def transfer_time(self, load: Load) -> float:
            asked.append(load)
            return super().transfer_time(load)

        def size(self, contents: Contents) -> float:
            asked.append(contents)
            return super().size(contents)

    program = build("seq1f1b", Shape(4, 32, 4, 2))
    simulate(lower(program), Counting({"attn": 1.0}))
    assert len(asked) == len(set(asked))
    assert sorted(each.kind for each in asked if isinstance(each, Work)) == sorted("FB" * 3 * 2)
    messages = [(each.kind, *each.ranks) for each in asked if isinstance(each, Load)]
    hops = [(r, r + 1) for r in range(3)]
    expected = [("activation", a, b) for a, b in hops] + [("gradient", b, a) for a, b in hops]
    assert sorted(messages) == sorted(expected * 2)
    sizes_asked = Counter(each.kind for each in asked if isinstance(each, Contents))
    cuts, stages = dict.fromkeys(("activation", "gradient"), 2 * 2), {"saved": 3 * 2, "workspace": len("FB") * 3 * 2}
    assert sizes_asked == cuts | stages | dict.fromkeys(("keys_values", "kv_gradients"), 3)
