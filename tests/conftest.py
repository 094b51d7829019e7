"""Tests run on the CPU, on machines with GPUs too: these are for `pytest -m gpu` alone."""

from __future__ import annotations

import os
from math import inf

import pytest
from hypothesis import settings

from helixpipe.common import progress

settings.register_profile("any machine", deadline=None)  # a busy one takes longer over an example; nothing is timed
settings.load_profile("any machine")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(autouse=True)
def _no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is slow tells how far it is, on standard error; on a busy machine anything may be slow."""
    monkeypatch.setattr(progress, "_FIRST", inf)
