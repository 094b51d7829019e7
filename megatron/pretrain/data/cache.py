"""Folders of what is made once of the data, on one rank, and then read by all: complete, or not there."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from helixpipe.common.errors import DataError


def made_once(final: Path, make: Callable[[str], object]) -> None:
    """Have the folder, if it is not there: made in a temporary one beside it, which is renamed when it is complete.

    make: fills the folder it is given. Where several jobs make the same, the first one's stays. Raises DataError where
    it cannot be written.
    """
    if final.is_dir():
        return
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.mkdtemp(prefix=".", dir=final.parent)
    except OSError as error:
        raise DataError(f"{final.parent} cannot be written: {error.strerror}; set --data-cache-path") from error
    try:
        make(temporary)
        os.chmod(temporary, 0o755)  # mkdtemp's folders are private; other ranks may run as other users
        os.rename(temporary, final)
    except OSError as error:
        if not final.is_dir():  # else another job made the same meanwhile
            raise DataError(f"{final} cannot be written: {error.strerror or error}; set --data-cache-path") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def file_digest(path: str | Path) -> str:
    """Return the digest of a file's content. Raises OSError."""
    sha = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(1 << 22):
            sha.update(block)
    return sha.hexdigest()
