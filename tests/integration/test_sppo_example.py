"""examples/sppo: the model, the sizes and the chunks are the published ones, and the program can run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from helixpipe.costs.models import MODELS
from megatron.pretrain.plan.costs import model_shape
from tests.integration.example_scripts import commands, fakes, launched

__all__ = ["fakes"]  # a fixture

SETUPS = [("7b", 512, (8, 4), 32), ("13b", 640, (8, 8), 48), ("65b", 600, (16, 8), 64), ("7b", 1024, (8, 4), 160)]


@pytest.mark.parametrize(
    ("model", "tokens", "sizes", "chunks"),
    [*SETUPS[:2], *(pytest.param(*setup, marks=pytest.mark.thorough) for setup in SETUPS[2:])],
)
def test_setups_of_sppo(model: str, tokens: int, sizes: tuple[int, int], chunks: int, fakes: Path) -> None:
    _, launch = commands("sppo/train.sh", fakes, MODEL=model, SEQ=f"{tokens}k")
    assert launch[launch.index("--nnodes") + 1] == str(sizes[0] * sizes[1] // 8)
    flags = [*launch, "--pipe-sp-strategy", "average"]  # cut at once
    config = launched(flags, sizes[0] * sizes[1])
    preset = replace(MODELS[f"sppo-{model}"], name="the model", seq_length=tokens * 1024)
    assert replace(model_shape(config), vocab=preset.vocab, vocab_multiple=preset.vocab_multiple) == preset
    parallel = config.parallel
    assert (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size) == sizes
    assert (parallel.pipeline_schedule, config.chunks.count(), config.training.global_batch_size) == ("sppo", chunks, 1)
