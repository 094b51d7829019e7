"""What a checkpoint, or a Hugging Face folder, says of the model in it."""

from __future__ import annotations

import functools
from argparse import Namespace
from pathlib import Path
from typing import Any

from helixpipe.common.errors import CheckpointError
from megatron.training.checkpoint import folder as folders
from megatron.training.checkpoint import known
from megatron.training.huggingface.folder import Folder, looks_like_one


def read_arguments(load_dir: str, step: int | None = None, trusted: bool = False) -> dict[str, Any] | None:
    """The `args` of the checkpoint that `load` would try first among those that look complete, or those that a Hugging
    Face folder comes to; not collective.

    None when the directory holds no checkpoint. Raises CheckpointError when none is readable.
    """
    directory = Path(load_dir)
    if looks_like_one(directory):
        return Folder(directory).arguments
    found = folders.candidates(directory, step)
    reasons = []
    for name in found.names:
        reason = folders.problem(directory / name, functools.partial(known.read_index, trusted=trusted), shares=0)
        if reason is None:
            try:
                common = known.load_common(directory / name, trusted)
                return dict(vars(common.get("args", Namespace())))
            except CheckpointError:
                raise
            except Exception:  # unpickling garbage may raise anything
                reason = "common.pt is corrupt"
        reasons.append(f"{name}: {reason}")
    if reasons:
        raise CheckpointError(f"no checkpoint in --load {directory} is usable ({'; '.join(reasons)}).")
    return None
