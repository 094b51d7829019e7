"""Tests run on the CPU, on machines with GPUs too: these are for `pytest -m gpu` alone."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from math import inf

import pytest
from hypothesis import settings

from helixpipe.common import progress
from helixpipe.common.collector import collector_paused

settings.register_profile("any machine", deadline=None)  # a busy one takes longer over an example; nothing is timed
settings.load_profile("any machine")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The modules and thousands of tests stay to the end: the collector need not search them again and again."""
    with collector_paused():
        result = yield
    gc.freeze()
    return result


@pytest.fixture(autouse=True)
def _no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is slow tells how far it is, on standard error; on a busy machine anything may be slow."""
    monkeypatch.setattr(progress, "_FIRST", inf)
