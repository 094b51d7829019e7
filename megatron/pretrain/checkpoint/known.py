"""Reading checkpoints without running code in them: only the classes that checkpoints are made of are unpickled.

A pickle may name any function of any module, and have it called when it is loaded. There are three places with pickles
in megatron-core's torch_dist format, and megatron-core and torch.distributed.checkpoint load the first two as they are:

.metadata            a plain pickle of torch's `Metadata`: `_KNOWN` are its classes, whatever else is refused by name
shards, objects      torch.save: read by torch's `weights_only` unpickler, with `_OBJECTS` beside what that knows
shards, tensors      the same, as torch itself does
common.pt            the same; megatron-core's own writer has it as one of the objects since 0.19, named `folder.COMMON`
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    TorchDistLoadShardedStrategy,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from megatron.core.safe_globals import SAFE_GLOBALS
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load_state_dict

from helixpipe.common.errors import CheckpointError
from megatron.pretrain.checkpoint.folder import COMMON, MalformedError
from megatron.pretrain.checkpoint.plain_values import checked

_KNOWN: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "torch.distributed.checkpoint.metadata": frozenset(
            {
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            }
        ),
        "torch.distributed.checkpoint.planner": frozenset(
            {"BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"}
        ),
        "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo", "_StoragePrefix"}),
        "torch": frozenset({"Size"}),  # and the names of data types
        "torch.serialization": frozenset({"_get_layout"}),
        "collections": frozenset({"OrderedDict"}),
        "pathlib": frozenset({"PosixPath", "PurePosixPath"}),
        "pathlib._local": frozenset({"PosixPath", "PurePosixPath"}),  # Python 3.13
        "builtins": frozenset({"set", "frozenset"}),
    }
)
"""Module -> what of it `.metadata` may name."""

_OBJECTS: tuple[Any, ...] = (*SAFE_GLOBALS, (SAFE_GLOBALS[2], "numpy.core.multiarray._reconstruct"))
"""The types that objects may consist of, beside tensors and plain values: megatron-core's own list, with the name that
the function which rebuilds arrays has in files of numpy 1.
"""

_ENUMS = "megatron.core.transformer.enums."
"""Module of megatron-core's enumerations: newer releases save members of some that the installed one does not have."""

_REFUSED = re.compile(r"GLOBAL (\S+) (?:was not an allowed global|whose module)")
_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


class UntrustedError(CheckpointError):
    """A checkpoint names what no checkpoint needs: loading it could run code."""

    @classmethod
    def of(cls, path: Path | str, name: str) -> UntrustedError:
        return cls(
            f"{path} is not loaded: it asks for {name}, which is not part of a checkpoint, and loading it could run "
            "code of whoever wrote the file; --trust-checkpoint loads it all the same."
        )


class _Unknown(Exception):
    """A pickle names something that is not in the table."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _KNOWN.get(module, ()) or (module == "torch" and isinstance(getattr(torch, name, 0), torch.dtype)):
            return super().find_class(module, name)
        raise _Unknown(f"{module}.{name}")


class _Reader(FileSystemReader):
    """torch's reader, with an index that is read once and knows its classes."""

    def __init__(self, folder: Path | str) -> None:
        super().__init__(folder)
        self._index = read_index(Path(folder))

    def read_metadata(self, *_: Any, **__: Any) -> Any:
        return self._index


class _KnownTypesPlanner(MCoreLoadPlanner):
    """megatron-core's planner, with objects that are made of what is known."""

    folder: Path

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        loaded = load_objects(value, f"{self.folder}: {name}")
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded


class _KnownTypesLoading(TorchDistLoadShardedStrategy):
    """megatron-core's way to read shards, with that reader and that planner."""

    def load(self, sharded_state_dict: Any, checkpoint_dir: Path, *options: Any) -> Any:
        tensors = [each for each in nested_values(sharded_state_dict) if isinstance(each, ShardedTensor)]
        by_key, flat, renamed = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        wanted = mcore_to_pyt_state_dict(by_key, True)
        planner = _KnownTypesPlanner(
            shapes_validation_sharded_tensors=[each for each in tensors if not each.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={each.key: each for each in tensors if each.allow_shape_mismatch},
        )
        planner.folder, reader = checkpoint_dir, _Reader(checkpoint_dir)
        try:
            load_state_dict(wanted, reader, planner=planner)
        except CheckpointException as error:
            for failure, _ in error.failures.values():
                _refuse(failure, checkpoint_dir)
            raise
        self.cached_global_metadata = reader.read_metadata()
        loaded = {key: _unwrap_pyt_sharded_tensor(value) for key, value in wanted.items()}
        result = _replace_sharded_keys_with_state_dict_keys(loaded, flat, renamed)
        _restore_dict_types(result, sharded_state_dict)
        return result

    def load_tensors_metadata(self, checkpoint_dir: Path, metadata: Any = None) -> Any:
        return super().load_tensors_metadata(checkpoint_dir, metadata or read_index(Path(checkpoint_dir)))

    def load_sharded_metadata(self, checkpoint_dir: Path) -> Any:
        index = read_index(Path(checkpoint_dir))
        tensors = self.load_tensors_metadata(checkpoint_dir, index)
        objects = (
            ShardedObject.empty_from_unique_key(key) for key in index.state_dict_metadata.keys() - tensors.keys()
        )
        return {**{each.unique_key: each for each in objects}, **tensors}


def strategy(trusted: bool) -> Any:
    """Return the strategy that reads a folder's shards. trusted: megatron-core's, which executes pickled code."""
    return TorchDistLoadShardedStrategy() if trusted else _KnownTypesLoading()


def read_index(folder: Path, trusted: bool = False) -> Any:
    """Return the torch `Metadata` of a folder: names, shapes and places of its tensors.

    Raises UntrustedError for classes that are not known, MalformedError for what is no index, OSError.
    """
    path = folder / ".metadata"
    try:
        if trusted:
            return FileSystemReader(folder).read_metadata()
        index = _Unpickler(io.BytesIO(path.read_bytes())).load()
        if type(index).__name__ != "Metadata":
            raise MalformedError(".metadata is corrupt")
    except OSError:
        raise
    except _Unknown as error:
        if _NAME.fullmatch(str(error)):
            raise UntrustedError.of(path, str(error)) from None
        raise MalformedError(".metadata is corrupt") from None  # garbage that happens to name something
    except Exception:  # unpickling garbage may raise anything
        raise MalformedError(".metadata is corrupt") from None
    return index


def load_common(folder: Path, trusted: bool = False) -> dict[str, Any]:
    """Return the plain values of a checkpoint. Raises UntrustedError for classes that are not known, MalformedError for
    values of other types, and anything for what is no such file.
    """
    path = folder / "common.pt"
    if not path.exists():
        return checked(_common_object(folder, trusted))
    return checked(torch.load(path, map_location="cpu", weights_only=False) if trusted else load_objects(path, path))


def _common_object(folder: Path, trusted: bool) -> Any:
    """Return the plain values where they are among the shards; FileNotFoundError, of common.pt, where they are not."""
    name = ShardedObject(COMMON, None, (1,), (0,)).unique_key
    if name not in read_index(folder, trusted).state_dict_metadata:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder / "common.pt"))
    wanted: dict[str, Any] = {name: io.BytesIO()}
    if trusted:
        load_state_dict(wanted, FileSystemReader(folder), no_dist=True)
    else:
        planner = _KnownTypesPlanner()
        planner.folder = folder
        load_state_dict(wanted, _Reader(folder), planner=planner, no_dist=True)
    return wanted[name][0]


def load_objects(source: Path | io.BytesIO, where: Path | str) -> Any:
    """Load what torch.save wrote if it consists of tensors, plain values and `_OBJECTS`. Raises UntrustedError, which
    names `where`, for anything else.
    """
    there = torch.serialization.get_safe_globals()  # what is added would be taken away from who had added it before
    known = [each for each in _OBJECTS if each not in there]
    while True:
        try:
            with torch.serialization.safe_globals(known):
                return torch.load(source, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            match = _REFUSED.search(str(error))
            enumeration = (_value, match[1]) if match and match[1].startswith(_ENUMS) else None
            if enumeration is None or enumeration in known:
                _refuse(error, where)
                raise
            known.append(enumeration)
            if isinstance(source, io.BytesIO):
                source.seek(0)


def _value(value: Any) -> Any:
    """Return the value of a member of an enumeration, in its place."""
    return value


def _refuse(error: BaseException, where: Path | str) -> None:
    """Raise UntrustedError where an error of loading is about a name that torch does not allow."""
    if isinstance(error, UntrustedError):
        raise UntrustedError(str(error)) from None
    match = _REFUSED.search(str(error))
    if match and _NAME.fullmatch(match[1]):
        raise UntrustedError.of(where, match[1]) from None
