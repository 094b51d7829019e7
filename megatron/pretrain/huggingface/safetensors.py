"""Tensors in safetensors files: read through a memory map, written one after the other. No code can be in them.

A file is the length of its header (8 bytes, little-endian), the header (JSON: name -> type, shape, first and last
byte), and the bytes of the tensors, side by side. What is written here is, byte for byte, what the `safetensors`
package writes: larger types first, by name within a type, the header filled up with spaces to a multiple of 8.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from helixpipe.common.errors import CheckpointError
from helixpipe.common.files import whole_file
from helixpipe.common.json_values import parse_json

_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
)
"""Types of weights, in the order in which they lie in a file."""
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_METADATA = "__metadata__"
_LONGEST_HEADER = 100_000_000


class Entry(NamedTuple):
    """A tensor of a file. begin: its first byte behind the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFile:
    """A safetensors file. Raises CheckpointError, one sentence, for one that is cut off or is none."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self._size = path.stat().st_size
            with path.open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                if self._size < 8 or length > min(_LONGEST_HEADER, self._size - 8):
                    raise CheckpointError(f"{path} is truncated, or no safetensors file ({self._size} bytes).")
                header = parse_json(stream.read(length))
            self._first = 8 + length
            self.entries = {name: _entry(about) for name, about in header.items() if name != _METADATA}
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from None
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            if isinstance(error, CheckpointError):
                raise CheckpointError(f"{path}: {error}" if str(path) not in str(error) else str(error)) from None
            raise CheckpointError(f"{path} is corrupt, or no safetensors file.") from None
        end = self._first + max((each.begin + each.nbytes for each in self.entries.values()), default=0)
        if end != self._size:
            what = "is truncated" if self._size < end else "has more bytes than its tensors"
            raise CheckpointError(f"{path} {what} ({self._size} of {end} bytes).")
        self._bytes: Tensor | None = None

    def read(self, name: str) -> Tensor:
        """A tensor whose memory is the file's; it must not be written."""
        if self._bytes is None:
            self._bytes = torch.from_file(str(self.path), shared=False, size=self._size, dtype=torch.uint8)
        dtype, shape, begin = entry = self.entries[name]
        if not entry.nbytes:
            return torch.empty(shape, dtype=dtype)
        part = self._bytes[self._first + begin :][: entry.nbytes]
        if part.storage_offset() % dtype.itemsize:
            part = part.clone()
        return part.view(dtype).view(shape)


def _entry(about: Mapping[str, Any]) -> Entry:
    """Raises ValueError, KeyError or TypeError for what describes no tensor."""
    code, shape, (begin, end) = about["dtype"], about["shape"], about["data_offsets"]
    if code not in _DTYPES:
        raise CheckpointError(f"tensors of type {code} are not read; valid are {', '.join(_DTYPES)}.")
    entry = Entry(_DTYPES[code], tuple(int(size) for size in shape), int(begin))
    if min((*entry.shape, entry.begin), default=0) < 0 or entry.begin + entry.nbytes != end:
        raise ValueError("bytes and shape differ")
    return entry


def write_tensors(
    path: Path,
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    read: Callable[[str], Tensor],
    done: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Write a file of these tensors, types and shapes by name, each asked for when its turn comes.

    done: told the bytes of each when it is written. Raises UserError where the file cannot be written.
    """
    order = _order(tensors)
    header: dict[str, object] = {_METADATA: {"format": "pt"}}
    begin = 0
    for name in order:
        dtype, shape = tensors[name]
        end = begin + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with whole_file(path) as temporary, temporary.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        for name in order:
            tensor = read(name).contiguous()
            assert (tensor.dtype, tuple(tensor.shape)) == tensors[name], name
            stream.write(tensor.flatten().view(torch.uint8).numpy().data)  # numpy's tofile is silent on a full disk
            done(tensor.nbytes)


def _order(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> Iterable[str]:
    # The package's order of types: wide ones first, and of equal width bfloat16 before float16.
    ranks = {dtype: rank for rank, dtype in enumerate(_DTYPES.values())}
    return sorted(tensors, key=lambda name: (ranks[tensors[name][0]], name))
