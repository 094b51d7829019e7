from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.launching import ROOT, Launch


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prefix of a small .bin/.idx pair of this project's own documents."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "helixpipe").rglob("*.py"))]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    flags = f"--input {folder}/texts.jsonl --output-prefix {folder}/corpus --tokenizer-type ByteLevelTokenizer"
    script = "tools/preprocess_data.py"
    Launch("preprocess", f"{flags} --append-eod", ranks=0, script=script).run().done()
    return folder / "corpus_text_document"
