"""Sums over two kinds of groups are asked for in one order on all ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from megatron.pretrain.process.parallel import Parallel


@pytest.mark.parametrize("is_first", [True, False])
def test_pipelines_are_summed_over_before_replicas(monkeypatch: pytest.MonkeyPatch, is_first: bool) -> None:
    """A rank that sums over replicas first would give them what its pipeline has not added to."""
    asked: list[Any] = []
    monkeypatch.setattr(dist, "all_reduce", lambda values, group: asked.append(group))
    rank = cast(Parallel, SimpleNamespace(pp_group="pipeline", dp_cp_group="replicas", is_first=is_first))
    values = torch.ones(2)
    assert Parallel.sum_over_pipeline_and_data(rank, values) is values
    assert asked == ["pipeline", "replicas"]
