"""tools/preprocess_data.py and tools/stdlib_corpus.py."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import sysconfig
from collections import Counter
from pathlib import Path

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDataset

from helixpipe.common.errors import DataError, UserError
from megatron.pretrain.data.document_files import IndexedDocuments
from megatron.pretrain.data.indexed_files import read_indexed_file
from tests.data.conftest import story, write_lines
from tools.preprocess_data import main, parse_arguments, preprocess
from tools.slices import cut
from tools.stdlib_corpus import unigram_entropy, write_corpus

TEXTS = ["héllo wörld\n", "b", story(2, 5000), "日本語", "", *(story(i, 7 * i) for i in range(3, 60))]
BYTES = ["--tokenizer-type", "ByteLevelTokenizer"]


def run(tmp_path: Path, source: Path | str, *flags: str, tokenizer: list[str] = BYTES) -> dict[str, Path]:
    words = ["--input", str(source), "--output-prefix", str(tmp_path / "out"), *tokenizer, *flags]
    return preprocess(parse_arguments(words))


@pytest.mark.parametrize(
    ("flags", "end"),
    [
        (("--workers", "1", "--append-eod"), b"\0"),
        pytest.param(("--workers", "2", "--partitions", "7", "--append-eod"), b"\0", marks=pytest.mark.thorough),
        (("--workers", "2", "--partitions", "5"), b""),
    ],
)
def test_round_trip(tmp_path: Path, flags: tuple[str, ...], end: bytes) -> None:
    """A document is an entry of the index, whatever the slices that it was tokenized in."""
    source = write_lines(tmp_path / "a.jsonl", TEXTS)
    outputs = run(tmp_path, source, "--log-interval", "10", *flags)
    dataset = IndexedDataset(str(outputs["text"]))
    texts = [text for text in TEXTS if text]  # a document without tokens is left out
    assert [bytes(dataset[i].tolist()) for i in range(len(dataset))] == [text.encode() + end for text in texts]
    assert dataset.document_indices.tolist() == list(range(len(texts) + 1))
    assert (
        IndexedDocuments(read_indexed_file(str(outputs["text"]))).lengths.tolist() == dataset.sequence_lengths.tolist()
    )
    assert dataset[0].dtype == numpy.uint16
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.jsonl",
        "out_text_document.bin",
        "out_text_document.idx",
    ]


def test_several_files_and_keys_and_numbers(tmp_path: Path) -> None:
    for name, number in (("b2", 70000), ("b1", 5)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"x": f"1 {number}", "y": "3"}) + "\n\n")
    numbers = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100000"]
    outputs = run(tmp_path, str(tmp_path / "b?.jsonl"), "--json-keys", "x", "y", tokenizer=numbers)
    x, y = (IndexedDataset(str(outputs[key])) for key in ("x", "y"))
    assert [x[i].tolist() for i in range(len(x))] == [[1, 5], [1, 70000]]  # files in the order of their names
    assert [y[i].tolist() for i in range(len(y))] == [[3], [3]]
    assert x[0].dtype == numpy.int32


@given(st.lists(st.binary(max_size=20).map(lambda b: b.replace(b"\n", b"")), max_size=8), st.integers(1, 10))
def test_slices_cover_every_line_once(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], count: int) -> None:
    path = tmp_path_factory.mktemp("cut") / "lines"
    content = b"\n".join(lines)  # the last line may lack its end
    path.write_bytes(content)
    slices = cut([str(path)], count)
    assert b"".join(content[part.begin : part.end] for part in slices) == content
    assert all(content[part.end - 1 : part.end] == b"\n" or part.end == len(content) for part in slices)
    assert len(slices) <= count


@pytest.mark.parametrize(
    ("content", "flags", "words"),
    [
        ('{"text": "a"}\n\n{"text": \n{"text": "b"}\n', (), r"a\.jsonl, line 3: not JSON"),
        ('{"text": "a"}\n{"body": "b"}\n', ("--workers", "2"), r"a\.jsonl, line 2: no key 'text'; there are 'body'"),
        ('{"text": 3}\n', (), r"line 1: the value of 'text' is int, not text"),
        ("[1]\n", (), r"line 1: a JSON object is expected, not list"),
        ('{"text": ""}\n', (), "holds no text under 'text'"),
        ("", (), "holds no text"),
        ('{"text": "a"}\n', ("--workers", "0"), "--workers 0 must be at least 1"),
        ('{"text": "a"}\n', ("--split-sentences",), "--split-sentences is not supported"),
        ('{"a/b": "a"}\n', ("--json-keys", "a/b"), "cannot become part of a file name"),
        ('{"text": "a"}\n', ("--tokenizer-type", "Bytes"), "--tokenizer-type Bytes is unknown; valid are Null"),
        (
            '{"text": "9"}\n',
            ("--tokenizer-type", "NullTokenizer", "--vocab-size", "8"),
            "do not fit the vocabulary of 9",
        ),
        ('{"text": "x"}\n', ("--tokenizer-type", "NullTokenizer", "--vocab-size", "8"), "line 1: the tokenizer fails"),
    ],
)
def test_mistakes_are_told_and_leave_nothing(tmp_path: Path, content: str, flags: tuple[str, ...], words: str) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text(content)
    with pytest.raises(UserError, match=words) as caught:
        run(tmp_path, source, *flags)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_missing_input_and_unwritable_output(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not name any file"):
        run(tmp_path, tmp_path / "none*.jsonl")
    source = write_lines(tmp_path / "a.jsonl", ["a"])
    with pytest.raises(DataError, match="cannot be written"):
        preprocess(parse_arguments(["--input", str(source), "--output-prefix", str(source / "x"), *BYTES]))


@pytest.mark.thorough
def test_the_command_is_silent_about_its_libraries(tmp_path: Path) -> None:
    tool = Path(__file__).resolve().parents[2] / "tools/preprocess_data.py"
    source = write_lines(tmp_path / "a.jsonl", ["text"])
    command = [sys.executable, str(tool), "--input", str(source), "--output-prefix", str(tmp_path / "out"), *BYTES]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("Wrote ") and done.stdout.count("\n") == 1
    assert done.stderr.startswith("Processed 1 documents") and done.stderr.count("\n") == 1


def test_the_command_prints_one_sentence_for_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tool", "--input", str(tmp_path / "no"), "--output-prefix", "out", *BYTES])
    assert main() == 2
    assert capsys.readouterr().err == f"preprocess_data.py: --input {tmp_path / 'no'} does not name any file\n"


def test_corpus_of_the_standard_library(tmp_path: Path) -> None:
    library = Path(sysconfig.get_path("stdlib"))
    outputs = [tmp_path / "1.jsonl", tmp_path / "2.jsonl"]
    stats = [write_corpus(output, library, max_megabytes=1) for output in outputs]
    assert outputs[0].read_bytes() == outputs[1].read_bytes()
    assert stats[0] == json.loads((tmp_path / "1.jsonl.stats.json").read_text())
    texts = [json.loads(line)["text"].encode() for line in outputs[0].read_text().splitlines()]
    counts = Counter(b"".join(texts))
    assert stats[0]["documents"] == len(texts) > 10
    assert stats[0]["bytes"] == sum(map(len, texts)) <= 1e6
    assert stats[0]["unigram_entropy_nats"] == pytest.approx(unigram_entropy(counts))
    assert stats[0]["unigram_entropy_bits"] == pytest.approx(stats[0]["unigram_entropy_nats"] / math.log(2))


def test_entropy_of_known_distributions() -> None:
    assert unigram_entropy(Counter(range(256))) == pytest.approx(math.log(256))
    assert unigram_entropy(Counter({1: 3})) == 0


def test_corpus_needs_sources(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "left_out.py").write_text("pass\n")
    with pytest.raises(ValueError, match="no source files"):
        write_corpus(tmp_path / "out.jsonl", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["tests"]
