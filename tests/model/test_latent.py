"""Multi-latent attention equals megatron-core's: every gradient, cut or whole, on one rank or two."""

from __future__ import annotations

from tests.distributed import run_ranks
from tests.model import latent


def test_equal_to_megatron_core() -> None:
    for results in run_ranks(latent.compare, 2):
        assert len(results) == 8 * len(latent.VARIANTS)
        for case, (difference, name) in results.items():
            assert difference < 1e-9, f"{case}: {name}"
