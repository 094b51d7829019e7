"""A profile in a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.profile.test_profile import make_profile


@pytest.fixture
def saved(tmp_path: Path) -> str:
    path = tmp_path / "profile.json"
    make_profile().save(path)
    return str(path)
