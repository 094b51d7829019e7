"""One browser for all tests of a file, and pages in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helixpipe.draw.page import html_page
from helixpipe.program.timeline import Timeline
from helixpipe.simulate.simulator import Simulation
from tests.draw.chromium import Browser, browser
from tests.draw.opened import Opened


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture
def show(chromium: Browser, tmp_path: Path) -> Any:
    def open_page(*shown: Simulation | Timeline, **looks: Any) -> Opened:
        return Opened(chromium, tmp_path / "x.html", html_page(shown), **looks)

    return open_page
