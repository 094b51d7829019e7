"""Python for browsers: one pinned release of Pyodide's npm package, fetched once with npm, checked and kept."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
from base64 import b64encode
from pathlib import Path

from helixpipe.common.errors import UserError

VERSION = "314.0.7"
INTEGRITY = "sha512-0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A=="
"""Of the package, as npm states it."""

FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
"""Those that a page loads."""

TIMEOUT = 300.0
"""Seconds for a package of 6 MB."""


def cached() -> Path:
    """Return the folder in which the files are kept."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "helixpipe" / f"pyodide-{VERSION}"


def pyodide_files(package: str | None = None) -> Path:
    """Return a folder with `FILES`, fetching them where they are not kept yet. package: the npm package as a file, in
    place of what npm fetches. Raises UserError where it cannot be had or is another one."""
    folder = cached()
    if all((folder / name).is_file() for name in FILES):
        return folder
    with tempfile.TemporaryDirectory() as temporary:
        _unpack(Path(package) if package is not None else _fetched(Path(temporary)), folder)
    return folder


def _fetched(folder: Path) -> Path:
    """Return the package, fetched by npm from whatever registry it is set up for."""
    npm = shutil.which("npm")
    if npm is None:
        raise UserError(
            f"the playground needs npm once, to fetch pyodide {VERSION}; or give its package: --pyodide FILE.tgz."
        )
    command = [npm, "pack", "--silent", f"pyodide@{VERSION}"]
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.SubprocessError as error:
        said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        raise UserError(f"npm could not fetch pyodide {VERSION} ({said[-1] if said else 'no reason given'}).") from None
    return folder / f"pyodide-{VERSION}.tgz"


def _unpack(package: Path, folder: Path) -> None:
    """Put the files into the folder, all or none."""
    try:
        content = package.read_bytes()
    except OSError as error:
        raise UserError(f"--pyodide {package} cannot be read: {error.strerror}.") from None
    if "sha512-" + b64encode(hashlib.sha512(content).digest()).decode() != INTEGRITY:
        raise UserError(f"{package.name} is not the package of pyodide {VERSION}, or is damaged.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary, tarfile.open(package) as archive:
        for name in FILES:
            member = archive.extractfile(f"package/{name}")
            assert member is not None  # the package is the one that was looked at
            (Path(temporary) / name).write_bytes(member.read())
        shutil.copytree(temporary, folder, dirs_exist_ok=True)


if __name__ == "__main__":
    pyodide_files()
