"""What schedules are told of costs and memory by the training program's flags."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron.core.optimizer import Adam
from torch.optim import AdamW

from helixpipe.common.errors import UserError
from helixpipe.costs.hardware import GIB, HARDWARE
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import Layout
from helixpipe.costs.profile_costs import ProfileCosts
from helixpipe.costs.verdict import tensor_limit
from megatron.pretrain.plan.costs import memory_limit, model_shape, training_costs
from megatron.pretrain.plan.programs import make_program
from tests.profile.test_profile import make_profile
from tests.training.helpers import config


def saved_profile(path: Path, hidden_flags: str = "") -> str:
    """Of the model that the base command line trains."""
    shape = model_shape(config(hidden_flags))
    make_profile(model=shape, layout=Layout(micro_batch_size=2, element_bytes=4), seq_length=32).save(path)
    return str(path)


def test_memory_is_limited_by_what_the_flags_say() -> None:
    assert memory_limit(config()) is None
    assert memory_limit(config("--hardware a800")) == tensor_limit(HARDWARE["a800"].memory)
    assert memory_limit(config("--hardware a800 --memory-limit 7.5")) == 7.5 * GIB
    assert memory_limit(config("--hardware a800 --memory-limit 500")) == tensor_limit(HARDWARE["a800"].memory)
    assert memory_limit(config("--memory-limit 500")) == 500 * GIB


def test_costs_are_the_hardwares() -> None:
    costs = training_costs(config("--hardware h20 --bf16"))
    assert isinstance(costs, ModelCosts)
    assert (costs.hardware.name, costs.layout.element_bytes, costs.seq_length) == ("h20", 2, 32)
    assert training_costs(config()).layout.element_bytes == 4
    on_host = "--bf16 --use-distributed-optimizer --optimizer-cpu-offload --optimizer-offload-fraction 0.25"
    assert training_costs(config(on_host)).adam_on_host == 0.25
    assert costs.adam_on_host == 0


def test_costs_are_those_of_a_profile(tmp_path: Path) -> None:
    path = saved_profile(tmp_path / "profile.json")
    flags = f"--cost-profile {path} --pipeline-model-parallel-size 2 --pipeline-schedule zb1p"
    chosen = config(flags, world=2)
    assert isinstance(training_costs(chosen), ProfileCosts)
    assert make_program(chosen, 4).schedule == "zb1p"


@pytest.mark.parametrize(
    ("flags", "captured"),
    [
        ("", True),
        ("--hidden-dropout 0.1", False),
        ("--reset-attention-mask", False),
        ("--variable-seq-lengths --micro-batch-size 1 --global-batch-size 2", False),
    ],
)
def test_graphs_are_counted_where_units_run_as_graphs(tmp_path: Path, flags: str, captured: bool) -> None:
    """With costs of named hardware and with measured ones, whose file says nothing of graphs."""
    flags = f"--cuda-graphs auto --attention-dropout 0 --hidden-dropout 0 {flags}"
    micro = config(flags).training.micro_batch_size or 1
    make_profile(
        model=model_shape(config(flags)), layout=Layout(micro_batch_size=micro, element_bytes=4), seq_length=32
    ).save(tmp_path / "profile.json")
    for given in (flags, f"{flags} --cost-profile {tmp_path / 'profile.json'}"):
        assert training_costs(config(given)).captures == captured
    assert not training_costs(config(f"--cost-profile {tmp_path / 'profile.json'} {flags} --cuda-graphs off")).captures


def test_temporaries_of_adam_count_where_it_is_torchs() -> None:
    """Megatron-core takes the one of Transformer Engine or apex where one of them is installed."""
    chosen = config("--bf16")
    assert training_costs(chosen).fused_adam == (Adam is not AdamW)
    assert (training_costs(chosen).update_memory(model_shape(chosen).pieces) == 0) == (Adam is not AdamW)


MIXED = "--position-embedding-type rope --window-size 7,0 --window-attn-skip-freq 2 --no-rope-freq 2"
"""Layers of two kinds."""


def test_a_profile_of_layers_that_are_unlike_is_of_those_it_has(tmp_path: Path) -> None:
    """Wherever in the model they are."""
    path = saved_profile(tmp_path / "profile.json", MIXED)
    for flags in (MIXED, MIXED.replace("freq 2", "freq [0,1,0,1]"), "--position-embedding-type rope"):
        chosen = config(f"{flags} --cost-profile {path}")
        assert training_costs(chosen).layer_kinds(4) == model_shape(chosen).kinds_of(4)
    for flags, sentence in (
        (MIXED.replace("7,0", "6,0"), "was measured with --window-size 7,0, not 6,0."),
        (
            MIXED.replace("rope-freq 2", "rope-freq [1,0,0,0]"),
            "measure again with what makes layers differ, such as --window-attn",
        ),
    ):
        plain = saved_profile(tmp_path / "plain.json", MIXED.split(" --no")[0])
        with pytest.raises(UserError) as caught:
            config(f"{flags} --cost-profile {path if '6,0' in flags else plain}")
        assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--hidden-size 128", "was measured with --hidden-size 64, not 128."),
        ("--swiglu", "was measured with --ffn-hidden-size 256, not"),
        ("--seq-length 16", "was measured with --seq-length 32, not 16."),
        ("--micro-batch-size 1", "was measured with --micro-batch-size 2, not 1."),
        ("--chunk-size 8", "was measured with --chunk-size 0, not 8."),
        ("--loss-chunk-size 8", "was measured with --loss-chunk-size 0, not 8."),
        ("--num-experts 4", "was measured with --num-experts 0, not 4."),
    ],
)
def test_a_profile_of_something_else_is_refused(tmp_path: Path, flags: str, sentence: str) -> None:
    path = saved_profile(tmp_path / "profile.json")
    with pytest.raises(UserError) as caught:
        config(f"--cost-profile {path} {flags}")
    assert sentence in str(caught.value)


def test_a_file_that_is_no_profile_is_refused_by_the_flag_that_named_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^--cost-profile: cannot read"):
        config(f"--cost-profile {tmp_path / 'none.json'}")


def test_what_is_offloaded_must_fit_into_the_host() -> None:
    flags = "--pipeline-schedule gpipe --offload-activations 1 --min-offloaded-tensor-size 0 --host-memory"
    config(f"{flags} 1")
    with pytest.raises(
        UserError, match=r"GiB of its host's memory, and 0\.001 are its own: offload about 0\.\d+ of it"
    ):
        config(f"{flags} 0.001")
