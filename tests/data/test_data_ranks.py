"""build_datasets on several ranks: one index for all, and every rank's failure known to all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import megatron.pretrain.data.datasets as data
from helixpipe.common.errors import DataError
from megatron.pretrain.data.datasets import build_datasets
from megatron.pretrain.data.options import DataOptions
from megatron.pretrain.data.tokenizer import build_tokenizer
from tests.data.conftest import story
from tests.distributed import run_ranks


def outcomes(rank: int, world_size: int, prefixes: list[str], folder: str) -> dict[str, Any]:
    """Everything in one process group: starting one takes longer than all the cases."""
    tokenizer = build_tokenizer("ByteLevelTokenizer")
    single = DataOptions(32, data_path=[prefixes[0]], data_cache_path=f"{folder}/single")
    blend = DataOptions(32, data_path=["0.3", prefixes[0], "0.7", prefixes[1]], data_cache_path=f"{folder}/blend")

    def tokens(options: DataOptions, needed_here: bool = True) -> Any:
        train = build_datasets(options, tokenizer, (40, 4, 0), needed_here=needed_here).train
        return None if train is None else [train[i]["tokens"].tolist() for i in range(40)]

    def failure(options: DataOptions) -> str:
        try:
            build_datasets(options, tokenizer, (40, 4, 0))
        except DataError as error:
            return str(error)
        return "none"

    results = {
        "single": tokens(single),
        "blend": tokens(blend),
        "again": tokens(blend),
        "by size": tokens(DataOptions(32, data_path=prefixes, data_cache_path=f"{folder}/sizes")),
        "mock": tokens(DataOptions(32, mock_data=True)),
        "last rank only": tokens(DataOptions(32, data_path=[prefixes[1]]), needed_here=rank == world_size - 1),
        "missing": failure(DataOptions(32, data_path=["none"])),
    }
    load = data._load

    def failing(*args: Any) -> Any:
        if rank == 1:
            raise OSError("stale file handle")
        return load(*args)

    with mock.patch.object(data, "_load", failing):
        try:
            results["rank 1"] = failure(single)
        except OSError as error:
            results["rank 1"] = f"its own: {error}"
    results["after all"] = tokens(single)
    return results


def test_two_ranks(make_pair: Callable[..., str], tmp_path: Path) -> None:
    prefixes = [
        make_pair("a", [story(i, 90) for i in range(50)]),
        make_pair("b", [story(i, 60) for i in range(50, 99)]),
    ]
    first, second = run_ranks(outcomes, 2, prefixes, str(tmp_path))
    for name in ("single", "blend", "again", "by size", "mock", "after all"):
        assert first[name] == second[name] is not None
    assert first["blend"] == first["again"]
    assert first["single"] == first["after all"]
    assert first["last rank only"] is None and len(second["last rank only"]) == 40
    assert first["missing"] == second["missing"] and "none.idx does not exist" in first["missing"]
    assert first["rank 1"] == "rank 1: OSError: stale file handle"
    assert second["rank 1"] == "its own: stale file handle"

    # A process group does not change the samples.
    alone = build_datasets(
        DataOptions(32, data_path=["0.3", prefixes[0], "0.7", prefixes[1]]),
        build_tokenizer("ByteLevelTokenizer"),
        (40, 4, 0),
    ).train
    assert alone is not None
    assert [alone[i]["tokens"].tolist() for i in range(40)] == first["blend"]
