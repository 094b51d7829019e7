"""Work beside training: it goes on by itself, and who waits for it has its end and its failure."""

from __future__ import annotations

import threading

import pytest

from megatron.pretrain.checkpoint.saving import Background


def test_it_has_ended_when_waiting_has() -> None:
    begun, goes_on, done = threading.Event(), threading.Event(), []

    def work() -> None:
        begun.set()
        goes_on.wait()
        done.append("all")

    background = Background(work, "work")
    begun.wait()
    assert not background.has_ended and done == []
    threading.Timer(0.05, goes_on.set).start()
    background.wait()
    assert background.has_ended and done == ["all"]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_who_waits_is_told_what_failed(error: BaseException) -> None:
    def work() -> None:
        raise error

    background = Background(work, "work")
    with pytest.raises(type(error)) as caught:
        background.wait()
    assert caught.value is error and background.has_ended
