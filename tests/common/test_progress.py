"""How far something long has come."""

from __future__ import annotations

import io
import itertools
import threading

import pytest

from helixpipe.common import progress as progress_module
from helixpipe.common.progress import ProgressLine


@pytest.fixture(autouse=True)
def _progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "_FIRST", 1.0)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO, seconds: float) -> str:
    """Return what is written of ten parts that each take so long."""
    now = [0.0]
    progress = ProgressLine("measuring", stream, lambda: now[0])
    for done in range(11):
        progress.at(done, 10)
        now[0] += seconds
    progress.end()
    return stream.getvalue()


def test_a_log_has_a_line_now_and_then() -> None:
    lines = shown(io.StringIO(), 4.0).splitlines()
    assert lines == [
        "measuring: 1 of 10, 4 s, about 36 s left",
        "measuring: 4 of 10, 16 s, about 24 s left",
        "measuring: 7 of 10, 28 s, about 12 s left",
        "measuring: 10 of 10, 40 s",
        "measuring: ended, 44 s",
    ]


def test_a_terminal_has_one_that_changes_and_is_gone_in_the_end() -> None:
    text = shown(Terminal(), 4.0)
    assert "\n" not in text and text.count("\rmeasuring: ") == 10
    *_, last, blank, after = text.split("\r")
    assert last.startswith("measuring: 10 of 10") and blank.strip() == "" and len(blank) >= len(last.rstrip())
    assert after == ""


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_what_is_quick_says_nothing(stream: io.StringIO) -> None:
    assert shown(stream, 0.01) == ""


def test_a_closed_stream_is_no_trouble() -> None:
    stream = io.StringIO()
    now = [0.0]
    progress = ProgressLine("measuring", stream, lambda: now[0])
    stream.close()
    now[0] = 5.0
    progress.at(1, 2)


def test_what_else_is_known_stands_behind() -> None:
    stream, now = io.StringIO(), [0.0]
    progress = ProgressLine("searching", stream, lambda: now[0], " %")
    now[0] = 5.0
    progress.at(50, 100, "best 2 s")
    assert stream.getvalue() == "searching: 50 of 100 %, 5 s, about 5 s left; best 2 s\n"


def test_a_part_that_takes_long_has_lines_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "_EACH", 0.001)
    lines, told = [], threading.Event()

    class Log(io.StringIO):
        def write(self, text: str) -> int:
            lines.append(text)
            if len(lines) == 2:
                told.set()
            return len(text)

    now = itertools.count(0.0, 5.0)
    with ProgressLine("building", Log(), lambda: next(now)).parts(3) as built:
        built()
        assert told.wait(60.0)
    *lines, last = lines
    assert all(line.startswith("building: ") and " of 3, " in line for line in lines)
    assert lines[-1].startswith("building: 1 of 3") and last.startswith("building: ended, ")
