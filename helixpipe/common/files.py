"""Output files that appear whole or not at all, and that are tried before work begins."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from helixpipe.common.errors import UserError

_PROBE = bytes(4096)  # what is written to see whether there is room: a block of most file systems


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Yield a temporary file beside `path`, renamed to it when the block ends and removed when the block fails.

    It is created under a random name (`new_file`). A device or pipe (`/dev/stdout`) is written in place: renaming would
    replace it. Raises UserError that names `path` and the reason.
    """
    path = Path(path)
    try:
        if _in_place(path):
            yield path
            return
        target = _target(path)
        temporary = new_file(target)
        try:
            yield temporary
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}.") from None


def new_file(target: Path, content: bytes = b"") -> Path:
    """Create a new file beside `target`, with a name that cannot be predicted; no link is followed.

    Raises OSError.
    """
    temporary = target.with_name(f".{target.name}.{os.urandom(8).hex()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            if content:
                os.fsync(descriptor)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def try_file(flag: str, path: str | Path) -> None:
    """Make sure now that `whole_file(path)` will work, as far as can be known, by writing beside it; nothing is left.

    Raises UserError that names the flag, the path and the reason.
    """
    path = Path(path)
    try:
        if _in_place(path):
            if not os.access(path, os.W_OK):
                raise PermissionError(13, "Permission denied")
        else:
            new_file(_target(path), _PROBE).unlink()
    except OSError as error:
        raise UserError(f"{flag}: cannot write {path}: {error.strerror or error}.") from None


def try_folder(flag: str, path: str | Path) -> None:
    """Make sure now that files can be written into a folder, which is made where it is missing; nothing is left.

    Raises UserError that names the flag, the path and the reason.
    """
    folder = Path(os.path.realpath(path))
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        new_file(folder / "probe", _PROBE).unlink()
    except OSError as error:
        reason = "it is a file" if folder.is_file() else error.strerror or error
        raise UserError(f"{flag}: cannot write into the folder {path}: {reason}.") from None
    finally:
        for each in missing:
            with suppress(OSError):  # another process may have put something there
                each.rmdir()


def _in_place(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


def _target(path: Path) -> Path:
    """Return the file itself if `path` is a link to it: a link stays a link."""
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(21, "it is a directory")
    return target
