"""What a new user may get wrong is told in one sentence that names the flag as typed, its value, and what would do."""

from __future__ import annotations

from pathlib import Path

import pytest

from helixpipe.common.errors import UserError
from schedules import command
from tests.training.helpers import config

INPUTS = [
    tuple(part.strip() for part in line.split(" | ", 1))
    for line in Path(__file__).with_name("bad_inputs.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]


@pytest.mark.parametrize(("words", "says"), INPUTS, ids=[words for words, _ in INPUTS])
def test_one_sentence(
    words: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if words.startswith("train "):
        with pytest.raises(UserError) as caught:
            config(words.removeprefix("train "))
        sentence = str(caught.value)
    else:
        assert command.main(words.split()) == command.USER_ERROR
        sentence = capsys.readouterr().err.strip().removeprefix("helixpipe: ")
    assert says in sentence and "\n" not in sentence, sentence
    assert sentence.endswith((".", "?")) and "Traceback" not in sentence
    assert list(tmp_path.iterdir()) == []


def test_there_are_many() -> None:
    assert len({words for words, _ in INPUTS}) == len(INPUTS) >= 150
