"""The shape of a model from a Hugging Face folder's config.json, without its weights."""

from __future__ import annotations

from pathlib import Path

from helixpipe.common.errors import UserError
from helixpipe.costs.huggingface.config import CONFIG, arguments_of, read_config
from helixpipe.costs.models import MODELS, ModelShape
from helixpipe.costs.training_flags import shape_of_flags


def names_a_folder(name: str) -> bool:
    """Whether `--model NAME` is the path of a folder or of its config.json, and not the name of a preset."""
    return name.lower() not in MODELS and ("/" in name or name.endswith(".json") or (Path(name) / CONFIG).exists())


def folder_shape(name: str) -> ModelShape:
    """Return the model of the folder, or of the config.json; its sequences are the longest that it allows. Raises
    UserError for one that cannot be read or is not supported."""
    path = Path(name)
    try:
        flags = arguments_of(read_config(path), path)
    except UserError as error:
        raise UserError(f"--model {name}: {error}") from None
    flags["seq_length"] = flags["max_position_embeddings"]
    folder = path.parent if path.suffix == ".json" else path
    return shape_of_flags(flags, folder.resolve().name, flags["vocab_size"])
