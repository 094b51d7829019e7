"""Limits the size of a program read from a file: a few lines can ask for more pieces than a machine has memory for."""

from __future__ import annotations

from pathlib import Path

from helixpipe.common.errors import ProgramError

MAX_BYTES = 64 << 20
"""Of a file: the ops of `MAX_PARTS` with room to spare."""

MAX_PARTS = 2_000_000
"""Ops, pieces and slices of a whole file; planning a program of so many would not end."""

_BLOCK = 1 << 20


def read_program_file(path: Path) -> bytes:
    """The content of a file. Raises ProgramError for one that cannot be read, or is longer than a program may be."""
    content = bytearray()
    try:
        with path.open("rb") as file:  # its size may not be known: it may be a pipe
            while block := file.read(_BLOCK):
                content += block
                if len(content) > MAX_BYTES:
                    raise ProgramError(
                        f"{path.name} is longer than {MAX_BYTES >> 20} MiB, the most that a program file may have."
                    )
    except OSError as error:
        raise ProgramError(f"cannot read the schedule file {path}: {error.strerror or error}.") from None
    return bytes(content)


class Parts:
    """Counts the ops, pieces and slices that a file comes to."""

    def __init__(self, source: str):
        self._source = source
        self._left = MAX_PARTS

    def add(self, count: int) -> None:
        """Count what is about to be made. Raises ProgramError where the file has come to more than there may be."""
        self._left -= count
        if self._left < 0:
            raise ProgramError(
                f"{self._source} comes to more than {MAX_PARTS:,} ops, pieces and slices, the most that a program "
                "file may have."
            )
