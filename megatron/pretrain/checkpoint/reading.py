"""Reading a checkpoint's shards: megatron-core's `dist_checkpointing.load` in its own steps.

That function reads the plain values as well, in a way that differs between releases (0.16 through a strategy that one
hands in, 0.19 by itself) and that may run code in them. Here they come from `known.load_common`, and the steps around
the shards are functions that the releases share.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import merge
from megatron.core.dist_checkpointing.mapping import apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base, force_all_tensors_to_non_fp8
from megatron.core.dist_checkpointing.validation import (
    StrictHandling,
    determine_global_metadata,
    parse_strict_flag,
    validate_integrity_and_strict_load,
)

from megatron.pretrain.checkpoint import known
from megatron.pretrain.checkpoint.folder import COMMON


def read_shards(
    state: dict[str, Any], folder: Path, strategy: Any, *, strictness: str, trusted: bool = False
) -> dict[str, Any]:
    """Return `state` with its sharded tensors and objects read from the checkpoint, and the checkpoint's plain values.

    strategy: reads the sharded part of a folder. strictness: one of megatron-core's `StrictHandling`, which says how
    names that only the checkpoint or only `state` has are treated. Ranks may read overlapping parts: the writer checks
    that, and a check here would be a collective in which the other ranks wait for one that failed before it.
    """
    force_all_tensors_to_non_fp8(state)
    sharded, unsaved, factories = load_preprocess(state)
    result = merge(known.load_common(folder, trusted), unsaved)
    sharded, _ = extract_sharded_base(sharded)
    strict = parse_strict_flag(strictness)
    in_checkpoint = of_rank = of_all_ranks = None
    if StrictHandling.requires_explicit_ckpt_mismatch_check(strict):
        every = strategy.load_sharded_metadata(folder)
        in_checkpoint = {name: entry for name, entry in every.items() if entry.key != COMMON}
    if StrictHandling.requires_global_app_metadata(strict):
        of_rank, of_all_ranks = determine_global_metadata(sharded)
    sharded, _, _ = validate_integrity_and_strict_load(sharded, strict, False, of_rank, of_all_ranks, in_checkpoint)
    merge(result, strategy.load(sharded, folder))
    return dict(apply_factory_merges(result, factories))
