"""Calls as NVIDIA's own unit tests make them: a model that is one matrix, and a plain ModelParallelConfig."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helixpipe.model.device import prepare, redirect

prepare()  # before megatron-core is imported, whose notices it silences

from megatron.core import ModelParallelConfig, parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func as get_cores
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import transformer_block
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from helixpipe.common.errors import UserError
from helixpipe.drop_in import placement
from helixpipe.drop_in.checks import stages_with_mtp
from helixpipe.drop_in.chunks import Chunks
from schedules import Shape, build
from schedules.drop_in import ForwardBackward, get_forward_backward_func
from tests.distributed import run_ranks

WIDTH = 4


class Matrix(torch.nn.Linear):
    def __init__(self, config: Any):
        super().__init__(WIDTH, WIDTH, bias=False)
        torch.nn.init.constant_(self.weight, 0.3)
        self.config, self.model_type = config, "test"
        self.received: Tensor | None = None

    def set_input_tensor(self, tensor: list[Tensor] | None) -> None:
        self.received = tensor[0] if isinstance(tensor, list) else tensor


def step(function: Any, ranks: int, tokens: int, models: int = 1, **more: Any) -> tuple[list[Any], list[Tensor | None]]:
    """Return the losses and the gradients of a step in which each stage gives on `tokens` rows."""
    config = ModelParallelConfig(pipeline_model_parallel_size=ranks, pipeline_dtype=torch.float)
    config.hidden_size = WIDTH
    if not isinstance(function, ForwardBackward):
        config.fine_grained_activation_offloading = False  # which megatron-core itself looks for, where it trains
    model: list[Any] = [Matrix(config) for _ in range(models)]

    def forward_step(data: Any, model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        rows = torch.ones(tokens, 2, WIDTH) if model.received is None else model.received
        return model(rows), lambda output: (output.mean(), {"loss": output.mean().item()})

    call = {"num_microbatches": 4, "seq_length": 12, "micro_batch_size": 2, "data_iterator": [None] * models} | more
    with redirect():
        losses = function(forward_step_func=forward_step, model=model, **call)
    return losses, [parameter.grad for each in model for parameter in each.parameters()]


def calls(rank: int, world_size: int) -> None:
    parallel_state.initialize_model_parallel(1, 1, create_gloo_process_groups=False)
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp", "pp", "embd", "pos_embd", "dp_cp"])
    for more in ({}, {"pg_collection": groups}):
        lengthless: dict[str, Any] = {"seq_length": None, "micro_batch_size": None, **more}
        ours = step(get_forward_backward_func("none"), 1, 12, **lengthless)
        check_alike(ours, step(get_cores(), 1, 12, **lengthless))
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(1, 2, create_gloo_process_groups=False)
    function = get_forward_backward_func("1f1b")
    for tokens in (6, 12, 18):  # one after the other: no length stays from the call before
        check_alike(*(step(each, 2, tokens, decoder_seq_length=tokens) for each in (function, get_cores())))
    with pytest.raises(ValueError, match="seq_length is None, which only a model"):
        step(function, 2, 12, seq_length=None)
    interleaved = get_forward_backward_func("interleaved-1f1b")
    step(interleaved, 2, 12, 2, decoder_seq_length=6)  # which megatron-core's interleaved schedule leaves aside
    with pytest.raises(RuntimeError, match="data_iterator is a list of 1: give one for each"):
        step(interleaved, 2, 12, 2, data_iterator=[None])
    with pytest.raises(RuntimeError, match="needs a number of microbatches that is a multiple of"):
        step(interleaved, 2, 12, 2, num_microbatches=3)


def lay_out_a_v(rank: int, world_size: int) -> None:
    names = ("megatron.training", "megatron.training.utils")  # of Megatron-LM's checkout
    sys.modules.update({name: ModuleType(name) for name in names})
    parallel_state.initialize_model_parallel(1, 2, 2, create_gloo_process_groups=False)
    placement.install(
        placement.stages_of_rank(lambda ranks, virtual: build("zbv", Shape(ranks, 4, 2 * ranks * virtual)))
    )
    config: Any = SimpleNamespace(pipeline_model_parallel_layout="Et|t|t|tL")
    with pytest.raises(UserError, match=r"^--pipeline-model-parallel-layout places stages itself; leave it out"):
        transformer_block.get_num_layers_to_build(config, 1, rank)


def test_a_layout_is_refused_under_a_v() -> None:
    run_ranks(lay_out_a_v, 2)


def check_alike(ours: Any, cores: Any) -> None:
    assert ours[0] == cores[0], (ours, cores)
    for gradient, expected in zip(ours[1], cores[1], strict=True):
        torch.testing.assert_close(gradient, expected, rtol=0, atol=0)


def test_plain_calls_do_as_megatron_cores() -> None:
    run_ranks(calls, 2)


@given(ranks=st.integers(2, 5), turns=st.integers(1, 3), place=st.integers(0, 9), depth=st.integers(1, 3))
def test_hidden_states_of_further_tokens_follow_from_their_stage_on(
    ranks: int, turns: int, place: int, depth: int
) -> None:
    """Where megatron-core's layout has multi-token prediction on another rank than the last, on its last turn."""
    last = ranks * turns - 1
    mtp = last - place % ranks if turns > 1 else max(last - place % ranks, 1)
    flat = [["decoder"] for _ in range(last + 1)]
    flat[mtp:] = [[] for _ in flat[mtp:]]
    flat[0] = ["embedding", *flat[0]]
    flat[mtp] = [*flat[mtp], *["mtp"] * depth]
    flat[last] = [*flat[last], "loss"]
    layout = PipelineParallelLayerLayout([[LayerType[each] for each in stage] for stage in flat], ranks)
    number = sum(stage.count("decoder") for stage in flat)
    alone = layout.validate_layer_layout(number, depth)
    assert alone == (mtp < last)
    config: Any = SimpleNamespace(
        pipeline_model_parallel_layout=layout, mtp_standalone=alone, mtp_num_layers=depth, pipeline_dtype=torch.float
    )
    name = "1f1b" if turns == 1 else "interleaved-1f1b"
    program = build(name, Shape(ranks, ranks, 2 * ranks * turns, virtual_stages=turns if turns > 1 else None))
    with_mtp = {stage.pieces[-1] for stage in stages_with_mtp(program, config)}
    chunks = Chunks([], config, [], None, with_mtp)
    chunks.call = SimpleNamespace(shape=torch.Size((8, 2, WIDTH)), seq_length=16)  # type: ignore[assignment]
    for index, stage in enumerate(program.stages[:-1]):
        rows = 8 * (1 + depth) if index >= mtp else 8
        assert chunks.payload_shapes(stage.pieces[-1], 2, 16) == (torch.Size((rows, 2, WIDTH)),)
