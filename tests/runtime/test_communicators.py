"""Which transport carries a group's tensors, and the process groups that NCCL's makes for itself."""

from __future__ import annotations

from datetime import timedelta
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helixpipe.runtime import transport
from helixpipe.runtime.communicators import (
    Settings,
    backend_of,
    direction_groups,
    nccl_options,
    release,
    used_channels,
)
from helixpipe.runtime.gloo import GlooTransport
from tests.distributed import run_ranks

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def backends(rank: int, world_size: int, config: str | None) -> tuple[str, str]:
    """Of a job's groups made with this backend: that of the CPU and that of CUDA."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 (registers the backend "fake")

    dist.destroy_process_group()
    dist.init_process_group(config)
    group = dist.new_group([0])
    return backend_of(group, CPU), backend_of(group, CUDA)


@pytest.mark.parametrize(
    ("config", "expected"),
    [("cpu:gloo,cuda:fake", ("gloo", "fake")), ("gloo", ("gloo", "gloo")), (None, ("gloo", ""))],
)
def test_each_kind_of_device_has_a_backend(config: str | None, expected: tuple[str, str]) -> None:
    assert run_ranks(backends, 1, config) == [expected]


@pytest.mark.parametrize(
    ("config", "device", "expected"),
    [
        ("cpu:gloo,cuda:nccl", CUDA, "nccl"),
        ("cuda:nccl", CUDA, "nccl"),
        ("cpu:gloo,cuda:nccl", CPU, "gloo"),
        ("cpu:gloo,cuda:gloo", CUDA, "gloo"),
    ],
)
def test_the_transport_is_that_of_the_device(
    config: str, device: torch.device, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with NCCL, which this torch may not have."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    monkeypatch.setattr(dist, "get_backend", lambda group: config)  # of a mixed group, torch gives all
    monkeypatch.setattr(transport, "NcclTransport", lambda *arguments: ("nccl", *arguments))
    monkeypatch.setattr(transport, "GlooTransport", lambda *arguments: ("gloo", *arguments))
    group, channels, settings = object(), [(0, 1)], {"max_ctas": 3}
    made: Any = transport.make_transport(group, device, channels, settings)
    rest = (channels, settings) if expected == "nccl" else ()
    assert made == (expected, group, device, *rest)


class Options:
    """As torch.distributed.ProcessGroupNCCL.Options, whose config holds NCCL's own defaults."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout: Any = None
        self.config = SimpleNamespace(min_ctas=None, max_ctas=None, cga_cluster_size=None, net_name=None)


@pytest.mark.parametrize(
    ("settings", "high", "config"),
    [
        ({}, True, {"max_ctas": 8}),
        ({"is_high_priority_stream": False, "max_ctas": 2}, False, {"max_ctas": 2}),
        ({"min_ctas": 16}, True, {"min_ctas": 16, "max_ctas": 16}),
        ({"cga_cluster_size": 2, "net_name": "IB"}, True, {"max_ctas": 8, "cga_cluster_size": 2, "net_name": "IB"}),
    ],
)
def test_settings_become_torchs_options(
    settings: Settings, high: bool, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    options = nccl_options(settings, 8, timedelta(minutes=3))
    assert options._timeout == timedelta(minutes=3)
    assert options.is_high_priority_stream is high
    assert {name: value for name, value in vars(options.config).items() if value is not None} == config


@pytest.mark.parametrize(
    ("settings", "channels", "blocks"),
    [
        ({"max_ctas": 4}, [(0, 1)], 4),
        ({}, [(0, 1), (1, 0)], 32),
        ({}, list(permutations(range(8), 2)), 4),  # 14 channels of a rank, of 78 SMs
        ({"max_ctas": 16}, list(permutations(range(8), 2)), 16),
    ],
)
def test_each_group_of_nccl_has_options_of_its_own(
    settings: Settings, channels: list[tuple[int, int]], blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch writes the ranks and the name of the group into them. Rank 2 of a job of two pipelines."""
    made: list[tuple[Any, ...]] = []

    def new_group(ranks: Any, timeout: Any, backend: str, options: Any, group_desc: str) -> Any:
        made.append((ranks, timeout, backend, options, group_desc))
        return len(made)

    def gather(objects: list[Any], own: Any) -> None:
        objects[:] = [(2, 3), (0, 1), (2, 3), (0, 1)]

    group: Any = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(options=SimpleNamespace(_timeout=7)))
    for name, stand_in in (
        ("ProcessGroupNCCL", SimpleNamespace(Options=Options)),
        ("get_process_group_ranks", lambda group: [2, 3]),
        ("get_world_size", lambda: 4),
        ("all_gather_object", gather),
        ("get_backend_config", lambda group: "cuda:nccl"),
        ("new_group", new_group),
    ):
        monkeypatch.setattr(dist, name, stand_in, raising=False)
    h20 = SimpleNamespace(multi_processor_count=78)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h20)
    assert direction_groups(group, CUDA, settings, channels) == (3, 4)
    assert [(ranks, timeout, backend, name) for ranks, timeout, backend, _, name in made] == [
        (ranks, 7, "nccl", name) for ranks in ((0, 1), (2, 3)) for name in ("PIPELINE_UP", "PIPELINE_DOWN")
    ]
    options = [each[3] for each in made]
    assert {(each.config.max_ctas, each._timeout) for each in options} == {(blocks, 7)}
    assert len(set(map(id, options))) == 4


def test_communicators_are_those_of_the_channels() -> None:
    assert used_channels({(2, 0), (0, 1)}, 3) == [(0, 1), (2, 0)]
    assert used_channels(set(), 3) == []
    assert used_channels(None, 2) == [(0, 1), (1, 0)]


def destroyed(rank: int, world_size: int) -> tuple[int, int]:
    """Process groups of a job, with and without those that were released; afterwards there is nothing to release."""
    groups = [dist.new_group(list(range(world_size))) for _ in range(2)]
    before = len(dist.distributed_c10d._world.pg_map)
    release(groups)
    after = len(dist.distributed_c10d._world.pg_map)
    dist.destroy_process_group()
    release(groups)
    return before, after


def test_released_groups_are_destroyed() -> None:
    assert run_ranks(destroyed, 2) == [(3, 1)] * 2


def test_gloo_makes_none() -> None:
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    GlooTransport(group, CPU).close()
