"""examples/: every script's step fits into its GPUs' memory, at every size that the script documents."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest

from megatron.pretrain.arguments import parse_and_plan
from megatron.pretrain.plan.programs import step_verdict
from tests.integration.example_scripts import EXAMPLES, STARTED, commands, fakes

__all__ = ["fakes"]  # a fixture

MODELS = {"helixpipe/train.sh": ("1.3b", "3b", "7b"), "sppo/train.sh": ("7b", "13b", "65b")}
ON_GPUS = [
    name
    for name in STARTED
    if name not in MODELS and re.search("--hardware|llama3_8b", (EXAMPLES / name.split()[0]).read_text())
]


def fits(script: str, fakes: Path, **variables: str) -> None:
    """Assert that the step of a script's launch fits, with no figure above the GPU's memory."""
    _, launch = commands(script, fakes, **variables)
    nodes = int(launch[launch.index("--nnodes") + 1]) if "--nnodes" in launch else 1
    ranks = nodes * int(launch[launch.index("--nproc-per-node") + 1])
    environ = {"WORLD_SIZE": str(ranks)}
    config, plans = parse_and_plan(launch[launch.index("pretrain_gpt.py") + 1 :], environ=environ)
    verdict = step_verdict(config, plans)
    assert verdict is not None and verdict.fits, (script, variables, verdict and verdict.sentence)
    assert verdict.allocated <= verdict.reserved <= verdict.gpu
    assert not [warning for warning in config.warnings if "fit" in warning]


def sizes_of_sppo() -> list[tuple[str, str]]:
    """Return the models and lengths of the script's table of published numbers of chunks."""
    cases = re.findall(r"^ +([\w*.-]+k(?: \| [\w*.-]+k)*)\) published=", (EXAMPLES / "sppo/train.sh").read_text(), re.M)
    named = [size.split("-") for case in cases for size in case.split(" | ")]
    every = [(m, tokens) for model, tokens in named for m in (MODELS["sppo/train.sh"] if model == "*" else [model])]
    assert len(every) == 15 and ("13b", "512k") in every
    return every


def sizes_of_helixpipe() -> list[tuple[str, str, str, str]]:
    """Return the models, lengths, numbers of nodes and GPUs that the script's comment names."""
    text = (EXAMPLES / "helixpipe/train.sh").read_text()
    lengths, nodes = re.findall(r"\b\d+k\b", re.findall("# SEQ .*", text)[0]), re.findall("# NODES .*", text)[0]
    hardware = re.findall(r"HARDWARE  (\w+) or (\w+)", text)[0]
    found = list(product(MODELS["helixpipe/train.sh"], lengths, re.findall(r"\b\d\b", nodes), hardware))
    assert len(found) == 3 * 4 * 3 * 2
    return found


@pytest.mark.parametrize("script", ON_GPUS)
def test_scripts(script: str, fakes: Path) -> None:
    fits(script, fakes)


@pytest.mark.parametrize("nodes", ["2", "8"])
@pytest.mark.parametrize("script", [name for name in ON_GPUS if name.endswith(".sbatch")])
@pytest.mark.thorough
def test_batch_scripts_on_other_numbers_of_nodes(script: str, nodes: str, fakes: Path) -> None:
    fits(script, fakes, NODES=nodes)


def test_the_largest_setup_of_helixpipe(fakes: Path) -> None:
    fits("helixpipe/train.sh", fakes, MODEL="7b", SEQ="128k", NODES="4", HARDWARE="a800")


@pytest.mark.parametrize(("model", "tokens", "nodes", "hardware"), sizes_of_helixpipe())
@pytest.mark.thorough
def test_setups_of_helixpipe(model: str, tokens: str, nodes: str, hardware: str, fakes: Path) -> None:
    fits("helixpipe/train.sh", fakes, MODEL=model, SEQ=tokens, NODES=nodes, HARDWARE=hardware)


@pytest.mark.parametrize(
    ("model", "tokens"),
    [size if size == ("13b", "512k") else pytest.param(*size, marks=pytest.mark.thorough) for size in sizes_of_sppo()],
)
def test_setups_of_sppo(model: str, tokens: str, fakes: Path) -> None:
    fits("sppo/train.sh", fakes, MODEL=model, SEQ=tokens)
