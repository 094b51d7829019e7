"""A checkpoint as a Hugging Face folder, tensor by tensor, read without running code that may be in it."""

from __future__ import annotations

import io
import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from helixpipe.common.errors import CheckpointError
from helixpipe.costs.huggingface.config import arguments_of, check_exportable, config_of, read_config
from helixpipe.model.latent import local_name
from megatron.pretrain.checkpoint import known
from megatron.pretrain.checkpoint.from_huggingface import KEPT, copy_files
from megatron.pretrain.checkpoint.options import missing
from megatron.pretrain.checkpoint.saved_arguments import newest_usable
from megatron.pretrain.huggingface.folder import INDEX, WEIGHTS, read_index
from megatron.pretrain.huggingface.safetensors import write_tensors
from megatron.pretrain.huggingface.weights import Shape, Weight, Weights

GIGABYTE = 10**9


class Checkpoint:
    """The newest usable checkpoint of a folder. trusted: names and arguments are read as megatron-core does, which runs
    what may be in them; weights never. Raises CheckpointError."""

    def __init__(self, load: Path, step: int | None = None, trusted: bool = False):
        newest = newest_usable(load, step, trusted)
        if newest is None:
            raise CheckpointError(missing(str(load), ""))
        self.path, self.arguments = newest
        index = known.read_index(self.path, trusted)
        self.tensors, self._places = index.state_dict_metadata, index.storage_data

    def nbytes(self, dtype: torch.dtype | None = None) -> int:
        """Return the bytes of the model's weights, without the optimizer, in `dtype` or each in its own type."""
        entries = [
            entry
            for key, entry in self.tensors.items()
            if isinstance(entry, TensorStorageMetadata) and not key.startswith("optimizer")
        ]
        return sum(entry.size.numel() * (dtype or entry.properties.dtype).itemsize for entry in entries)

    def read(self, weight: Weight) -> Tensor:
        """Read a whole weight: of a layer, or from the layers' numbered keys that other programs write."""
        weight = self.named(weight)
        key, lead = weight.place(numbered=weight.key not in self.tensors)
        if key not in self.tensors:
            raise CheckpointError(f"{self.path} holds no {key}, which the model of its arguments has.")
        entry, axes = self.tensors[key], len(lead)
        whole, filled = torch.empty(tuple(entry.size)[axes:], dtype=entry.properties.dtype), 0
        for place, info in self._places.items():
            if place.fqn != key:
                continue
            offset = tuple(place.offset or (0,) * len(entry.size))
            chunk = next(each for each in entry.chunks if tuple(each.offsets) == offset)
            if any(not first <= at < first + size for at, first, size in zip(lead, offset, chunk.sizes, strict=False)):
                continue
            part = self._part(info, key)[tuple(at - first for at, first in zip(lead, offset, strict=False))]
            offset = offset[axes:]
            region = tuple(slice(first, first + size) for first, size in zip(offset, part.shape, strict=True))
            whole[region] = part
            filled += part.numel()
        if filled != whole.numel():
            raise CheckpointError(f"{self.path} holds {filled} of the {whole.numel()} elements of {key}.")
        return whole

    def named(self, weight: Weight) -> Weight:
        """Return the weight under the name it has here: megatron-core's local layers name some norms otherwise."""
        other = weight._replace(key=local_name(weight.key, bool(self.arguments.get("multi_latent_attention"))))
        names, others = ({each.key, each.place(numbered=True)[0]} for each in (weight, other))
        return weight if names & self.tensors.keys() or not others & self.tensors.keys() else other

    def _part(self, info: Any, key: str) -> Tensor:
        with (self.path / info.relative_path).open("rb") as stream:
            stream.seek(info.offset)
            content = io.BytesIO(stream.read(info.length))
        try:
            part = torch.load(content, map_location="cpu", weights_only=True)
        except Exception:  # reading garbage may raise anything
            raise CheckpointError(f"{self.path / info.relative_path} is corrupt at {key}.") from None
        assert isinstance(part, Tensor)
        return part


def export_folder(
    source: Checkpoint,
    target: Path,
    like: Path | None = None,
    max_shard_bytes: int = 5 * GIGABYTE,
    dtype: torch.dtype | None = None,
    done: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Write a folder that transformers loads. like: a folder whose configuration, tokenizer and division into files are
    taken over; None: what was imported, where that lies beside the checkpoint. dtype: of the weights, if not theirs.

    Raises CheckpointError for a model that no family has, or not that of `like`, for a target that is not empty, and
    for one that cannot be written.
    """
    arguments = source.arguments
    check_exportable(arguments)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} is not an empty folder; give one that is, or a new one.")
    kept = source.path.parent / KEPT
    like = kept if like is None and kept.is_dir() else like
    old = read_config(like) if like is not None else None
    arguments = _with_vocabulary(arguments, old)
    tensors = _Tensors(source, Weights(arguments), dtype)
    main = next(iter(tensors.shapes.values()))[0]
    config = None
    if old is None or _differs(arguments, old, like) or dtype is not None:
        config = config_of(arguments, str(main).removeprefix("torch."), old)
    files = _files(tensors.shapes, like, max_shard_bytes)
    try:
        target.mkdir(parents=True, exist_ok=True)
        if like is not None:
            copy_files(like, target)
            (target / INDEX).unlink(missing_ok=True)
        for file, names in files.items():
            write_tensors(target / file, {name: tensors.shapes[name] for name in names}, tensors.read, done)
        if list(files) != [WEIGHTS]:
            _write_index(target, files, tensors.shapes, like)
        _write_configs(target, config)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error.strerror or error}.") from None


def _write_configs(target: Path, config: Mapping[str, Any] | None) -> None:
    """Write the model's configuration, unless one was copied, and one of generation, unless that was copied."""
    if config is not None:
        _write_json(target / "config.json", config)
    if not (target / "generation_config.json").exists():
        config = read_config(target)
        ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(key)}
        _write_json(target / "generation_config.json", {"_from_model_config": True, **ids})


def _with_vocabulary(arguments: Mapping[str, Any], old: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the arguments with the number of rows that are words: Hugging Face's, the tokenizer's, or all rows."""
    size = (old or {}).get("vocab_size") or arguments.get("vocab_size") or arguments.get("padded_vocab_size")
    if not isinstance(size, int):
        raise CheckpointError("the checkpoint does not say how large its vocabulary is.")
    return {**arguments, "vocab_size": size}


def _differs(arguments: Mapping[str, Any], old: Mapping[str, Any], like: Path | None) -> bool:
    """Whether the arguments describe another model than the configuration."""
    before = arguments_of(old, like or "config.json")
    return any(
        arguments.get(name) != value
        for name, value in before.items()
        if name not in ("padded_vocab_size", "attention_dropout", "hidden_dropout")
    )


class _Tensors:
    """The tensors of the folder by name, in the order of the model."""

    def __init__(self, source: Checkpoint, weights: Weights, dtype: torch.dtype | None):
        self._source, self._weights, self._dtype = source, weights, dtype
        self._made: dict[str, Weight] = {}
        self.shapes: dict[str, tuple[torch.dtype, Shape]] = {}
        for weight in weights:
            self._made |= dict.fromkeys(weight.names, weight)
            here = source.named(weight)
            entry = source.tensors.get(here.key) or source.tensors.get(here.place(numbered=True)[0])
            kind = dtype or (entry.properties.dtype if entry is not None else torch.float32)
            self.shapes |= {n: (kind, shape) for n, shape in zip(weight.names, weight.shapes, strict=True)}
        self._last: tuple[Weight, dict[str, Tensor]] | None = None

    def read(self, name: str) -> Tensor:
        weight = self._made[name]
        if self._last is None or self._last[0] != weight:  # its other parts are asked for soon
            parts = self._weights.split(weight, self._source.read(weight))
            self._last = weight, dict(zip(weight.names, parts, strict=True))
        dtype, shape = self.shapes[name]
        tensor = self._last[1][name]
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{self._source.path} gives {name} the shape {list(tensor.shape)}, not {list(shape)}."
            )
        return tensor.to(dtype)


def _files(shapes: Mapping[str, tuple[torch.dtype, Shape]], like: Path | None, max_bytes: int) -> dict[str, list[str]]:
    """Return the names of each file's tensors: divided as before, or as many as fit, in the order of the model."""
    if like is not None and (like / INDEX).is_file():
        places = read_index(like / INDEX)
        if all(name in places for name in shapes):
            files = defaultdict[str, list[str]](list)
            for name in shapes:
                files[places[name]].append(name)
            return dict(sorted(files.items()))
    groups: list[list[str]] = []
    room = 0
    for name, (dtype, shape) in shapes.items():
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if nbytes > room or not groups:
            groups.append([])
            room = max_bytes
        groups[-1].append(name)
        room -= nbytes
    if len(groups) == 1:
        return {WEIGHTS: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, 1)}


def _write_index(
    target: Path,
    files: Mapping[str, list[str]],
    shapes: Mapping[str, tuple[torch.dtype, Shape]],
    like: Path | None,
) -> None:
    places = {name: file for file, names in files.items() for name in names}
    if like is not None and (like / INDEX).is_file() and read_index(like / INDEX) == places:
        (target / INDEX).write_bytes((like / INDEX).read_bytes())
        return
    counts = {name: torch.Size(shape).numel() for name, (_, shape) in shapes.items()}
    total = sum(counts[name] * shapes[name][0].itemsize for name in counts)
    about = {"total_parameters": sum(counts.values()), "total_size": total}
    _write_json(target / INDEX, {"metadata": about, "weight_map": places})


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
