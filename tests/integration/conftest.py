from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.launching import ROOT
from tools.preprocess_data import parse_arguments, preprocess


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prefix of a small .bin/.idx pair of this project's own documents."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "helixpipe").rglob("*.py"))]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    flags = f"--input {folder}/texts.jsonl --output-prefix {folder}/corpus --tokenizer-type ByteLevelTokenizer"
    return Path(preprocess(parse_arguments([*flags.split(), "--append-eod"]))["text"])
