"""examples/ of the papers: models, sizes, batches and chunks are the published ones, and the programs can run."""

from __future__ import annotations

from pathlib import Path

import pytest

from helixpipe.costs.models import MODELS
from megatron.pretrain.plan.costs import model_shape
from tests.integration.example_scripts import commands, fakes, launched, run

__all__ = ["fakes"]  # a fixture

EQUAL = ("--pipe-sp-strategy", "average")  # cut at once


@pytest.mark.parametrize(
    ("model", "tokens", "sizes"),
    [
        ("2.7b", 32, (1, 8)),
        pytest.param("7b", 128, (8, 4), marks=pytest.mark.thorough),
        pytest.param("13b", 48, (8, 4), marks=pytest.mark.thorough),
        ("30b", 64, (8, 8)),
    ],
)
def test_setups_of_seq1f1b(model: str, tokens: int, sizes: tuple[int, int], fakes: Path) -> None:
    _, launch = commands("seq1f1b/train.sh", fakes, MODEL=model, SEQ=f"{tokens}k", BATCH="32")
    config = launched([*launch, *EQUAL], sizes[0] * sizes[1])
    shape, parallel = model_shape(config), config.parallel
    preset = MODELS.get(f"seq1f1b-{model}")
    if preset is not None:
        assert (shape.layers, shape.hidden, shape.heads, shape.ffn, shape.tied) == (
            *(preset.layers, preset.hidden, preset.heads, preset.ffn, preset.tied),
        )
    assert (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size) == sizes
    assert (parallel.pipeline_schedule, config.chunks.count(), config.training.global_batch_size) == ("seq1f1b", 4, 32)
    assert config.model.seq_length == tokens * 1024


@pytest.mark.parametrize(
    ("hidden", "tokens", "samples", "nodes"), [(1024, 4, 16, 2), (2048, 8, 8, 2), (4096, 16, 4, 1)]
)
def test_setups_of_weipipe(hidden: int, tokens: int, samples: int, nodes: int, fakes: Path) -> None:
    variables = {"MODEL": str(hidden), "SEQ": f"{tokens}k", "NODES": str(nodes)}
    _, launch = commands("weipipe/train.sh", fakes, EXTRA="--no-weipipe-eager --weipipe-slots 3", **variables)
    config = launched(launch, 8 * nodes)
    shape = model_shape(config)
    assert (shape.layers, shape.hidden, shape.heads, shape.gated, shape.tied) == (32, hidden, 32, True, False)
    assert config.parallel.pipeline_model_parallel_size == 8 * nodes
    training = config.training
    assert (training.micro_batch_size, training.global_batch_size) == (samples, 4 * 8 * nodes * samples)


def test_setups_of_infinipipe(fakes: Path) -> None:
    for model, tokens in (("7b", 48), ("13b", 96), ("30b", 192)):
        _, launch = commands("infinipipe/train.sh", fakes, MODEL=model, SEQ=f"{tokens}k")
        config = launched([*launch, "--recompute-granularity", "full", "--no-recompute-early"], 32)
        shape, preset = model_shape(config), MODELS[f"infinipipe-{model}"]
        assert (shape.layers, shape.hidden, shape.heads) == (preset.layers, preset.hidden, preset.heads)
        assert config.data.variable_seq_lengths and config.training.global_batch_size == 512
        assert config.parallel.pipeline_model_parallel_size == 4 and config.model.seq_length == tokens * 1024


@pytest.mark.parametrize("paper", ["seq1f1b", "weipipe", "infinipipe"])
@pytest.mark.parametrize(("name", "value", "valid"), [("MODEL", "2b", "must be"), ("SEQ", "32768", "16k")])
def test_wrong_variables_are_refused_in_one_line(paper: str, name: str, value: str, valid: str, fakes: Path) -> None:
    done = run(f"{paper}/train.sh", fakes, **{name: value})
    assert done.returncode != 0 and done.stderr.count("\n") == 1 and done.stdout == ""
    assert f"{name}={value}" in done.stderr and (valid in done.stderr or paper == "infinipipe")
