"""Tensors in safetensors files: read by the package, through a memory map; written one after the other.

A file is the length of its header (8 bytes, little-endian), the header (JSON: name -> type, shape, first and last
byte), and the bytes of the tensors, side by side. The package writes tensors that are all in memory at once; here each
is asked for when its turn comes. What is written is, byte for byte, what the package writes: larger types first, by
name within a type, the header filled up with spaces to a multiple of 8.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
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
    """A tensor of a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFile:
    """A safetensors file. Raises CheckpointError, one sentence, for one that is cut off or is none."""

    def __init__(self, path: Path):
        self.path = path
        try:
            path.open("rb").close()  # says why it cannot be read, in the system's words
            self._file = safe_open(path, framework="pt")
            names = self._file.keys()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from None
        except SafetensorError:
            raise CheckpointError(_damage(path)) from None
        slices = {name: self._file.get_slice(name) for name in names}
        codes = {each.get_dtype() for each in slices.values()} - _DTYPES.keys()
        if codes:
            raise CheckpointError(f"{path}: {_not_read(min(codes))}")
        self.entries = {
            name: Entry(_DTYPES[each.get_dtype()], tuple(each.get_shape())) for name, each in slices.items()
        }

    def read(self, name: str) -> Tensor:
        """Return a tensor that shares the file's memory; it must not be written."""
        tensor: Tensor = self._file.get_tensor(name)
        return tensor


def _damage(path: Path) -> str:
    """Return what is wrong with a file that safetensors refuses, whose error names neither the file nor its expected
    length.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(_LONGEST_HEADER, size - 8):
            return f"{path} is truncated, or no safetensors file ({size} bytes)."
        text = stream.read(length)
    try:
        tensors = [about for name, about in parse_json(text).items() if name != _METADATA]
        for about in tensors:
            if about["dtype"] not in _DTYPES:
                return f"{path}: {_not_read(about['dtype'])}"
        end = 8 + length + max((int(about["data_offsets"][1]) for about in tensors), default=0)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError):
        end = size
    if end == size:
        return f"{path} is corrupt, or no safetensors file."
    what = "is truncated" if size < end else "has more bytes than its tensors"
    return f"{path} {what} ({size} of {end} bytes)."


def _not_read(code: str) -> str:
    return f"tensors of type {code} are not read; valid are {', '.join(_DTYPES)}."


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
