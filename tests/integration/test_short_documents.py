"""Whole runs over steps whose documents are one, or all equally long, and shorter than --seq-length."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.forked import run_forked
from tests.integration.launching import MODEL, Launch
from tools.preprocess_data import parse_arguments, preprocess

FLAGS = (
    f"{MODEL} --global-batch-size {{size}} --variable-seq-lengths --data-path {{data}} --split 90,10,0 "
    "--tokenizer-type ByteLevelTokenizer --data-cache-path {cache} --attention-dropout 0 --hidden-dropout 0 "
    "--train-iters 4 --eval-interval 2 --eval-iters 1 --pipeline-model-parallel-size 2"
)


@pytest.mark.parametrize(
    ("schedule", "size"),
    [
        pytest.param("infinipipe", 1, marks=pytest.mark.thorough),
        ("seq1f1b --infinipipe-chunks 2", 3),
        pytest.param("1f1b", 1, marks=pytest.mark.thorough),
    ],
)
def test_a_run_and_its_relaunch_from_a_checkpoint(tmp_path: Path, schedule: str, size: int) -> None:
    """Evaluations among them; the relaunch goes on with the steps that the first would have had."""
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": f"{i:09}"}) + "\n" for i in range(30)))
    words = ["--input", str(tmp_path / "texts.jsonl"), "--output-prefix", str(tmp_path / "texts"), "--append-eod"]
    data = preprocess(parse_arguments([*words, "--tokenizer-type", "ByteLevelTokenizer"]))["text"]

    def losses(flags: str) -> dict[int, float]:
        launch = Launch("short documents", f"{FLAGS} --pipeline-schedule {schedule} {flags}", ranks=2)
        return run_forked(launch, data=data, cache=tmp_path / "cache", size=str(size)).done().loss_values()

    whole = losses("")
    first = losses(f"--save {tmp_path / 'saved'} --exit-interval 2")
    second = losses(f"--load {tmp_path / 'saved'}")
    assert list(whole) == [1, 2, 3, 4] and list(first) == [1, 2] and list(second) == [3, 4]
    assert first | second == pytest.approx(whole, abs=2e-6)
