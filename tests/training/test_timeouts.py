"""How long ranks wait for each other before the job ends (torch's timeout, the watchdog's); the settings of NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest

from helixpipe.common.errors import UserError
from megatron.pretrain.config import ParallelConfig
from megatron.pretrain.config.communicators import pipeline_settings
from megatron.pretrain.plan.programs import full_batch, make_planner
from tests.training.helpers import config

LONG = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 131072 --max-position-embeddings 131072 "
    "--micro-batch-size 1 --global-batch-size 32 --pipeline-model-parallel-size 2 --bf16"
)


def minutes(flags: str) -> tuple[float | None, float | None]:
    """(torch's, the watchdog's)."""
    parallel = config(flags, world=2).parallel
    stall = parallel.stall_timeout_seconds
    return parallel.distributed_timeout_minutes, None if stall is None else stall / 60


def test_the_default_follows_from_a_long_step() -> None:
    chosen = config(f"{LONG} --hardware h20", world=2)
    step = make_planner(chosen).plan(full_batch(chosen)).simulation.makespan / 60
    assert step > 10
    assert minutes(f"{LONG} --hardware h20") == pytest.approx((3 * step, 1.5 * step))


def test_the_default_is_megatrons_where_steps_are_short_or_unknown() -> None:
    assert minutes("--hardware h20 --pipeline-model-parallel-size 2") == (10, 5)
    assert minutes(LONG) == (10, 5)


def test_what_is_given_counts() -> None:
    assert minutes(f"{LONG} --hardware h20 --distributed-timeout-minutes 4") == (4, 2)
    assert minutes(f"{LONG} --hardware h20 --stall-timeout-seconds 900")[1] == 15
    assert minutes("--distributed-timeout-minutes 4 --stall-timeout-seconds 0") == (4, 0)


# ------------------------------------------------------------------------------------------------------ NCCL's settings


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "nccl.yaml"
    path.write_text("pp: {max_ctas: 4, is_high_priority_stream: false}\ndp: {cga_cluster_size: 2, net_name: Socket}\n")
    return path


def test_the_pipelines_settings_are_those_of_pp(file: Path) -> None:
    chosen = config(f"--nccl-communicator-config-path {file}")
    assert chosen.warnings == ()
    assert pipeline_settings(chosen.parallel) == {"max_ctas": 4, "is_high_priority_stream": False}
    high = config(f"--nccl-communicator-config-path {file} --high-priority-stream-groups dp pp").parallel
    assert high.high_priority_stream_groups == ("dp", "pp")
    assert pipeline_settings(high) == {"max_ctas": 4, "is_high_priority_stream": True}
    assert pipeline_settings(ParallelConfig()) == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- pp", "must hold a mapping from process groups, such as pp, to settings."),
        ("pp: 4", "pp must be a mapping of is_high_priority_stream, min_ctas, max_ctas, cga_cluster_size, net_name."),
        ("pp: {ctas: 4}", "pp has 'ctas', which is none of is_high_priority_stream, min_ctas"),
        ("dp: {max_ctas: 0}", "max_ctas of dp is 0 and must be a whole number above 0."),
        ("dp: {max_ctas: true}", "max_ctas of dp is True and must be a whole number above 0."),
        ("pp: {is_high_priority_stream: 1}", "is_high_priority_stream of pp is 1 and must be true or false."),
        ("pp: {net_name: eth0}", "net_name of pp is 'eth0' and must be IB or Socket."),
        ("pp: {min_ctas: 4, max_ctas: 2}", "min_ctas of pp is above its max_ctas."),
        ("pp: {", "cannot be read: "),
    ],
)
def test_a_wrong_file_is_one_sentence(text: str, words: str, file: Path) -> None:
    file.write_text(text)
    with pytest.raises(UserError) as refusal:
        config(f"--nccl-communicator-config-path {file}")
    sentence = str(refusal.value)
    assert sentence.startswith(f"--nccl-communicator-config-path {file}") and words in sentence
    assert "\n" not in sentence


def test_a_file_that_is_missing_is_one_sentence() -> None:
    with pytest.raises(UserError, match=r"^--nccl-communicator-config-path none\.yaml cannot be read: .*none\.yaml"):
        config("--nccl-communicator-config-path none.yaml")
