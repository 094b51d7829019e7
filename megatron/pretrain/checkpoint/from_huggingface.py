"""Weights of a Hugging Face folder: into a model in place, or into a checkpoint folder, tensor by tensor.

A checkpoint is written without a model and without ranks, by torch's classes of its own format, and holds what
`Checkpointer` would have saved of such a model. So memory is that of one tensor of megatron-core's.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import shutil
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from helixpipe.common.errors import CheckpointError
from helixpipe.common.files import new_file
from helixpipe.model import PipelineModel, layers_of
from helixpipe.model.latent import LATENT_CHECKPOINT_NAMES
from helixpipe.model.layers import CHECKPOINT_NAMES
from helixpipe.program.stages import EXPERTS
from megatron.pretrain.checkpoint import folder as folders
from megatron.pretrain.checkpoint.ranks import NotWrittenError, writing
from megatron.pretrain.huggingface.folder import Folder
from megatron.pretrain.huggingface.weights import EXPERT_BIAS, Weight

KEPT = "huggingface"
"""Folder, beside a checkpoint, with the files of the Hugging Face folder that are no weights."""

SHARD = "__0_0.distcp"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.*)")
_POSITIONS = ("rotary_", "rope_", "use_rope_", "yarn_", "mscale", "position_embedding_type")
"""Prefixes of arguments about rotary embeddings."""
_COPIED = (".json", ".txt", ".model", ".jinja", ".md", ".tiktoken")
_COPIED_NAMES = ("LICENSE", "NOTICE", "USE_POLICY")


def load_weights(model: PipelineModel, path: Path) -> dict[str, Any]:
    """Give every weight of a rank's model its value, and return the model's arguments. Raises CheckpointError."""
    source = Folder(path)
    source.check()
    weights = {(weight.layer, weight.expert, weight.key): weight for weight in source.weights}
    biases = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith(EXPERT_BIAS)]
    for name, parameter in (*model.named_parameters(), *biases):
        place = checkpoint_place(name, model)
        if place not in weights:
            raise CheckpointError(f"{path} holds no {place[-1]}, which the model of these flags has.")
        weight = weights[place]
        whole = _padded(source.read(weight), weight, model.gpt.vocab_size)
        group = model.tp_group if weight.expert is None else parallel_state.get_expert_tensor_parallel_group()
        own = _own_part(whole, parameter, group.size(), group.rank())
        if own.shape != parameter.shape:
            raise CheckpointError(
                f"{path} gives {name} the shape {list(own.shape)}, but these flags make it {list(parameter.shape)}; "
                "give the flags it was trained with, or --use-checkpoint-args."
            )
        with torch.no_grad():
            parameter.copy_(own)
    return source.arguments


def other_positions(arguments: Mapping[str, Any], flags: Mapping[str, Any]) -> list[str]:
    """Return where a run's rotary embeddings differ from those of what it loads: `rotary_base 500000 (here 10000)`."""
    return [
        f"{name} {value} (here {flags[name]})"
        for name, value in arguments.items()
        if name.startswith(_POSITIONS) and name in flags and flags[name] != value
    ]


def checkpoint_place(name: str, model: PipelineModel) -> tuple[int | None, int | None, str]:
    """Layer, expert, and key in checkpoints, of a model's parameter."""
    if model.share_embeddings_and_output_weights and name == "output_layer.weight":
        return None, None, "embedding.word_embeddings.weight"
    match = _LAYER.fullmatch(name)
    if match is None:
        return None, None, name
    layer, inner = int(match[1]), match[2]
    mixed = EXPERTS in layers_of(model.config)[layer]
    names = LATENT_CHECKPOINT_NAMES if model.config.multi_latent_attention else CHECKPOINT_NAMES
    for module, saved in names.items():
        if inner.startswith(module) and not (mixed and module == "pre_mlp_layernorm."):
            inner = saved + inner.removeprefix(module)
    of_expert = _EXPERT.fullmatch(inner)
    if of_expert is None:
        return layer, None, f"decoder.layers.{inner}"
    here = (model.config.num_moe_experts or 0) // model.config.expert_model_parallel_size
    first = here * (
        parallel_state.get_expert_model_parallel_rank() if model.config.expert_model_parallel_size > 1 else 0
    )
    return layer, first + int(of_expert[1]), f"decoder.layers.mlp.experts.experts.{of_expert[2]}"


def _padded(whole: Tensor, weight: Weight, vocabulary: int) -> Tensor:
    """Return the tensor with the rows of a padded vocabulary, which are 0."""
    missing = vocabulary - whole.size(0)
    if weight.layer is not None or whole.dim() != 2 or missing <= 0:
        return whole
    return torch.cat([whole, whole.new_zeros(missing, whole.size(1))])


def _own_part(whole: Tensor, parameter: Any, size: int, rank: int) -> Tensor:
    """Return a tensor-parallel rank's part of a tensor, divided as megatron-core's layers divide it."""
    if size == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return whole
    dim = parameter.partition_dim
    return torch.cat([block.chunk(size, dim)[rank] for block in whole.chunk(parameter.partition_stride, dim)], dim)


# ---------------------------------------------------------------------------------------------------------- checkpoints


def import_folder(source: Folder, save: Path, done: Callable[[int], None] = lambda nbytes: None) -> Path:
    """Write the weights as the checkpoint SAVE/release, and beside it the files that are no weights.

    done: told the bytes of each tensor when it is written. Raises CheckpointError, and leaves nothing then.
    """
    source.check()
    folder, temporary = save / folders.RELEASE, save / f".{folders.RELEASE}.tmp"
    try:
        if save.exists() and not {each.name for each in save.iterdir()} <= {temporary.name}:
            raise CheckpointError(f"--save {save} is not empty; give a folder that is, or a new one.")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        with writing(temporary / SHARD):
            _write_shard(source, temporary, done)
        with writing(temporary / "common.pt"):
            _write_common(source, temporary)
        names = ["common.pt", "metadata.json", ".metadata", SHARD]
        described = {"files": folders.describe_files(temporary, names)}
        (temporary / folders.MANIFEST).write_text(json.dumps(described), encoding="utf-8")
        copy_files(source.path, save / KEPT)
        temporary.rename(folder)
        tracker = save / folders.TRACKER
        new_file(tracker, folders.RELEASE.encode()).replace(tracker)
    except OSError as error:
        raise CheckpointError(f"--save {save} cannot be written: {error.strerror or error}.") from None
    except NotWrittenError as error:
        raise CheckpointError(f"--save {save}: {error}; nothing is kept of it.") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # renamed, unless something failed
    return folder


def _write_shard(source: Folder, folder: Path, done: Callable[[int], None]) -> None:
    """Write all tensors to one file and return its index."""
    layers, experts = source.arguments["num_layers"], source.arguments.get("num_experts") or 0
    entries, places = dict[str, Any](), dict[Any, Any]()
    with (folder / SHARD).open("wb") as stream:
        for weight in source.weights:
            tensor = source.read(weight).contiguous()
            key, lead = weight.place(source.weights.numbered)  # leading axes, as `Decoder.sharded_state_dict` has them
            axes = (layers, experts) if weight.expert is not None else (layers,)
            size = (*axes[len(axes) - len(lead) :], *tensor.shape)
            offset = (*lead, *(0,) * tensor.dim())
            tensor = tensor[(None,) * len(lead)]
            entry = entries.setdefault(key, TensorStorageMetadata(TensorProperties(tensor.dtype), torch.Size(size), []))
            tensor = tensor.to(entry.properties.dtype)
            entry.chunks.append(ChunkStorageMetadata(torch.Size(offset), tensor.shape))
            begin, written = stream.tell(), io.BytesIO()
            torch.save(tensor.clone(), written)  # a clone: what is saved of a view is all that it is a view of
            stream.write(written.getbuffer())
            where = _StorageInfo(SHARD, begin, stream.tell() - begin)
            places[MetadataIndex(key, torch.Size(offset), len(entry.chunks) - 1)] = where
            done(tensor.nbytes)
    index = Metadata(entries, planner_data={}, storage_data=places)
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def _write_common(source: Folder, folder: Path) -> None:
    common = {
        "args": Namespace(**source.arguments),
        "checkpoint_version": 3.0,
        "iteration": 0,
        "num_floating_point_operations_so_far": 0.0,
    }
    content = io.BytesIO()
    torch.save(common, content)
    (folder / "common.pt").write_bytes(content.getvalue())
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))


def copy_files(source: Path, target: Path) -> None:
    """Configuration, tokenizer and licence of a model: everything that is neither weights nor code."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_file() and (path.suffix in _COPIED or path.name.startswith(_COPIED_NAMES)):
            shutil.copyfile(path, target / path.name)
