"""Where only what planning needs is installed, training says in a sentence what is missing."""

from __future__ import annotations

import pytest

from helixpipe.common import installed
from schedules import command


@pytest.mark.parametrize("words", [["train", "-p", "2"], ["profile", "--model", "llama2-7b"]], ids=["train", "profile"])
def test_training_says_what_is_missing(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(installed, "TRAINING", {"torch": "torch", "no.such": "such", "json": "json"})
    assert command.main(words) == command.USER_ERROR
    assert capsys.readouterr().err == (
        f"helixpipe: {words[0]} needs such, which this environment does not have: install this checkout with what "
        "training needs, pip install '.[train]'.\n"
    )
