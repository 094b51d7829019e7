"""Turn text into Megatron's .bin/.idx pair.

    python tools/preprocess_data.py --input data/stdlib.jsonl --output-prefix data/stdlib \
        --tokenizer-type ByteLevelTokenizer --append-eod --workers 2

The input is JSON lines: one document a line, its text under `--json-keys`. For each key `PREFIX_KEY_document.bin` and
`.idx` are written. The input is cut into slices at line boundaries; processes tokenize them and the slices are joined
in the input's order, so the result does not depend on `--workers` or `--partitions`. Everything is written in a
temporary folder beside the output and renamed at the end, the .idx last: where an .idx is, the pair is complete.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere, installed or not

from helixpipe.common.command import run_command, sentence_of
from helixpipe.common.errors import DataError, UserError
from helixpipe.common.flags import FlagParser
from helixpipe.common.output import complain
from megatron.pretrain.data.conversations import json_object, token_ids
from tools.slices import FileSlice, cut, find_files, line_number

_REPORT_AFTER = 100  # documents a worker does between two words to the parent
_SENTENCES = "sentences are for BERT-style models, and only GPT data is made here"


@dataclass(frozen=True)
class TokenizationOptions:
    """Options that all processes of the tokenization share."""

    keys: tuple[str, ...]
    tokenizer: dict[str, Any]
    """Arguments of `build_tokenizer`."""
    append_eod: bool


class ProcessedCounts(NamedTuple):
    """Counts since the last report: documents read, their bytes, texts left out because they have no tokens."""

    documents: int
    bytes: int
    empty: int


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = FlagParser(description="Tokenize JSON lines into Megatron's .bin/.idx files.")
    add = parser.add_argument
    group = parser.add_argument_group("input data")
    group.add_argument(
        "--input", nargs="+", required=True, metavar="FILE", help="JSON lines files, or patterns of them"
    )
    group.add_argument("--json-keys", nargs="+", default=["text"], help="keys whose text is taken (default: text)")
    group.add_argument("--split-sentences", action="store_true", help=f"refused: {_SENTENCES}")
    group.add_argument("--keep-newlines", action="store_true", help="accepted without effect: newlines are always kept")
    group = parser.add_argument_group("tokenizer")
    group.add_argument("--tokenizer-type", required=True, help="such as ByteLevelTokenizer or HuggingFaceTokenizer")
    group.add_argument("--tokenizer-model", help="file or folder of the tokenizer's model")
    group.add_argument("--vocab-file", help="vocabulary of GPT2BPETokenizer")
    group.add_argument("--merge-file", help="merges of GPT2BPETokenizer")
    group.add_argument("--vocab-size", type=int, help="size of the vocabulary of NullTokenizer or ByteLevelTokenizer")
    group.add_argument("--append-eod", action="store_true", help="put an end-of-document token after each document")
    group = parser.add_argument_group("output data")
    group.add_argument("--output-prefix", required=True, help="beginning of the path of the files to write")
    add("--workers", type=int, default=1, help="processes that tokenize (default: 1)")
    add("--partitions", type=int, default=1, help="cut the input into at least this many slices (default: 1)")
    add("--log-interval", type=int, default=1000, help="report after this many documents (default: 1000)")
    add("--keep-sequential-samples", action="store_true", help="accepted without effect: the order is always kept")
    return parser.parse_args(words)


# ------------------------------------------------------------------------------------------------------------ slices


# --------------------------------------------------------------------------------------------------------- tokenizing


def tokenize_slice(
    part: FileSlice, work: TokenizationOptions, tokenizer: Any, folder: str, number: int
) -> Iterator[ProcessedCounts]:
    """Write the slice's documents as `folder`/`number`_KEY.bin/.idx for each key, saying now and then how far it is."""
    dtype, builder_class = _indexed_dataset(tokenizer.vocab_size)
    eod = _end_of_document(tokenizer) if work.append_eod else []
    prefixes = {key: os.path.join(folder, f"{number}_{key}") for key in work.keys}
    builders = {key: builder_class(prefix + ".bin", dtype=dtype) for key, prefix in prefixes.items()}
    documents = byte_count = empty = 0
    with ExitStack() as files:
        for builder in builders.values():
            files.enter_context(closing(builder.data_file))
        stream = files.enter_context(open(part.path, "rb"))
        stream.seek(part.begin)
        while stream.tell() < part.end:
            position = stream.tell()
            line = stream.readline()
            if not line.strip():
                continue
            try:
                for key, text in _texts(line, work.keys):
                    ids = token_ids(tokenizer, text)
                    empty += not ids
                    if ids:  # a document without tokens has no place in an index of tokens
                        builders[key].add_document(ids + eod, [len(ids) + len(eod)])
            except DataError as error:
                raise DataError(f"{part.path}, line {line_number(part, position)}: {error}") from error
            documents += 1
            byte_count += len(line)
            if documents == _REPORT_AFTER:
                yield ProcessedCounts(documents, byte_count, empty)
                documents = byte_count = empty = 0
    for key, builder in builders.items():
        builder.finalize(prefixes[key] + ".idx")
    yield ProcessedCounts(documents, byte_count, empty)


def _texts(line: bytes, keys: Sequence[str]) -> list[tuple[str, str]]:
    record = json_object(line)
    for key in keys:
        if key not in record:
            raise DataError(f"no key {key!r}; there are {', '.join(map(repr, record)) or 'none'} (--json-keys)")
        if not isinstance(record[key], str):
            raise DataError(f"the value of {key!r} is {type(record[key]).__name__}, not text")
    return [(key, record[key]) for key in keys]


def _build_tokenizer(work: TokenizationOptions) -> Any:
    from megatron.pretrain.data.tokenizer import build_tokenizer

    return build_tokenizer(**work.tokenizer)


def _end_of_document(tokenizer: Any) -> list[int]:
    try:
        eod = tokenizer.eod
    except (AttributeError, NotImplementedError):
        eod = None
    if not isinstance(eod, int) or eod < 0:
        raise UserError("--append-eod needs a tokenizer with an end-of-document or end-of-sentence token")
    return [eod]


def _indexed_dataset(vocab_size: int | None) -> tuple[Any, Any]:
    """Return the smallest token type for the vocabulary, and megatron-core's builder."""
    with warnings.catch_warnings():  # about optional GPU packages
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    return DType.optimal_dtype(vocab_size), IndexedDatasetBuilder


# ------------------------------------------------------------------------------------------------------- all together


def preprocess(arguments: argparse.Namespace) -> dict[str, Path]:
    """Do what the flags say; return the prefix written for each key. Raises UserError, leaving nothing behind."""
    if arguments.split_sentences:
        raise UserError(f"--split-sentences is not supported: {_SENTENCES}")
    for flag in ("workers", "partitions", "log_interval"):
        if getattr(arguments, flag) < 1:
            raise UserError(f"--{flag.replace('_', '-')} {getattr(arguments, flag)} must be at least 1")
    for key in arguments.json_keys:
        if "/" in key:
            raise UserError(f"--json-keys {key!r} cannot become part of a file name")
    names = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "vocab_size")
    work = TokenizationOptions(
        tuple(dict.fromkeys(arguments.json_keys)),
        {name: getattr(arguments, name) for name in names},
        arguments.append_eod,
    )
    tokenizer = _build_tokenizer(work)  # so that its errors are found before any process starts
    if work.append_eod:
        _end_of_document(tokenizer)
    slices = cut(find_files(arguments.input), max(arguments.workers, arguments.partitions))

    prefix = Path(arguments.output_prefix)
    outputs = {key: prefix.with_name(f"{prefix.name}_{key}_document") for key in work.keys}
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(prefix=f".{prefix.name}.", dir=prefix.parent)
    except OSError as error:
        raise DataError(f"--output-prefix {prefix} cannot be written: {error.strerror or error}") from error
    try:
        _tokenize(slices, work, folder, arguments.workers, arguments.log_interval)
        for key, output in outputs.items():
            _join(folder, key, len(slices), tokenizer.vocab_size)
            output.with_name(output.name + ".idx").unlink(missing_ok=True)  # of an earlier run: never beside a new .bin
            for suffix in (".bin", ".idx"):
                os.replace(os.path.join(folder, key + suffix), output.with_name(output.name + suffix))
    except OSError as error:
        raise DataError(f"--output-prefix {prefix} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return outputs


def _tokenize(
    slices: Sequence[FileSlice], work: TokenizationOptions, folder: str, workers: int, log_interval: int
) -> None:
    """Tokenize the slices in `workers` processes. Whatever ends this function, no process outlives it."""
    numbered = list(enumerate(slices))
    processes, pipes = [], []
    try:
        for share in (numbered[i::workers] for i in range(min(workers, len(numbered)))):
            receiving, sending = multiprocessing.Pipe(duplex=False)
            process = multiprocessing.Process(target=_worker, args=(share, work, folder, sending), daemon=True)
            process.start()
            sending.close()  # before the next process starts and inherits it: a worker's death then ends its pipe
            processes.append(process)
            pipes.append(receiving)
        _follow(pipes, log_interval)
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _worker(share: Sequence[tuple[int, FileSlice]], work: TokenizationOptions, folder: str, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers, with SIGTERM
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    try:
        tokenizer = _build_tokenizer(work)
        for number, part in share:
            for progress in tokenize_slice(part, work, tokenizer, folder, number):
                if parent is not None and not parent.is_alive():  # killed, and nobody will join the slices
                    return
                pipe.send(progress)
        pipe.send(None)
    except (UserError, OSError, MemoryError) as error:
        pipe.send(sentence_of(error) or str(error))


def _follow(pipes: list[Connection], log_interval: int) -> None:
    """Report progress until every worker has sent None. Raises DataError when one sends a sentence, or dies."""
    began = time.monotonic()
    total, reported = ProcessedCounts(0, 0, 0), 0
    while pipes:
        for pipe in wait(pipes):
            assert isinstance(pipe, Connection)
            try:
                message = pipe.recv()
            except EOFError:
                raise DataError("a worker process died (out of memory?): try fewer --workers") from None
            if isinstance(message, str):
                raise DataError(message)
            if message is None:
                pipes.remove(pipe)
                continue
            total = ProcessedCounts(*(a + b for a, b in zip(total, message, strict=True)))
        if total.documents - reported >= (log_interval if pipes else 1):
            reported = total.documents
            seconds = max(time.monotonic() - began, 1e-9)
            rates = f"{total.documents / seconds:.1f} docs/s, {total.bytes / seconds / 1e6:.2f} MB/s"
            complain(f"Processed {total.documents} documents ({rates}).")
    if total.empty:
        complain(f"Left out {total.empty} texts without tokens.")


def _join(folder: str, key: str, count: int, vocab_size: int | None) -> None:
    """Join the slices' files, in order, into `folder`/KEY.bin/.idx."""
    dtype, builder_class = _indexed_dataset(vocab_size)
    joined = os.path.join(folder, key)
    builder = builder_class(joined + ".bin", dtype=dtype)
    with closing(builder.data_file):
        for number in range(count):
            part = os.path.join(folder, f"{number}_{key}")
            builder.add_index(part)
            os.unlink(part + ".bin")
        if not builder.sequence_lengths:
            raise DataError(f"the input holds no text under {key!r}: nothing to write")
        builder.finalize(joined + ".idx")


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up as after Ctrl-C
    return run_command("preprocess_data.py", _run)


def _run() -> int:
    try:
        outputs = preprocess(parse_arguments())
    except KeyboardInterrupt:
        complain("preprocess_data.py: interrupted; nothing was written.")
        raise
    for output in outputs.values():
        print(f"Wrote {output}.bin ({os.path.getsize(f'{output}.bin')} bytes) and {output}.idx")
    return 0


if __name__ == "__main__":
    sys.exit(main())
