from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.launching import ROOT


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prefix of a small .bin/.idx pair of this project's own documents."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "helixpipe").glob("*.py"))]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    command = [sys.executable, "tools/preprocess_data.py", "--input", str(folder / "texts.jsonl")]
    command += ["--output-prefix", str(folder / "corpus"), "--tokenizer-type", "ByteLevelTokenizer", "--append-eod"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder / "corpus_text_document"
