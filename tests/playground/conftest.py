"""The playground's folder, written once."""

from __future__ import annotations

from pathlib import Path

import pytest

from helixpipe.cli.command_playground import write
from schedules import CATALOGUE


@pytest.fixture(scope="session")
def playground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("playground")
    write(folder, CATALOGUE)
    return folder
