"""Whole runs on documents that do not see each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.forked import run_forked
from tests.integration.launching import MODEL, Launch
from tools.preprocess_data import parse_arguments, preprocess

FLAGS = (
    f"{MODEL} --data-path {{data}} --split 90,10,0 --tokenizer-type ByteLevelTokenizer --data-cache-path {{cache}} "
    "--train-iters 2 --micro-batch-size 2 --eval-interval 2 --eval-iters 1 --attention-dropout 0 --hidden-dropout 0 "
)


def test_isolated_documents_over_a_pipeline(tmp_path: Path) -> None:
    """Ranks 1 and 2 have neither tokens nor labels, and attention all the same."""
    texts = [f"{i:03} " * (1 + i % 5) for i in range(200)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = ["--input", str(tmp_path / "texts.jsonl"), "--output-prefix", str(tmp_path / "texts"), "--append-eod"]
    data = preprocess(parse_arguments([*words, "--tokenizer-type", "ByteLevelTokenizer"]))["text"]

    def losses(flags: str, ranks: int = 0) -> list[float]:
        launch = Launch("documents", FLAGS + flags, ranks=ranks)
        result = run_forked(launch, data=data, cache=tmp_path / "cache").done()
        validation = result.output.partition("lm loss value: ")[2].split()[0]
        return [*result.loss_values().values(), float(validation)]

    isolated = "--reset-attention-mask --reset-position-ids --eod-mask-loss"
    alone = losses(isolated)
    piped = losses(f"{isolated} --pipeline-model-parallel-size 4", ranks=4)
    assert len(alone) == 3 and piped == pytest.approx(alone, abs=2e-6)
    assert losses("--reset-position-ids --eod-mask-loss") != pytest.approx(alone, abs=1e-4)
