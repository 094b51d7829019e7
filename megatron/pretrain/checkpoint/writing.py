"""The files of one checkpoint as a rank writes them: planned by all ranks together, written by each alone, at once or
later from copies.

torch.distributed.checkpoint's planner and writer do the work; here the one is kept apart from the other, since planning
takes collectives and writing takes time. What is written is the same at once and later.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.futures import Future

from helixpipe.common.errors import CheckpointError
from megatron.pretrain.checkpoint import folder as folders
from megatron.pretrain.checkpoint.ranks import writing


class Written(NamedTuple):
    """The files a rank has written. places: torch's results for each item; files: entries of the manifest."""

    places: list[Any]
    files: dict[str, list[int]]


class _Stream:
    """A file whose failure is kept in `error`, without its traceback; nothing more is written then.

    An error that passes through torch's archives comes out as a complaint about their size. Its traceback has views of
    buffers (`BytesIO.getbuffer`), and when the garbage collector meets those CPython may crash.
    """

    def __init__(self, file: Any):
        self._file = file
        self.error: OSError | None = None

    def write(self, content: Any) -> int:
        self._try(lambda: self._file.write(content))
        return memoryview(content).nbytes

    def flush(self) -> None:
        self._try(self._file.flush)

    def tell(self) -> int:
        return 0 if self.error is not None else int(self._file.tell())

    def fileno(self) -> int:
        return int(self._file.fileno())

    def close(self) -> None:
        """Do nothing: the caller that opened the file closes it."""

    def _try(self, action: Callable[[], object]) -> None:
        if self.error is None:
            try:
                action()
            except OSError as error:
                self.error = OSError(error.errno, error.strerror)


class _Files(FileSystem):
    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as file:
            stream = _Stream(file)
            yield stream
            if stream.error is not None:
                raise stream.error


class _ShardWriter(FileSystemWriter):
    """torch's writer, which keeps what it is to write until it is asked to. One file a rank, synchronised."""

    def __init__(self, folder: Path | str):
        super().__init__(folder, thread_count=1, sync_files=True)
        self.fs = _Files()
        self._plan: Any = None
        self._source: Any = None
        self._index: Any = None

    def write_data(self, plan: Any, planner: Any) -> Future[list[Any]]:
        """Called once all ranks' plans are known."""
        self._plan, self._source = plan, planner
        nothing: Future[list[Any]] = Future()
        nothing.set_result([])
        return nothing

    def finish(self, metadata: Any, results: list[list[Any]]) -> None:
        """Called on rank 0 alone, then."""
        self._index = metadata

    def copy(self) -> None:
        """Have copies of all tensors, in the host's memory, instead of the tensors."""
        self._source = _Copies({item.index: _copied(self._source.resolve_data(item)) for item in self._plan.items})
        self.per_thread_copy_ahead = 0  # torch's way to read a device while it writes, from the thread's own device

    def write(self) -> list[Any]:
        return list(super().write_data(self._plan, self._source).value())

    def write_index(self, places: list[list[Any]]) -> None:
        super().finish(self._index, places)


class _Copies(NamedTuple):
    """The planner that `FileSystemWriter` takes the copied values from."""

    values: dict[Any, Any]

    def resolve_data(self, item: Any) -> Any:
        return self.values[item.index]


def _copied(value: torch.Tensor | io.BytesIO) -> torch.Tensor | io.BytesIO:
    if not isinstance(value, torch.Tensor):
        return value  # written when it was planned
    if not value.is_cuda:
        return value.detach().clone()
    return torch.empty_like(value, device="cpu", pin_memory=True).copy_(value.detach(), non_blocking=True)


class CheckpointFiles:
    """The files that one rank writes of a checkpoint. where: the flag and the folder it gives, for messages."""

    def __init__(self, folder: Path, shards: _ShardWriter, common: bytes):
        self._folder, self._shards, self._common = folder, shards, common

    def copy(self) -> None:
        """Copy the state, which may change from now on. Raises CheckpointError if there is no room."""
        try:
            self._shards.copy()
            if torch.cuda.is_available():
                torch.cuda.current_stream().synchronize()
        except (MemoryError, RuntimeError) as error:
            raise CheckpointError(
                f"--async-save: the host of rank {dist.get_rank()} has no memory for a copy of what the rank saves "
                f"({str(error).splitlines()[0][:200]}); leave it out."
            ) from error

    def write(self) -> Written:
        """Write this rank's files, on rank 0 also those with plain values. No collectives. Raises NotWrittenError."""
        names = []
        if dist.get_rank() == 0:
            names += ["common.pt", "metadata.json"]
            with writing(self._folder / "common.pt"):
                (self._folder / "common.pt").write_bytes(self._common)
                folders.sync_file(self._folder / "common.pt")
            with writing(self._folder / "metadata.json"):
                save_config(CheckpointingConfig("torch_dist", 1), str(self._folder))
                folders.sync_file(self._folder / "metadata.json")
        shard = f"__{dist.get_rank()}_0.distcp"
        with writing(self._folder / shard):
            places = self._shards.write()
            names += [path.name for path in self._folder.glob(f"__{dist.get_rank()}_*.distcp")]
            return Written(places, folders.describe_files(self._folder, names))

    def write_index(self, parts: list[Written]) -> dict[str, list[int]]:
        """Write the index of all ranks' shards on rank 0. Returns all entries of the manifest. Raises
        NotWrittenError.
        """
        with writing(self._folder / ".metadata"):
            self._shards.write_index([part.places for part in parts])
            files = folders.describe_files(self._folder, [".metadata"])
        return {name: entry for part in parts for name, entry in part.files.items()} | files


class PlannedSave:
    """megatron-core's tensors to torch_dist files that are planned, and not written: `files`.

    It has what megatron-core's wrappers ask of a strategy; their base class is gone since 0.19.
    """

    backend, version = "torch_dist", 1
    can_handle_sharded_objects = True

    def __init__(self) -> None:
        self._shards: _ShardWriter | None = None

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        self._shards = _ShardWriter(checkpoint_dir)
        save(
            mcore_to_pyt_state_dict(flat),
            storage_writer=self._shards,
            planner=MCoreSavePlanner(flatten_state_dict=False),
        )

    def files(self, folder: Path, common: dict[str, Any]) -> CheckpointFiles:
        """Return the planned files, with the plain values as they are now."""
        assert self._shards is not None
        content = io.BytesIO()
        if dist.get_rank() == 0:
            torch.save(common, content)
        return CheckpointFiles(folder, self._shards, content.getvalue())
