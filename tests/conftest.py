"""Tests run on the CPU, on machines with GPUs too: these are for `pytest -m gpu` alone."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

settings.register_profile("any machine", deadline=None)  # a busy one takes longer over an example; nothing is timed
settings.load_profile("any machine")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
