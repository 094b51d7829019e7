"""Reads the arguments of the model in a checkpoint or a Hugging Face folder."""

from __future__ import annotations

import functools
from argparse import Namespace
from pathlib import Path
from typing import Any

from helixpipe.common.errors import CheckpointError
from megatron.pretrain.checkpoint import folder as folders
from megatron.pretrain.checkpoint import known
from megatron.pretrain.checkpoint.from_huggingface import KEPT
from megatron.pretrain.huggingface.folder import Folder, looks_like_one

_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
"""Files of a tokenizer, one of which a folder has that has one."""


def read_arguments(load_dir: str, step: int | None = None, trusted: bool = False) -> dict[str, Any] | None:
    """Return the `args` of the checkpoint that `load` would try first among those that look complete, or those that a
    Hugging Face folder comes to; not collective. A model of Hugging Face's has the tokenizer of its folder, whether
    that is loaded or was imported.

    None when the directory holds no checkpoint. Raises CheckpointError when none is readable.
    """
    directory = Path(load_dir)
    if looks_like_one(directory):
        return {**Folder(directory).arguments, **tokenizer_in(directory)}
    newest = newest_usable(directory, step, trusted, shares=0)
    return None if newest is None else {**tokenizer_in(directory / KEPT), **newest[1]}


def tokenizer_in(folder: Path) -> dict[str, str]:
    """Return the flags of the tokenizer in a folder of Hugging Face's; empty if there is none."""
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        return {}
    return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder)}


def newest_usable(
    directory: Path, step: int | None = None, trusted: bool = False, *, shares: int = 1
) -> tuple[Path, dict[str, Any]] | None:
    """Return the checkpoint that `load` would try first among those that look whole, and its `args`; not collective.

    shares: 0 leaves the checksums of shards out, as `folder.problem` has it. None when the directory holds no
    checkpoint. Raises CheckpointError when none is readable.
    """
    reasons = []
    for name in folders.candidates(directory, step).names:
        path = directory / name
        reason = folders.problem(path, functools.partial(known.read_index, trusted=trusted), shares=shares)
        if reason is None:
            try:
                return path, dict(vars(known.load_common(path, trusted).get("args", Namespace())))
            except CheckpointError:
                raise
            except folders.MalformedError as error:
                reason = str(error)
            except Exception:  # unpickling garbage may raise anything
                reason = "common.pt is corrupt"
        reasons.append(f"{name}: {reason}")
    if reasons:
        raise CheckpointError(f"no checkpoint in --load {directory} is usable ({'; '.join(reasons)}).")
    return None
