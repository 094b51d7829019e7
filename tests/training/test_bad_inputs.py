"""What a new user may get wrong is told in one sentence that names the flag as typed, its value, and what would do."""

from __future__ import annotations

from pathlib import Path

import pytest

from helixpipe.common.errors import UserError
from schedules import command
from tests.training.helpers import config
from tests.training.steps import Run

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


def test_a_divided_head_that_is_tied_has_whole_weights() -> None:
    """Untied it may have weights in parts."""
    words = (
        "--data-parallel-sharding-strategy optim_grads_params --pipeline-schedule 1f1b --pipeline-vocab-parallel split"
    )
    with pytest.raises(UserError) as caught:
        Run("gpt", words, pp=2).config(0, 4)
    assert str(caught.value) == (
        "--pipeline-vocab-parallel split cannot be had with --data-parallel-sharding-strategy optim_grads_params where "
        "the output layer is tied to the embedding; give spread, or --untie-embeddings-and-output-weights."
    )
    assert Run("llama", words, pp=2).config(0, 4).parallel.shards_weights


def test_there_are_many() -> None:
    assert len({words for words, _ in INPUTS}) == len(INPUTS) >= 150
