"""Tests run on the CPU, on machines with GPUs too: these are for `pytest -m gpu` alone."""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Generator
from math import inf

import pytest
from hypothesis import HealthCheck, settings

from helixpipe.common import progress
from helixpipe.common.collector import collector_paused

# Every run draws the same examples and remembers none, so that it ends as the last did; `make hunt` draws others.
same = settings(derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", same)
settings.register_profile("hunt", same, derandomize=False, print_blob=True)
settings.load_profile("same")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Begin the random numbers of each test anew, so that they do not depend on the tests that ran before."""
    random.seed(0)
    for name, start in (("numpy.random", "seed"), ("torch", "manual_seed")):
        if module := sys.modules.get(name):
            getattr(module, start)(0)


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
