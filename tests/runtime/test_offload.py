"""Whatever leaves the device, whenever and however late: gradients are right, and memory is what the sweep says."""

from __future__ import annotations

import pytest

from tests.distributed import run_ranks
from tests.runtime.block_steps import ORDERS, every
from tests.runtime.offload_steps import MEMORY


@pytest.fixture(scope="module")
def found() -> tuple[dict[str, tuple[float, float]], dict[str, list[float]]]:
    """Of the rank, which has held random steps against the plain model before."""
    return run_ranks(every, 1, 40, timeout=300.0)[0]


@pytest.fixture(scope="module")
def peaks(found: tuple[dict[str, tuple[float, float]], dict[str, list[float]]]) -> dict[str, tuple[float, float]]:
    return found[0]


@pytest.mark.hypothesis
@pytest.mark.parametrize("name", MEMORY)
def test_memory_goes_and_comes_as_the_sweep_says(name: str, peaks: dict[str, tuple[float, float]]) -> None:
    """On the device and on the host, where parts lie at multiples of 512 bytes."""
    found = {way: ratios for way, ratios in peaks.items() if way.startswith(name + " ")}
    assert len(found) == 4
    for way, (device, host) in found.items():
        assert 0.98 <= device <= 1.02, (way, device)
        assert 1.0 <= host <= 1.02, (way, host)


def test_keys_and_values_come_and_go_by_blocks(
    found: tuple[dict[str, tuple[float, float]], dict[str, list[float]]],
) -> None:
    """Where the activations leave, too; and in rounds less is there at a time than of whole rows."""
    assert found[1].keys() == ORDERS.keys()
    for name, (measured, expected, of_rows) in found[1].items():
        assert 0.98 * expected <= measured <= 1.02 * expected, name
        assert expected <= of_rows
    _, expected, of_rows = found[1]["rounds"]
    assert expected < 0.97 * of_rows
