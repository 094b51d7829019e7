"""Watchdogs of several ranks around one store, in threads of this process: who speaks, when, and who ends."""

from __future__ import annotations

import math
import re
import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from helixpipe.watch import watchdog
from helixpipe.watch.position import Patience, Peers, Position
from helixpipe.watch.watchdog import Watchdog

LIMITS = {Patience.STEP: 0.8, Patience.LONG: 2.5, Patience.ENDLESS: math.inf}
DEADLINE = 60.0


@pytest.fixture(autouse=True)
def quick_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "ANSWER_SECONDS", 4.0)


class Job:
    """`watched` of `size` ranks have a watchdog; what they print, and who left with which status."""

    def __init__(self, size: int, watched: int | None = None, store: Any = None, limits: Any = LIMITS) -> None:
        self.store = store or HashStore()
        self.positions = [Position(Peers(rank, name=f"rank {rank}")) for rank in range(size)]
        self.printed: list[str] = []
        self.left: dict[int, int] = {}
        self._changed = threading.Condition()
        self.dogs = [
            Watchdog(position, self.store, size, limits, self._leaver(rank), self.printed.append)
            for rank, position in enumerate(self.positions[:watched])
        ]
        for position in self.positions:  # not for the first time
            for name in ("reduce", "alone"):
                position.enter(name)

    def _leaver(self, rank: int) -> Any:
        def leave(status: int) -> None:
            with self._changed:
                self.left[rank] = status
                self._changed.notify_all()

        return leave

    def wait(self, ranks: int) -> None:
        """Until so many have left."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.left) == ranks, DEADLINE)

    def run(self) -> ExitStack:
        stack = ExitStack()
        for dog in self.dogs:
            stack.enter_context(dog)
        return stack

    def all_wait(self) -> None:
        for position in self.positions:
            position.enter("reduce")


def test_one_report_and_all_leave() -> None:
    job = Job(4)
    with job.run():
        job.all_wait()
        job.wait(4)
    assert set(job.left.values()) == {1}
    (text,) = job.printed
    assert text.startswith("[Rank ") and "the job has stalled" in text
    assert "ranks 0-3, reduce: in or before a collective." in text


def test_a_rank_that_does_not_answer_is_silent() -> None:
    job = Job(3, watched=2)
    with job.run():
        job.all_wait()
        job.wait(2)
    (text,) = job.printed
    assert "  rank 2: silent" in text and "rank 0: silent" not in text and "rank 1: silent" not in text


def test_a_rank_that_has_ended_says_how() -> None:
    job = Job(2)
    with job.dogs[0]:
        with pytest.raises(ZeroDivisionError), job.dogs[1]:
            raise ZeroDivisionError
        job.all_wait()
        job.wait(1)
    (text,) = job.printed
    assert "  rank 1: ended with ZeroDivisionError." in text


def test_nothing_is_said_while_somebody_gets_on() -> None:
    """Ops that take shorter than the limit, while the other rank waits for much longer than that."""
    job = Job(2)
    with job.run():
        job.positions[0].enter("reduce")
        until = time.monotonic() + 3 * LIMITS[Patience.STEP]
        while time.monotonic() < until:
            job.positions[1].enter("alone", together=False)
            time.sleep(0.02)
        assert job.printed == [] and job.left == {}
        job.wait(2)
    assert "  rank 1, alone: busy alone. It waits for nobody." in job.printed[0]


def test_waiting_is_counted_anew_after_each_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock of its own: six polls, and a move before the fourth."""
    job = Job(1)
    (dog,), (position,) = job.dogs, job.positions
    clock, waited = [0.0], []

    class Polls:
        def wait(self, seconds: float) -> bool:
            clock[0] += seconds
            waited.append(dog._seen[1])
            if len(waited) == 4:
                position.enter("reduce")
            return len(waited) == 7

    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    dog._closing = Polls()  # type: ignore[assignment]
    dog._watch()
    poll = LIMITS[Patience.STEP] / 10
    assert waited == pytest.approx([0.0, 0.0, poll, 2 * poll, 0.0, poll, 2 * poll])


def test_what_may_take_long_is_given_longer() -> None:
    job = Job(2)
    with job.run():
        for position in job.positions:
            position.enter("index", Patience.ENDLESS)
        time.sleep(3 * LIMITS[Patience.STEP])
        assert job.printed == []
        job.positions[0].enter("reduce")
        job.positions[1].enter("load", Patience.LONG, together=False)
        job.wait(2)
    (text,) = job.printed
    found = re.search(r"rank 1, load: busy alone; for (\d+) s", text)
    assert found is not None and int(found[1]) >= LIMITS[Patience.LONG]


def test_all_are_busy_and_nobody_waits() -> None:
    job = Job(2)
    with job.run():
        for position in job.positions:
            position.enter("alone", together=False)
        time.sleep(3 * LIMITS[Patience.STEP])
    assert job.printed == [] and job.left == {}


class GoneStore(HashStore):
    """As when the host that holds the job's store has gone."""

    def clone(self) -> GoneStore:
        return self

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        raise RuntimeError("connection closed")


def test_without_a_store_a_rank_speaks_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "STORE_SECONDS", 0.5)
    job = Job(2, store=GoneStore())
    with job.run():
        job.positions[0].enter("alone", together=False)
        job.positions[1].enter("reduce")
        job.wait(1)
    (text,) = job.printed
    assert text.startswith("[Rank 1] stalled, and the job's store does not answer: rank 1, reduce: ")


def test_an_error_that_follows_from_the_end_is_not_told() -> None:
    """A rank whose connection breaks because another has left ends as that one did."""
    job = Job(1)
    with pytest.raises(ConnectionError), job.run():
        job.store.set("watchdog/word", "end")
        raise ConnectionError
    assert job.left == {0: 1} and job.printed == []


def test_a_run_that_ends_leaves_no_thread() -> None:
    before = threading.active_count()
    job = Job(3)
    with job.run():
        job.positions[0].enter("reduce")
    assert threading.active_count() == before and job.left == {}


def test_the_store_is_asked_less_often_by_more_ranks() -> None:
    """All ranks together ask no more than `STORE_REQUESTS` times a second, and a round waits for such answers."""
    seconds = 60.0
    few, many = (
        Watchdog(Position(Peers(0, name="rank 0")), HashStore(), size, {**LIMITS, Patience.STEP: 10 * seconds})
        for size in (8, 16384)
    )
    assert few._store_poll == few._poll == 1.0
    assert 16384 / many._store_poll <= watchdog.STORE_REQUESTS and many._poll == 1.0
    assert many._patience >= 2 * many._store_poll


def test_the_thread_that_follows_a_device_uses_this_ranks() -> None:
    """Before it looks at a mark: it would open a context on the first GPU of the host otherwise."""
    calls: list[tuple[str, str]] = []
    seen = threading.Event()

    class Followed(Position):
        def follow(self) -> None:
            calls.append(("follow", threading.current_thread().name))
            seen.set()

    dog = Watchdog(
        Followed(Peers(0, name="rank 0")), HashStore(), 1, LIMITS,
        use_device=lambda: calls.append(("use", threading.current_thread().name)),
    )  # fmt: skip
    with dog:
        assert seen.wait(DEADLINE)
    assert calls[:2] == [("use", "watchdog-device"), ("follow", "watchdog-device")]
