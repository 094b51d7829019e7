"""Sequences in chunks, and offloading, through megatron-core's own GPTModel and the user's forward step: the losses,
gradients and weights of megatron-core's 1F1B, which runs sequences in one piece."""

from __future__ import annotations

from typing import Any

import pytest

from schedules.drop_in import OffloadOptions
from tests.distributed import run_ranks
from tests.drop_in.comparing import compare, left_as_it_was, with_dropout
from tests.drop_in.loop import Case

FLOAT32_TOLERANCE, FLOAT64_TOLERANCE, BF16_TOLERANCE = 5e-6, 1e-12, 5e-2

UNEVEN = (6, 4, 2)
HALF, ALL = (OffloadOptions(share, min_offloaded_tensor_size=0) for share in ("0.5", "1"))


def case(schedule: str, pp: int, m: int, chunks: int | tuple[int, ...] = 1, **settings: Any) -> Case:
    """chunks: their number, or the tokens of each."""
    options: dict[str, Any] = {"chunks": chunks} if isinstance(chunks, int) else {"chunk_lengths": chunks}
    if (offload := settings.pop("offload", None)) is not None:
        options["offload"] = offload
    settings = {"bare": settings.get("double", False)} | settings
    return Case(schedule, pp, m, options=tuple(options.items()), **settings)


WINDOW = (("window_size", (3, 0)), ("window_attn_skip_freq", 2))
EXPERTS = (
    *(("num_moe_experts", 2), ("moe_router_topk", 1), ("moe_router_pre_softmax", True)),
    *(("moe_router_load_balancing_type", "none"), ("add_bias_linear", False), ("moe_ffn_hidden_size", 24)),
)
CORE_RECOMPUTED = (("recompute_granularity", "selective"),)

CORE = [case("sppo", 2, 2, UNEVEN, llama=True, per_token=True, recompute=True, offload=HALF)]
MORE = {
    "p1": (1, [case("none", 1, 2, 3, llama=True, double=True), case("none", 1, 2, offload=HALF, tied=True)]),
    "p2": (
        2,
        [
            case("seq1f1b", 2, 1, 3, tied=True, per_token=True),
            case("seq1f1b", 2, 3, UNEVEN, llama=True, counted=True, recompute=True),
            case("sppo", 2, 2, 2, tied=True, offload=ALL),
            case("seq1f1b", 2, 5, 2, llama=True, double=True),
            case("sppo", 2, 3, UNEVEN, llama=True, counted=True, double=True, offload=HALF),
            case("1f1b", 2, 3, llama=True, counted=True, offload=ALL, recompute=True),
            case("1f1b", 2, 3, 3, llama=True, bf16=True),
            case("seq1f1b-zb", 2, 3, UNEVEN, llama=True, double=True),
            case("seq1f1b-interleaved", 2, 4, 2, v=2, llama=True, counted=True),
            case("zbv", 2, 3, 2, v=2, in_a_v=True, llama=True, recompute=True),
            case("seq1f1b", 2, 2, (5, 7), llama=True, double=True, changes=WINDOW),
            case("seq1f1b", 2, 2, UNEVEN, llama=True, counted=True, changes=CORE_RECOMPUTED),
            case("seq1f1b", 2, 2, 2, counted=True, changes=EXPERTS),
        ],
    ),
    "p4": (
        4,
        [
            case("seq1f1b", 4, 2, 2, tied=True, counted=True),
            case("sppo", 4, 3, UNEVEN, llama=True, double=True),
            case("seq1f1b-zb", 4, 5, 3, llama=True, per_token=True),
        ],
    ),
    "p2-tp2": (
        4,
        [
            case("seq1f1b", 2, 3, UNEVEN, tp=2, llama=True, sequence_parallel=True, counted=True),
            case("sppo", 2, 2, 3, tp=2, tied=True, offload=HALF),
            case("seq1f1b-zb", 2, 2, UNEVEN, tp=2, llama=True, sequence_parallel=True, recompute=True),
        ],
    ),
    "p2-dp2": (4, [case("seq1f1b", 2, 3, 2, overlap=True, distributed_optimizer=True, per_token=True)]),
}


def check(world_size: int, cases: list[Case]) -> None:
    for rank, results in enumerate(run_ranks(compare, world_size, cases, timeout=600)):
        for case, result in zip(cases, results, strict=True):
            where = f"{case} on rank {rank}: {result}"
            tolerance = FLOAT64_TOLERANCE if case.double else BF16_TOLERANCE if case.bf16 else FLOAT32_TOLERANCE
            assert result["counts"], where
            assert (result["offloaded"] > 0) == ("offload" in dict(case.options)), where
            for what in ("losses", "validation", "collected"):
                assert result[what] <= tolerance, where
            for what in ("gradients", "weights"):
                assert result[what][0] <= tolerance, where


def test_equals_megatron_core() -> None:
    check(2, CORE)


@pytest.mark.thorough
@pytest.mark.parametrize("group", MORE)
def test_more_equal_megatron_core(group: str) -> None:
    check(*MORE[group])


def test_a_model_is_left_as_it_was() -> None:
    """Outside of steps it runs whole sequences, and when the engine is closed nothing of it is left; during a step,
    what cannot be cut is refused."""
    (result,) = run_ranks(left_as_it_was, 1, case("none", 1, 2, 3, llama=True))
    told = result.pop("told")
    assert result == {"equal": [True, True], "replaced": [], "hooks": True}
    assert "an attention mask that is not causal (--reset-attention-mask)" in told[0]
    assert "an argument packed_seq_params of its forward" in told[1]


@pytest.mark.thorough
def test_dropout_is_drawn_for_each_chunk() -> None:
    ((none, some, again),) = run_ranks(with_dropout, 1, case("none", 1, 2, 3, llama=True))
    assert some == again
    assert none[0] != some[0] and none[0] == pytest.approx(some[0], rel=0.1)
    (recomputed,) = run_ranks(with_dropout, 1, case("none", 1, 2, 3, llama=True, recompute=True))
    for losses, others in zip(recomputed[1], some, strict=True):  # of the second step, so gradients of the first
        assert losses == pytest.approx(others, rel=1e-5)
