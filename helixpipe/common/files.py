"""Output files that appear whole or not at all. No torch here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from helixpipe.common.errors import UserError


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """A temporary path beside `path`, renamed to it when the block ends and removed when the block fails.

    A device or pipe (`/dev/stdout`) is written in place: renaming would replace it. Raises UserError that names `path`
    and the reason.
    """
    path = Path(path)
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            yield path
            return
        target = Path(os.path.realpath(path))  # a link stays a link
        if target.is_dir():
            raise IsADirectoryError(21, "it is a directory")
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            yield temporary
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}.") from None
