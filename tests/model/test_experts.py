"""Layers with experts: gradients equal megatron-core's, of auxiliary losses as well, and what cannot be had is said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from helixpipe.common.errors import UserError
from helixpipe.costs.layer_patterns import kinds_of_layers, mixed_layers
from helixpipe.model import layers_of
from helixpipe.model.experts.checks import check_experts
from helixpipe.program.stages import EXPERTS
from tests.distributed import run_ranks
from tests.model import experts
from tests.model.common import make_config, make_options


@pytest.fixture(scope="module")
def differences() -> dict[str, tuple[float, str]]:
    (found,) = run_ranks(experts.compare, 1)
    return found


@pytest.mark.parametrize("variant", experts.VARIANTS)
def test_gradients_equal_megatron_core(differences: dict[str, tuple[float, str]], variant: str) -> None:
    difference, name = differences[variant]
    in_float32 = "softmax" in variant  # megatron-core's scores, and their gradients
    assert difference < (1e-6 if in_float32 else 1e-9), name


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_router_may_send_all_tokens_to_one_expert(ranks: int) -> None:
    """Which one of two expert-parallel ranks has; the other's experts get none."""
    for found in run_ranks(experts.one_expert, ranks):
        assert sorted(found["load"]) == [0, 0, 0, 24]
        assert found["finite"] and not found["missing"]


def test_a_backward_before_all_forwards_of_its_microbatch_is_refused() -> None:
    (found,) = run_ranks(experts.too_early, 1)
    assert found.startswith("--moe-aux-loss-coeff needs all chunks of a microbatch")


def test_biases_follow_the_loads_of_all_ranks_and_are_read_where_layers_are() -> None:
    """After a step they are megatron-core's; what each rank has read of its own layers the others have as well."""
    for found in run_ranks(experts.biases, 2):
        assert found["dtype"] == torch.float32
        assert found["changed"] == found["of megatron-core"] and set(found["changed"][0]) & {0.125, -0.125}
        assert found["shared"] == [[0.25, 0.5, 0.75, 1.0], [0.0] * 4, [1.25, 1.5, 1.75, 2.0], [0.0] * 4]
        assert found["of a shell"] == [1.25, 1.5, 1.75, 2.0]


def test_sinkhorn_deals_out_the_tokens_of_a_microbatch() -> None:
    (found,) = run_ranks(experts.sinkhorn, 1)
    dealt, best = found["loads"]
    assert max(dealt) - min(dealt) < max(best) - min(best) and sum(dealt) == sum(best) == 24
    assert found["chunks"].endswith("it cannot be had with sequences in chunks.")


def test_balance_over_microbatches_and_data_parallel_ranks() -> None:
    """In whatever order forwards and backwards run, if only all forwards up to a backward's microbatch come first."""
    for results in run_ranks(experts.balanced_over_a_step, 2):
        for order in experts.ORDERS:
            error, parameter = results[order]
            assert error < 1e-9, (order, parameter)
        assert results["too early"].startswith(
            "--moe-router-load-balancing-type global_aux_loss needs all microbatches"
        )


def test_evaluation_counts_nothing() -> None:
    assert run_ranks(experts.evaluated, 1) == [0]


@pytest.mark.parametrize(
    ("frequency", "mixed"), [(1, [1, 1, 1]), (2, [1, 0, 1]), (3, [1, 0, 0]), ((0, 1, 1), [0, 1, 1])]
)
def test_layers_with_experts(frequency: Any, mixed: list[int]) -> None:
    kinds = kinds_of_layers(3, (), (), mixed_layers(frequency))
    assert [int(each[-1] == EXPERTS) for each in kinds] == mixed
    given = list(frequency) if isinstance(frequency, tuple) else frequency
    assert layers_of(make_config("experts", num_layers=3, moe_layer_freq=given)) == kinds
    assert EXPERTS not in str(layers_of(make_config("llama")))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"moe_token_dispatcher_type": "flex"}, "--moe-token-dispatcher-type flex .* are for GPUs"),
        (
            {"moe_router_load_balancing_type": ["aux_loss", "sinkhorn"], "moe_aux_loss_coeff": [0.1, 0.1]},
            "--moe-router-load-balancing-type must be none, aux_loss, seq_aux_loss or global_aux_loss",
        ),
        ({"moe_shared_expert_overlap": True}, "--moe-shared-expert-overlap is not supported"),
        ({"moe_input_jitter_eps": 0.1}, "--moe-input-jitter-eps is not supported"),
        ({"tensor_model_parallel_size": 2}, "--num-experts 4 with --tensor-model-parallel-size 2 needs --sequence-"),
        ({"moe_router_topk": 5}, "--moe-router-topk 5 must be at most --num-experts 4"),
    ],
)
def test_what_cannot_be_had_is_said(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        check_experts(make_config("experts", **changes), make_options("experts", False))


def test_slices_of_the_mlp_are_refused_with_experts() -> None:
    with pytest.raises(UserError, match="--chunk-size 4 slices an MLP of all tokens, which --num-experts 4 replaces"):
        check_experts(make_config("experts"), replace(make_options("experts", False), chunk_size=4))
    check_experts(make_config("llama"), replace(make_options("llama", False), chunk_size=4))


def test_halves_with_a_capacity_are_refused() -> None:
    halves = replace(make_options("experts", False), overlap_tp_comm="halves")
    with pytest.raises(UserError, match="--overlap-tp-comm halves routes each half by itself, and --moe-expert-capac"):
        check_experts(make_config("experts", moe_expert_capacity_factor=1.0), halves)
    check_experts(make_config("experts"), halves)


@pytest.mark.parametrize(("dispatcher", "sent"), [("alltoall", [2, 1]), ("allgather", [3, 1])])
def test_tokens_travel_while_other_work_runs(dispatcher: str, sent: list[int]) -> None:
    """Of a forward at its pauses: tokens and probabilities, and where they go; what comes back. Of a backward where
    another unit's forward runs: the gradient of what came back; of tokens and of probabilities."""
    for at_pauses, at_steps in run_ranks(experts.beside_exchanges, 2, dispatcher):
        assert at_pauses == sent
        assert at_steps == [1, 2]
