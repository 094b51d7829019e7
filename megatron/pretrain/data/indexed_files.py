"""The .bin/.idx pair of Megatron's indexed datasets, checked before anything maps it into memory.

Layout of the .idx file (little-endian): magic ``MMIDIDX\\0\\0``, version (u64, 1), token type (u8), number of sequences
n (u64), number of document boundaries d (u64), n sequence lengths (i32), n byte offsets into the .bin (i64), d
boundaries (i64). megatron-core reads the same layout, but through asserts and unchecked memory maps, so that a
truncated file ends in a traceback in the middle of training. Here every defect is one sentence at launch.
"""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy

from helixpipe.common.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TOKEN_TYPES: dict[int, type[numpy.integer]] = {
    1: numpy.uint8,
    2: numpy.int8,
    3: numpy.int16,
    4: numpy.int32,
    5: numpy.int64,
    8: numpy.uint16,
}
_TOKENS_LOOKED_AT = 1 << 22  # enough to notice another tokenizer's file, read in milliseconds


@dataclass(frozen=True)
class IndexedFile:
    """The contents of the .idx file at `prefix`, checked against the .bin file."""

    prefix: str
    token_type: type[numpy.integer]
    sequence_lengths: numpy.ndarray
    """Tokens of each sequence, [sequences] int32; for GPT data a sequence is a document."""
    offsets: numpy.ndarray
    """First byte of each sequence in the .bin file, [sequences] int64."""
    document_ends: numpy.ndarray
    """First sequence of each document, and the number of sequences; [documents + 1] int64."""
    digest: str
    """SHA-256 of the .idx file: changes whenever an index built from it would."""

    @property
    def tokens(self) -> int:
        return int(self.sequence_lengths.sum(dtype=numpy.int64))


def read_indexed_file(prefix: str) -> IndexedFile:
    """Read and check `prefix`.idx against `prefix`.bin.

    Raises DataError, naming the file, when one is absent, unreadable, of another format, truncated, or of another run.
    """
    idx_path, bin_path = Path(prefix + ".idx"), Path(prefix + ".bin")
    if prefix.endswith((".jsonl", ".json")):
        raise DataError(f"{prefix} is text: preprocess it with tools/preprocess_data.py (--sft reads conversations)")
    for path in (idx_path, bin_path):
        if not path.is_file():
            if prefix.endswith((".bin", ".idx")):
                raise DataError(f"{path} does not exist: give the prefix {prefix[:-4]!r}, without .bin or .idx")
            raise DataError(
                f"{path} does not exist: a data path is the prefix of a .bin/.idx pair made by tools/preprocess_data.py"
            )
    try:
        with idx_path.open("rb") as file:
            code, sequences, boundaries = _counts(idx_path, file.read(_HEADER.size), os.fstat(file.fileno()).st_size)
            file.seek(0)
            content = file.read()
        bin_bytes = bin_path.stat().st_size
    except (OSError, MemoryError) as error:
        raise DataError(f"{idx_path} cannot be read: {getattr(error, 'strerror', None) or 'out of memory'}") from error
    lengths = numpy.frombuffer(content, numpy.int32, sequences, _HEADER.size)
    offsets = numpy.frombuffer(content, numpy.int64, sequences, _HEADER.size + 4 * sequences)
    ends = numpy.frombuffer(content, numpy.int64, boundaries, _HEADER.size + 12 * sequences)
    token_type = _TOKEN_TYPES[code]
    size = numpy.dtype(token_type).itemsize
    if lengths.min() < 0 or offsets.min() < 0 or boundaries == 0 or ends[-1] != sequences or _falls(ends):
        raise DataError(f"{idx_path} is corrupt: negative lengths or wrong document boundaries; preprocess it again")
    described = int(offsets.max())
    if described < 1 << 62:  # else its sum with a length may not be a number of 64 bits any more
        described = int((offsets + lengths.astype(numpy.int64) * size).max())
    if bin_bytes < described:
        raise DataError(f"{bin_path} is truncated: {bin_bytes} bytes of the {described} that its .idx describes")
    if bin_bytes > described:
        raise DataError(f"{bin_path} has {bin_bytes} bytes but its .idx describes {described}: they are of two runs")
    if described == 0:
        raise DataError(f"{bin_path} holds no tokens")
    if (told := int(lengths.sum(dtype=numpy.int64)) * size) > bin_bytes:
        raise DataError(
            f"{idx_path} is corrupt: its sequences are {told} bytes of the {bin_bytes} of {bin_path.name}, so they lie "
            "upon each other; preprocess it again"
        )
    return IndexedFile(prefix, token_type, lengths, offsets, ends, hashlib.sha256(content).hexdigest())


def _counts(path: Path, header: bytes, size: int) -> tuple[int, int, int]:
    """Code of the token type, sequences and boundaries that a header tells of, if the file is of that size."""
    if header[: len(MAGIC)] != MAGIC:
        raise DataError(f"{path} is not an index of Megatron's .bin/.idx format: it does not begin with MMIDIDX")
    if len(header) < _HEADER.size:
        raise DataError(f"{path} is truncated: {len(header)} bytes are less than its header; preprocess it again")
    _, version, code, sequences, boundaries = _HEADER.unpack(header)
    if version != 1:
        raise DataError(f"{path} has version {version}; only version 1 can be read")
    if code not in _TOKEN_TYPES:
        raise DataError(f"{path} has token type {code}; valid are {sorted(_TOKEN_TYPES)} (integers)")
    expected = _HEADER.size + 12 * sequences + 8 * boundaries
    if size < expected:
        raise DataError(f"{path} is truncated: {size} bytes of {expected}; preprocess it again")
    if size > expected:
        raise DataError(f"{path} has {size} bytes instead of {expected}; multimodal data is not supported")
    if sequences == 0:
        raise DataError(f"{path} holds no documents")
    return code, sequences, boundaries


def _falls(ends: numpy.ndarray) -> bool:
    """Whether boundaries do not start at 0 or decrease; they are compared because their difference may overflow 64
    bits.
    """
    return bool(ends[0] != 0 or (ends[1:] < ends[:-1]).any())


def check_vocabulary(file: IndexedFile, vocab_size: int) -> None:
    """Raise DataError when the first 4 Mi tokens of the file do not fit a vocabulary of `vocab_size`.

    Another tokenizer's file shows itself there. What follows is checked as it is read.
    """
    check_tokens(first_tokens(file), vocab_size, f"{file.prefix}.bin")


def check_tokens(tokens: numpy.ndarray, vocab_size: int, source: str) -> None:
    """Raise DataError for a token that a tokenizer does not have.

    Tensor-parallel embeddings and losses would take it for another rank's token and train in silence.

    Args:
        tokens: Token ids, of any shape.
        vocab_size: Tokens of the tokenizer.
        source: Name of the data in the message.
    """
    worst = int(tokens.min(initial=0)) or int(tokens.max(initial=0))
    if not 0 <= worst < vocab_size:
        raise DataError(
            f"{source} holds token {worst}, but the tokenizer has tokens 0 to {vocab_size - 1}: use the "
            "--tokenizer-type, and the --vocab-size if it takes one, that the data was preprocessed with"
        )


def first_tokens(file: IndexedFile) -> numpy.ndarray:
    """Return the first tokens of the file, at most 4 Mi."""
    return numpy.fromfile(file.prefix + ".bin", file.token_type, min(file.tokens, _TOKENS_LOOKED_AT))
