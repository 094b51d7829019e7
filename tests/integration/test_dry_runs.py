"""examples/ with DRY_RUN=1: what is predicted and the command, on any machine, and nothing started or written."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from helixpipe.common.errors import UserError
from tests.integration.example_scripts import EXAMPLES, PLANNED_AT_ONCE, STARTED, commands, environment, fakes, launched
from tests.training.tokenizers import huggingface_folder

__all__ = ["fakes"]  # a fixture


@pytest.mark.parametrize("script", STARTED)
def test_a_dry_run_starts_nothing_wherever_it_is(script: str, fakes: Path, tmp_path: Path) -> None:
    """From any folder, without SLURM, addresses or data: the prediction, then the command; nothing is written."""
    done = subprocess.run(
        ["bash", *f"{EXAMPLES}/{script}".split()],
        cwd=tmp_path,
        env=environment(fakes, DRY_RUN="1", RUN=str(tmp_path / "run")),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stdout.splitlines()
    assert first.startswith("PREDICT ") and "torchrun" in last and " pretrain_gpt.py --" in last
    assert not re.search("^started ", done.stdout, re.MULTILINE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin"]


@pytest.mark.parametrize("script", STARTED)
def test_a_header_has_no_predicted_figures(script: str) -> None:
    """They follow from costs, which change: a dry run prints those of today."""
    header = (EXAMPLES / script.split()[0]).read_text(encoding="utf-8").split("set -euo")[0]
    assert not re.search(r"[0-9.]+ s (a step|over)|[0-9]+ GiB of|imulated", header)


@pytest.mark.parametrize(("batch", "name"), [(256, "weipipe"), (32, "1f1b")])
def test_two_hosts_take_what_is_predicted_to_be_fastest(
    batch: int, name: str, fakes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over 1 Gbit Ethernet weights are less than the activations of many microbatches, and more than those of few."""
    from tools.preflight import Network, fastest

    launch = commands("two_hosts.sh", fakes, GLOBAL_BATCH=str(batch), NETWORK_GBPS="0.88")[1]
    assert launch[launch.index("--pipeline-schedule") + 1] == "weipipe"  # what the fake prediction says
    monkeypatch.setenv("WORLD_SIZE", "2")
    flags = launch[launch.index("pretrain_gpt.py") + 1 :]
    assert fastest(flags, ("1f1b", "weipipe"), 1, Network(0.88, 1)) == name
    with pytest.raises(UserError, match="--preflight-fastest needs --preflight-compare"):
        fastest(flags, (), 1, None)


@pytest.mark.parametrize(
    ("script", "ranks", "nodes"),
    [
        ("one_node.sh", 8, 1),
        ("two_hosts.sh", 2, 2),
        ("slurm/pretrain_llama_a800.sbatch", 32, 4),
        ("slurm/pretrain_llama_h20.sbatch", 32, 4),
        ("slurm/continue_hf_h100.sbatch", 32, 4),
    ],
)
def test_a_dry_run_predicts_and_prints_the_same_flags(script: str, ranks: int, nodes: int, fakes: Path) -> None:
    prediction, launch = commands(script, fakes)
    flags = launch[launch.index("pretrain_gpt.py") + 1 :]
    assert prediction[0] == "tools/preflight.py" and prediction[-1] == "--preflight-predict-only"
    assert prediction[-1 - len(flags) : -1] == flags
    assert ("--standalone" in launch) == (nodes == 1)
    config = launched(launch, ranks)
    sizes = config.parallel
    product = sizes.pipeline_model_parallel_size * sizes.context_parallel_size * sizes.tensor_model_parallel_size
    assert product == ranks
    assert config.data.mock_data and config.checkpoint.save == config.checkpoint.load
    folder = str(huggingface_folder(fakes / "tokenizer", words=9000))
    data = commands(script, fakes, DATA="data/mine", TOKENIZER=folder, EXTRA=f"--seed 7 {PLANNED_AT_ONCE}")[1]
    config = launched(data, ranks)
    assert (config.data.data_path, config.data.tokenizer_model, config.training.seed) == (("data/mine",), folder, 7)
    unit = 128 * config.parallel.tensor_model_parallel_size
    assert config.padded_vocabulary == -(-9000 // unit) * unit
