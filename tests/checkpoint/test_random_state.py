"""The random state of a checkpoint is what the next numbers are drawn from."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from helixpipe.model.device import prepare

prepare()  # before megatron-core is imported

from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron.pretrain.checkpoint import tensors


def test_numbers_go_on_where_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state: None)
    state = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.get_rng_state(),
        "rng_tracker_states": get_cuda_rng_tracker().get_states(),
    }

    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    first = draw()
    assert all(a != b for a, b in zip(first, draw(), strict=True))
    tensors.set_rng_state(state)
    assert draw() == first
