"""All tensors of a checkpoint, read without ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict


def assert_same_tensors(one: Path, other: Path, iteration: int) -> None:
    """All tensors of two checkpoints, weights and the optimizer's state, are equal to the bit."""
    first, second = (read_tensors(folder / f"iter_{iteration:07d}") for folder in (one, other))
    assert first.keys() == second.keys() and any("exp_avg" in name for name in first)
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    state: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(state, storage_reader=FileSystemReader(folder), planner=planner, no_dist=True)
    flat, _ = flatten_state_dict(state)
    return {name: value for name, value in flat.items() if isinstance(value, torch.Tensor)}
