"""What may happen to the files of a checkpoint, and while they are written."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def truncate(name: str) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


def overwrite(name: str) -> Callable[[Path], None]:
    """Nonsense from a third of the file on."""

    def change(folder: Path) -> None:
        content = (folder / name).read_bytes()
        third = len(content) // 3
        (folder / name).write_bytes(content[:third] + bytes(b ^ 0x5A for b in content[third:]))

    return change


def all_of(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for each in changes:
            each(folder)

    return change


SHARD = "__1_0.distcp"
UNLISTED = remove("manifest.json")  # as a checkpoint of Megatron-LM
DAMAGES: dict[str, Callable[[Path], Any]] = {
    "shard missing": remove(SHARD),
    "shard truncated": truncate(SHARD),
    "shard corrupt": overwrite(SHARD),
    "index missing": remove(".metadata"),
    "index corrupt": overwrite(".metadata"),
    "common missing": remove("common.pt"),
    "common truncated": truncate("common.pt"),
    "format missing": remove("metadata.json"),
    "manifest corrupt": overwrite("manifest.json"),
    "folder missing": shutil.rmtree,
    "unlisted, shard missing": all_of(UNLISTED, remove(SHARD)),
    "unlisted, shard truncated": all_of(UNLISTED, truncate(SHARD)),
    "unlisted, shard corrupt": all_of(UNLISTED, overwrite(SHARD)),
    "unlisted, index corrupt": all_of(UNLISTED, overwrite(".metadata")),
    "unlisted, common corrupt": all_of(UNLISTED, overwrite("common.pt")),
    "unlisted, format corrupt": all_of(UNLISTED, overwrite("metadata.json")),
}
TRACKERS = {"set back": ("3", 3), "garbage": ("\x00\xff nonsense", 5), "empty": ("", 5), "missing": (None, 5)}
TRACKER = "latest_checkpointed_iteration.txt"


@contextlib.contextmanager
def small_files(limit: int | None) -> Iterator[None]:
    """No file of this process gets larger: what a full disk is to a writer, without one. Python ignores the signal."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft if limit is None else limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
