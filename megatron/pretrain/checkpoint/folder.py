"""A checkpoint directory on disk: names, the tracker file, integrity, and how a folder becomes visible. No collectives.

DIR/latest_checkpointed_iteration.txt   the newest checkpoint's iteration, or `release`; replaced atomically, last
DIR/iter_0000100/                       one checkpoint, always complete: it is renamed here when all ranks are done
    metadata.json common.pt .metadata __R_0.distcp   megatron-core's torch_dist format
    manifest.json                                    size and CRC-32 of every other file; Megatron-LM's have none
DIR/.iter_0000100.tmp-TOKEN/            being written by the job of that token; what it leaves when it is killed is
                                        removed at the first save of the job that takes over its lock
DIR/.lock                               held by the job that saves here (`lock.py`)
DIR/.iter_0000100.replaced/             the old one, for the instant in which a folder is replaced
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helixpipe.common.errors import CheckpointError
from helixpipe.common.files import new_file
from helixpipe.common.json_values import parse_json

TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
RELEASE = "release"
COMMON = "common_state"
"""The object that megatron-core's own writer keeps the plain values in since 0.19; until then, and here, common.pt."""
_FOLDER = re.compile(r"iter_(\d{7,})")
_REPLACED = re.compile(r"\.(iter_\d{7,})\.replaced")
_TEMPORARY = re.compile(r"\.(iter_\d{7,})\.tmp-([0-9a-f]+)")
_READ_BY_ALL = ("metadata.json", "common.pt", ".metadata")
"""The files of a checkpoint that every rank reads."""
_BLOCK = 1 << 22


def folder_name(iteration: int) -> str:
    """Return the name of an iteration's folder: `iter_0000100` for 100."""
    return f"iter_{iteration:07d}"


def iterations(directory: Path) -> list[int]:
    """Return the iterations that have a folder, newest first; [] if the directory does not exist."""
    matches = (_FOLDER.fullmatch(entry.name) for entry in _entries(directory) if entry.is_dir())
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def _entries(directory: Path) -> Iterator[Path]:
    return directory.iterdir() if directory.is_dir() else iter(())


# ------------------------------------------------------------------------------------------------------ what to load


@dataclass(frozen=True)
class Candidates:
    """Folders to try, best first, and what a person should know about the choice."""

    names: tuple[str, ...]
    notes: tuple[str, ...] = ()


def candidates(directory: Path, step: int | None = None) -> Candidates:
    """Return the folder the tracker names, then older ones. Without a readable tracker: all, newest first.

    A folder newer than the tracker is not used: someone set the tracker back, or the run was killed between the two,
    and repeats these iterations. step: consider this iteration alone (`--ckpt-step`).
    """
    restore_replaced(directory)
    present = iterations(directory)
    if step is not None:
        return Candidates((folder_name(step),))
    try:
        content = (directory / TRACKER).read_bytes().decode("ascii", "replace").strip()
    except FileNotFoundError:
        note = f"{directory / TRACKER} is missing: using the newest complete checkpoint"
        return Candidates(tuple(map(folder_name, present)), (note,) if present else ())
    except OSError as error:
        raise CheckpointError(f"{directory / TRACKER} cannot be read: {error.strerror}.") from None
    if content == RELEASE:
        return Candidates((RELEASE,))
    if not content.isdecimal():
        note = f"{directory / TRACKER} holds {content[:40]!r}, not a number: using the newest complete checkpoint"
        names = tuple(map(folder_name, present))
        if not names:
            raise CheckpointError(f"{note}, but there is none.")
        return Candidates(names, (note,))
    newest = int(content)
    return Candidates(tuple(folder_name(i) for i in [newest, *(i for i in present if i < newest)]))


# --------------------------------------------------------------------------------------------------------- integrity


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    crc = 0
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            crc = zlib.crc32(block, crc)
    return crc


def describe_files(folder: Path, names: list[str]) -> dict[str, list[int]]:
    """Name -> [bytes, CRC-32]: entries of a manifest."""
    return {name: [(folder / name).stat().st_size, checksum(folder / name)] for name in names}


def problem(folder: Path, read_index: Callable[[Path], Any], share: int = 0, shares: int = 1) -> str | None:
    """Return what is wrong with a checkpoint folder, or None if it can be loaded.

    The files that every rank reads are checked first, with checksums, before any of them is read. Of the shards, sizes
    and checksums (which means reading every byte) are checked for every `shares`-th file from number `share` on, so
    that the ranks divide them; with shares = 0, only sizes are checked. Folders without a manifest (written by
    Megatron-LM) have no checksums: sizes come from their index of shards.
    """
    if not folder.is_dir():
        return "the folder is missing"
    mine = slice(share, None, max(shares, 1))
    try:
        manifest = _read_manifest(folder)
        shards = sorted(manifest.keys() - set(_READ_BY_ALL))
        for name in (*(name for name in _READ_BY_ALL if name in manifest), *shards[mine]):
            if wrong := _wrong_size(folder / name, manifest[name][0], exactly=True):
                return wrong
            if (shares or name in _READ_BY_ALL) and checksum(folder / name) != manifest[name][1]:
                return f"{name} is corrupt (checksum)"
        if wrong := _wrong_structure(folder, read_index, manifest, mine):
            return wrong
    except OSError as error:
        return f"{Path(error.filename or folder).name} cannot be read ({error.strerror})"
    except MalformedError as error:
        return str(error)
    return None


def has_manifest(folder: Path) -> bool:
    return (folder / MANIFEST).exists()


class MalformedError(Exception):
    """A file of a checkpoint does not hold what it should."""


def _read_manifest(folder: Path) -> Mapping[str, list[int]]:
    path = folder / MANIFEST
    if not path.exists():
        return {}
    try:
        files = parse_json(path.read_bytes())["files"]
        manifest = {_plain(str(name)): [int(size), int(crc)] for name, (size, crc) in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise MalformedError(f"{MANIFEST} is corrupt") from None
    missing = [name for name in _READ_BY_ALL if name not in manifest]
    if missing:
        raise MalformedError(f"{MANIFEST} has no {missing[0]}")
    return manifest


def _plain(name: str) -> str:
    """Return the name of a file, after checking that it lies in the folder itself."""
    if name != Path(name).name:
        raise MalformedError(f"it names a file elsewhere, {name}")
    return name


def _wrong_structure(
    folder: Path, read_index: Callable[[Path], Any], manifest: Mapping[str, list[int]], mine: slice
) -> str | None:
    for name in ("metadata.json", ".metadata"):
        if wrong := _wrong_size(folder / name, 1, exactly=False):
            return wrong
    try:
        backend = parse_json((folder / "metadata.json").read_bytes())["sharded_backend"]
    except (ValueError, KeyError, TypeError):
        return "metadata.json is corrupt"
    if backend != "torch_dist":
        return f"its format is {backend}, not torch_dist"
    needed: dict[str, int] = {}
    index = read_index(folder)
    plain_values_inside = any(name.startswith(f"{COMMON}/") for name in index.state_dict_metadata)
    if not plain_values_inside and (wrong := _wrong_size(folder / "common.pt", 1, exactly=False)):
        return wrong
    for info in index.storage_data.values():
        end = info.offset + info.length
        name = _plain(info.relative_path)
        if manifest and name not in manifest:
            return f"{MANIFEST} has no {name}"
        needed[name] = max(end, needed.get(name, 0))
    for name in sorted(needed)[mine]:
        if wrong := _wrong_size(folder / name, needed[name], exactly=False):
            return wrong
    return None


def _wrong_size(path: Path, size: int, exactly: bool) -> str | None:
    try:
        actual = path.stat().st_size
    except FileNotFoundError:
        return f"{path.name} is missing"
    if actual < size:
        return f"{path.name} is truncated ({actual} of {size} bytes)" if actual else f"{path.name} is empty"
    return f"{path.name} is {actual} bytes long instead of {size}" if exactly and actual != size else None


# ------------------------------------------------------------------------------------------------- writing, one rank


def begin(directory: Path, iteration: int, owner: str, heir_of: Collection[str] = ()) -> Path:
    """Make an empty temporary folder for this iteration, and clear what this job left before, or those it is heir of.

    owner: a name for the job that no other has. What other jobs left may be what they still write.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for entry in list(_entries(directory)):
        match = _TEMPORARY.fullmatch(entry.name)
        if match and match[2] in (owner, *heir_of):
            shutil.rmtree(entry, ignore_errors=True)
    temporary = directory / f".{folder_name(iteration)}.tmp-{owner}"
    temporary.mkdir()
    return temporary


def publish(temporary: Path, files: Mapping[str, list[int]], iteration: int) -> Path:
    """Write the manifest and make the complete folder visible under its name, replacing one of that name."""
    folder = temporary.with_name(folder_name(iteration))
    _write(temporary / MANIFEST, json.dumps({"files": files}))
    _sync(temporary)
    replaced = _replaced(folder)
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        folder.rename(replaced)
    temporary.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    return folder


def restore_replaced(directory: Path) -> None:
    """Undo what a run killed in the middle of `publish` left: give a set-aside folder its name back if it is free."""
    for entry in list(_entries(directory)):
        match = _REPLACED.fullmatch(entry.name)
        if match and not (directory / match[1]).exists():
            with suppress(OSError):  # another process may have done it; a directory may be read-only
                entry.rename(directory / match[1])


def _replaced(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.replaced")


def write_tracker(directory: Path, iteration: int) -> None:
    """Point the tracker file at an iteration, atomically."""
    new_file(directory / TRACKER, str(iteration).encode()).replace(directory / TRACKER)
    _sync(directory)


def read_tracker(directory: Path) -> int | None:
    """Return the iteration the tracker names; None without a readable one."""
    try:
        content = (directory / TRACKER).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(content) if content.isdecimal() else None


def remove(folder: Path, owner: str) -> None:
    """Remove a checkpoint so that being killed half-way leaves nothing that looks like one."""
    if folder.exists():
        doomed = folder.with_name(f".{folder.name}.tmp-{owner}")
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def shown(path: Path) -> str:
    """Return a file by the name that its folder is to have, for messages."""
    match = _TEMPORARY.fullmatch(path.parent.name)
    return f"{match[1]}/{path.name}" if match else path.name


def sync_file(path: Path) -> None:
    """Force a file that is already written to permanent storage."""
    _sync(path)


def _write(path: Path, text: str) -> None:
    with path.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
