"""The .bin/.idx pair of Megatron's indexed datasets, checked before anything maps it into memory.

Layout of the .idx file (little-endian): magic ``MMIDIDX\\0\\0``, version (u64, 1), token type (u8), number of sequences
n (u64), number of document boundaries d (u64), n sequence lengths (i32), n byte offsets into the .bin (i64), d
boundaries (i64). megatron-core reads the same layout, but through asserts and unchecked memory maps, so that a
truncated file ends in a traceback in the middle of training. Here every defect is one sentence at launch.
"""

from __future__ import annotations

import hashlib
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
    """What the .idx file at `prefix` says, known to agree with the .bin file."""

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
        content = idx_path.read_bytes()
        bin_bytes = bin_path.stat().st_size
    except OSError as error:
        raise DataError(f"{idx_path} cannot be read: {error.strerror or error}") from error
    if content[: len(MAGIC)] != MAGIC:
        raise DataError(f"{idx_path} is not an index of Megatron's .bin/.idx format: it does not begin with MMIDIDX")
    if len(content) < _HEADER.size:
        raise DataError(f"{idx_path} is truncated: {len(content)} bytes are less than its header; preprocess it again")
    _, version, code, sequences, boundaries = _HEADER.unpack_from(content)
    if version != 1:
        raise DataError(f"{idx_path} has version {version}; only version 1 can be read")
    if code not in _TOKEN_TYPES:
        raise DataError(f"{idx_path} has token type {code}; valid are {sorted(_TOKEN_TYPES)} (integers)")
    expected = _HEADER.size + 12 * sequences + 8 * boundaries
    if len(content) < expected:
        raise DataError(f"{idx_path} is truncated: {len(content)} bytes of {expected}; preprocess it again")
    if len(content) > expected:
        raise DataError(f"{idx_path} has {len(content)} bytes instead of {expected}; multimodal data is not supported")
    if sequences == 0:
        raise DataError(f"{idx_path} holds no documents")

    lengths = numpy.frombuffer(content, numpy.int32, sequences, _HEADER.size)
    offsets = numpy.frombuffer(content, numpy.int64, sequences, _HEADER.size + 4 * sequences)
    ends = numpy.frombuffer(content, numpy.int64, boundaries, _HEADER.size + 12 * sequences)
    token_type = _TOKEN_TYPES[code]
    if lengths.min() < 0 or offsets.min() < 0 or boundaries == 0 or ends[-1] != sequences or _falls(ends):
        raise DataError(f"{idx_path} is corrupt: negative lengths or wrong document boundaries; preprocess it again")
    described = int((offsets + lengths.astype(numpy.int64) * numpy.dtype(token_type).itemsize).max())
    if bin_bytes < described:
        raise DataError(f"{bin_path} is truncated: {bin_bytes} bytes of the {described} that its .idx describes")
    if bin_bytes > described:
        raise DataError(f"{bin_path} has {bin_bytes} bytes but its .idx describes {described}: they are of two runs")
    if described == 0:
        raise DataError(f"{bin_path} holds no tokens")
    return IndexedFile(prefix, token_type, lengths, offsets, ends, hashlib.sha256(content).hexdigest())


def _falls(ends: numpy.ndarray) -> bool:
    return bool(ends[0] != 0 or (numpy.diff(ends) < 0).any())


def check_vocabulary(file: IndexedFile, vocab_size: int) -> None:
    """Raise DataError when the first tokens of the file do not fit a vocabulary of `vocab_size`.

    Looks at the first 4 Mi tokens only: another tokenizer's file shows itself there, and an embedding lookup out of
    range would otherwise fail deep inside the first step.
    """
    tokens = first_tokens(file)
    worst = int(tokens.min()) if tokens.min() < 0 else int(tokens.max())
    if not 0 <= worst < vocab_size:
        raise DataError(
            f"{file.prefix}.bin holds token {worst}, outside the tokenizer's vocabulary of {vocab_size}: "
            "use the --tokenizer-type it was preprocessed with"
        )


def first_tokens(file: IndexedFile) -> numpy.ndarray:
    """The first tokens of the file, at most 4 Mi."""
    return numpy.fromfile(file.prefix + ".bin", file.token_type, min(file.tokens, _TOKENS_LOOKED_AT))
