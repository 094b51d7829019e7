"""Whatever leaves the device, whenever and however late: gradients are right, and memory is what the sweep says."""

from __future__ import annotations

import pytest

from tests.distributed import run_ranks
from tests.runtime.offload_steps import MEMORY, both


@pytest.fixture(scope="module")
def peaks() -> dict[str, tuple[float, float]]:
    """Of the rank, which has held random steps against the plain model before."""
    return run_ranks(both, 1, 40, timeout=300.0)[0]


@pytest.mark.parametrize("name", MEMORY)
def test_memory_goes_and_comes_as_the_sweep_says(name: str, peaks: dict[str, tuple[float, float]]) -> None:
    """On the device and on the host, where parts lie at multiples of 512 bytes."""
    found = {way: ratios for way, ratios in peaks.items() if way.startswith(name + " ")}
    assert len(found) == 4
    for way, (device, host) in found.items():
        assert 0.98 <= device <= 1.02, (way, device)
        assert 1.0 <= host <= 1.02, (way, host)
