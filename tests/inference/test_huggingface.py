"""A model of Hugging Face's, imported, evaluated, asked and exported by the command lines that the documents print."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import numpy
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from tests.huggingface.test_folder import make
from tests.integration.forked import run_forked
from tests.integration.launching import ROOT, Launch, Result
from tests.training.tokenizers import huggingface_folder
from tools.checkpoint import main

TEXT = "a b c a a b " * 9


class Files(NamedTuple):
    folder: Path
    theirs: Path
    imported: Path
    text: Path
    documents: Path


def write_documents(prefix: Path, documents: list[list[int]]) -> Path:
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for tokens in documents:
        builder.add_document(torch.tensor(tokens), [len(tokens)])
    builder.finalize(f"{prefix}.idx")
    return prefix


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A random model of four layers with its tokenizer, and that imported."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(3)
    make(folder / "theirs", num_hidden_layers=4, max_position_embeddings=32)
    huggingface_folder(folder / "theirs", words=10)
    names = {"Llama-3.2-1B": str(folder / "theirs"), "checkpoints/llama": str(folder / "imported")}
    assert main(printed("huggingface.md", "import-hf", names)[2:]) == 0
    (folder / "text.txt").write_text(TEXT)
    documents = write_documents(folder / "documents", [[2, 3, 4] * 9, [5], [2, 1]])
    return Files(folder, folder / "theirs", folder / "imported", folder / "text.txt", documents)


def printed(page: str, words: str, names: dict[str, str]) -> list[str]:
    """The words of the one command of a page with these words in it, with other names of files."""
    lines = [
        line for line in (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines() if line.startswith("    ")
    ]
    (line,) = [line for line in lines if words in line and line.split()[0] in ("python", "torchrun")]
    return [names.get(word, word) for word in shlex.split(line)]


def run(command: list[str]) -> Result:
    """As many ranks as it says, of a script that takes flags without spaces."""
    ranks = int(command[2]) if command[0] == "torchrun" else 0
    script, *flags = command[3:] if ranks else command[1:]
    assert not any(re.search(r"\s", flag) for flag in flags)
    return run_forked(Launch(" ".join(command), " ".join(flags), ranks, script))


def loss(output: str) -> float:
    """Of all documents."""
    (found,) = re.findall(r"^ +\d+ documents +\d+ +(\d+\.\d{4}) +\d+\.\d{3}$", output, re.MULTILINE)
    return float(found)


@pytest.mark.thorough
@pytest.mark.parametrize("load", ["theirs", "imported"])
def test_what_the_documents_print(files: Files, load: str, tmp_path: Path) -> None:
    """Without --seq-length, which is the 32 positions that the model has, and without flags of a tokenizer."""
    (tmp_path / "question.txt").write_text("a b")
    names = {
        "DIR": str(getattr(files, load)),
        "runs/quickstart/checkpoints": str(getattr(files, load)),
        "data/books_text_document": str(files.documents),
        "book.txt": str(files.text),
        "question.txt": str(tmp_path / "question.txt"),
        "table.json": str(tmp_path / "table.json"),
        "    def ": "a",
        "200": "5",
    }
    wrote = run(printed("inference.md", "--prompt ", names)).done().output
    assert "-" * 80 in wrote and "\na" in wrote
    wrote = run(printed("inference.md", "--prompt-file", names)).done().output
    assert "-" * 80 in wrote and "\na b" in wrote
    losses = [loss(run(printed("inference.md", words, names)).done().output) for words in ("--documents", "--text")]
    assert all(0 < each < 2 * math.log(10) for each in losses)
    assert losses == pytest.approx(
        [expected(files.theirs, [[2, 3, 4] * 9, [2, 1]]), expected(files.theirs, [said()[:32]])], abs=2e-4
    )


def said() -> list[int]:
    return [{"a": 2, "b": 3, "c": 4}[word] for word in TEXT.split()]


def expected(folder: Path, documents: list[list[int]]) -> float:
    """The mean loss of all predicted tokens, by transformers."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    losses = []
    for tokens in documents:
        row = torch.tensor([tokens])
        with torch.no_grad():
            losses.append(torch.nn.functional.cross_entropy(model(row).logits[0, :-1], row[0, 1:], reduction="none"))
    return float(torch.cat(losses).mean())


def test_it_is_exported_as_it_was(files: Files, tmp_path: Path) -> None:
    names = {
        "checkpoints/long": str(files.imported),
        "Llama-3.2-1B": str(files.theirs),
        "Llama-3.2-1B-long": str(tmp_path / "long"),
    }
    assert main(printed("huggingface.md", "export-hf", names)[2:]) == 0
    for path in files.theirs.iterdir():
        assert (tmp_path / "long" / path.name).read_bytes() == path.read_bytes()


def test_an_imported_model_that_was_moved_has_its_tokenizer(files: Files, tmp_path: Path) -> None:
    moved = files.imported.rename(tmp_path / "moved")
    try:
        launch = Launch("moved", f"--load {moved} --text {files.text}", 0, "tools/evaluate.py")
        assert loss(run_forked(launch).done().output) > 0
    finally:
        moved.rename(files.imported)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        pytest.param("", "has no token; give a file with two tokens or more.", marks=pytest.mark.thorough),
        (" \n\n \n", "has no token; give a file with two tokens or more."),
        pytest.param("a", "has one token alone; give a file with two tokens or more.", marks=pytest.mark.thorough),
    ],
)
def test_nothing_to_predict_in_a_text(files: Files, content: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(content)
    flags = f"--load {files.imported} --text {tmp_path}/text.txt"
    result = run_forked(Launch("nothing", flags, 0, "tools/evaluate.py"))
    assert result.sentence() == f"--text {tmp_path}/text.txt {says}" and result.status == 2


@pytest.mark.parametrize(
    ("documents", "says"),
    [
        pytest.param([[], []], "few.bin holds no tokens", marks=pytest.mark.thorough),
        pytest.param([[1], []], "no document has more than one token alone", marks=pytest.mark.thorough),
        ([[2, 11]], "holds token 11, but the tokenizer has tokens 0 to 9"),
    ],
)
def test_documents_that_cannot_be_predicted(
    files: Files, documents: list[list[int]], says: str, tmp_path: Path
) -> None:
    prefix = write_documents(tmp_path / "few", documents)
    result = run_forked(Launch("few", f"--load {files.imported} --documents {prefix}", 0, "tools/evaluate.py"))
    assert says in result.sentence() and str(prefix) in result.sentence() and result.status == 2


def test_what_is_not_trusted_can_be(files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The flag that the refusal names is there."""
    imported = tmp_path / "imported"
    assert main(["import-hf", str(files.theirs), "--save", str(imported)]) == 0
    common = imported / "release" / "common.pt"
    content = torch.load(common, weights_only=False)
    content["args"].made_by = re.compile("x")
    torch.save(content, common)
    (imported / "release" / "manifest.json").unlink()
    words = ["export-hf", "--load", str(imported), str(tmp_path / "ours")]
    assert main(words) == 2
    said = capsys.readouterr().err
    (flag,) = re.findall(r"(--\S+) loads it all the same", said)
    assert main([*words, flag]) == 0
    assert (tmp_path / "ours" / "model.safetensors").read_bytes() == (files.theirs / "model.safetensors").read_bytes()
