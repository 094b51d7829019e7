"""Files cut into slices at the ends of lines, to be read side by side."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass

from helixpipe.common.errors import DataError


@dataclass(frozen=True)
class FileSlice:
    """Bytes [begin, end) of one input file, both at line boundaries."""

    path: str
    begin: int
    end: int


def find_files(patterns: Sequence[str]) -> list[str]:
    """Return the files that the patterns name, each once, sorted within a pattern. Raises DataError when one names
    none.
    """
    paths: list[str] = []
    for pattern in patterns:
        matches = [pattern] if os.path.isfile(pattern) else sorted(filter(os.path.isfile, glob.glob(pattern)))
        if not matches:
            raise DataError(f"--input {pattern} does not name any file")
        paths += [path for path in matches if path not in paths]
    return paths


def cut(paths: Sequence[str], count: int) -> list[FileSlice]:
    """Cut the files into about `count` slices of similar size, at line boundaries, in order."""
    sizes = [os.path.getsize(path) for path in paths]
    step = max(1, -(-sum(sizes) // count))
    slices = []
    for path, size in zip(paths, sizes, strict=True):
        begin = 0
        with open(path, "rb") as stream:
            while begin < size:
                stream.seek(min(begin + step, size) - 1)
                stream.readline()  # to the end of the line that the boundary falls into
                slices.append(FileSlice(path, begin, stream.tell()))
                begin = stream.tell()
    return slices


def line_number(part: FileSlice, position: int) -> int:
    """Number, from 1, of the line of the file that begins at byte `position`. Only for messages: it reads the file."""
    lines, left = 1, position
    with open(part.path, "rb") as stream:
        while block := stream.read(min(left, 1 << 20)):
            lines += block.count(b"\n")
            left -= len(block)
    return lines
