"""Documents of true lengths that every machine has: Python's standard library, a file a document, in bytes.

    python -m benchmarks documents --output runs/documents

Writes `PREFIX_text_document.bin/.idx` for --data-path with --variable-seq-lengths and ByteLevelTokenizer, and
`lengths.txt`, the tokens to train of each document, one a line, for `helixpipe simulate infinipipe --lengths`. Prints
how the documents are distributed: how many are no longer than so many tokens, and how much of the text is in them.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy

from benchmarks.report import Outcome
from helixpipe.common.flags import option
from megatron.pretrain.data.document_files import IndexedDocuments
from megatron.pretrain.data.indexed_files import read_indexed_file
from tools.preprocess_data import parse_arguments, preprocess
from tools.stdlib_corpus import write_corpus


@dataclass(frozen=True)
class Options:
    output: str = option("runs/documents", "The folder to write.", metavar="DIR")
    max_megabytes: float | None = option(None, "Stop before the text exceeds this many million bytes.", more_than=0)
    workers: int = option(1, "Processes that tokenize.", at_least=1)


def run(options: Options) -> Outcome:
    root = Path(sysconfig.get_path("stdlib"))
    prefix, lengths = build(Path(options.output), root, options.max_megabytes, options.workers)
    print(f"{prefix}: {len(lengths)} documents, {lengths.sum()} tokens, longest {lengths.max()}")
    print("\n".join(distribution(lengths)))
    return Outcome()


def build(folder: Path, root: Path, max_megabytes: float | None = None, workers: int = 1) -> tuple[Path, numpy.ndarray]:
    """Make the pair below `folder` of the .py files below `root`. Returns its prefix, and of each document the tokens
    to train: its bytes."""
    source = folder / "stdlib.jsonl"
    write_corpus(source, root, max_megabytes)
    words = ["--input", str(source), "--output-prefix", str(folder / "stdlib"), "--workers", str(workers)]
    prefix = preprocess(parse_arguments([*words, "--tokenizer-type", "ByteLevelTokenizer", "--append-eod"]))["text"]
    lengths = IndexedDocuments(read_indexed_file(str(prefix))).lengths - 1
    (folder / "lengths.txt").write_text("".join(f"{length}\n" for length in lengths))
    return prefix, lengths


def distribution(lengths: Sequence[int] | numpy.ndarray) -> list[str]:
    """A line for each power of two up to the longest: documents no longer than that, and their part of the tokens."""
    lengths = numpy.asarray(lengths)
    lines, limit = [], 1024
    while True:
        short = lengths <= limit
        of_tokens = lengths[short].sum() / lengths.sum()
        lines.append(f"{limit:>9} tokens or less: {short.mean():6.1%} of the documents, {of_tokens:6.1%} of the tokens")
        if short.all():
            return lines
        limit *= 2
