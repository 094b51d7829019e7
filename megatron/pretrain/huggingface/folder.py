"""A Hugging Face folder that is read: config.json, and weights in one safetensors file or several with an index."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from helixpipe.common.errors import CheckpointError
from helixpipe.common.json_values import parse_json
from helixpipe.costs.huggingface.config import arguments_of, read_config
from megatron.pretrain.huggingface.safetensors import Entry, TensorFile
from megatron.pretrain.huggingface.weights import Weight, Weights

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_COMPUTED = ("rotary_emb.inv_freq", ".masked_bias")
"""Tensors of old files that are no weights."""


def looks_like_one(path: Path) -> bool:
    """Whether a folder holds a Hugging Face model and no checkpoint of this program."""
    return (path / "config.json").is_file() and not any(path.glob("iter_*")) and not any(path.glob("latest_*"))


def read_index(path: Path) -> dict[str, str]:
    """Read the file of each tensor, by name, from an index. Raises CheckpointError."""
    try:
        places = {str(name): str(file) for name, file in parse_json(path.read_bytes())["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{path} is damaged.") from None
    for file in sorted(set(places.values())):
        if file != Path(file).name or not file.endswith(".safetensors"):
            raise CheckpointError(f"{path} names {file!r}, which is no safetensors file of the folder.")
    return places


class Folder:
    """Raises CheckpointError, one sentence, for a folder of another model, or one that is not whole."""

    def __init__(self, path: Path):
        self.path = path
        if not path.is_dir():
            raise CheckpointError(f"{path} is not a folder.")
        self.config = read_config(path)
        self.arguments: dict[str, Any] = arguments_of(self.config, path / "config.json")
        self.weights = Weights(self.arguments)

    @cached_property
    def places(self) -> dict[str, str]:
        """The file of each tensor, by name."""
        index = self.path / INDEX
        if not index.is_file():
            if (self.path / WEIGHTS).is_file():
                return dict.fromkeys(self._file(WEIGHTS).entries, WEIGHTS)
            pickles = sorted(path.name for path in self.path.glob("*") if path.suffix in _PICKLES)
            if pickles:
                raise CheckpointError(
                    f"{self.path} holds {pickles[0]}, a pickle, which could run code when it is loaded: only "
                    "safetensors are read; let whoever trusts it save it as that (save_pretrained in transformers)."
                )
            raise CheckpointError(f"{self.path} holds neither {WEIGHTS} nor {INDEX}.")
        places = read_index(index)
        for file in sorted(set(places.values())):
            if not (self.path / file).is_file():
                raise CheckpointError(f"{self.path} is not whole: {file} is missing.")
        return places

    def check(self) -> None:
        """Look at all names and shapes, at no weight."""
        places, known = self.places, set[str]()
        for weight in self.weights:
            for name, shape in zip(weight.names, weight.shapes, strict=True):
                known.add(name)
                if name not in places:
                    raise CheckpointError(f"{self.path} holds no {name}, which a model of its config.json has.")
                actual = self.entry(name).shape
                if actual != shape:
                    raise CheckpointError(
                        f"{self.path} holds {name} of shape {list(actual)}, but its config.json makes it {list(shape)}."
                    )
        tied = {"lm_head.weight"} if not self.arguments["untie_embeddings_and_output_weights"] else set()
        for name in sorted(places.keys() - known - tied):
            if not name.endswith(_COMPUTED) and not self._predicts_further(name):
                raise CheckpointError(f"{self.path} holds {name}, which a model of its config.json does not have.")

    def _predicts_further(self, name: str) -> bool:
        """Whether a tensor is of the layers after the model's that predict further tokens, which are left out."""
        layer = name.removeprefix("model.layers.").partition(".")[0]
        latent = bool(self.arguments.get("multi_latent_attention"))
        return latent and layer.isdecimal() and int(layer) >= self.arguments["num_layers"]

    def entry(self, name: str) -> Entry:
        file = self._file(self.places[name])
        if name not in file.entries:
            raise CheckpointError(f"{file.path} holds no {name}, where {INDEX} says it is.")
        return file.entries[name]

    def read(self, weight: Weight) -> Tensor:
        """Read a whole weight of megatron-core's."""
        for name in weight.names:
            self.entry(name)
        return self.weights.join([self._file(self.places[name]).read(name) for name in weight.names])

    def _file(self, name: str) -> TensorFile:
        if name not in self._files:
            self._files[name] = TensorFile(self.path / name)
        return self._files[name]

    @cached_property
    def _files(self) -> dict[str, TensorFile]:
        return {}
