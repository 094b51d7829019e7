"""Every schedule on our own PipelineModel by the drop-in: losses and every parameter's gradient as in one process."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helixpipe.common.errors import UserError
from helixpipe.drop_in.own_model import read
from helixpipe.program.stages import Piece
from schedules.drop_in import OffloadOptions, RecomputeOptions, get_forward_backward_func
from tests.distributed import run_ranks
from tests.drop_in.own_loop import Case, compare, dropout, optimize, refusals, run_documented
from tests.selection import graded

TOLERANCE = 5e-6
BF16_TOLERANCE = 3e-2

FULL = RecomputeOptions("full")
GROUPS: dict[str, tuple[int, int, list[Case]]] = {  # pipeline and context-parallel sizes on two ranks, and cases
    "sizes": (
        2,
        1,
        [
            Case("seq1f1b", (1, 5), {"chunk_lengths": (5, 4, 3)}),
            Case("seq1f1b-zb", (1, 5), {"chunks": 2, "zb_max_inflight": 3}),
            Case("1f1b", (1, 5)),
            Case("seq1f1b", (3,), {"chunks": 3}, tied=False, style="mixed"),
            Case("chimera", (2, 4)),
            Case("helix", (2, 4), {"helix_folds": 1}),
            Case("helix", (4,), {"helix_ship": "qkv"}, tied=False),
            Case("terapipe", (1, 3), {"chunks": 4, "offload": OffloadOptions("0.7", None, 0)}, tied=False),
            Case("sppo", (1, 3), {"chunks": 3, "sppo_ahead": 1}),
            Case("weipipe", (1, 4)),
            Case("wzb2", (3,), {"weipipe_slots": 1}, tied=False, per_token=True),
        ],
    ),
    "options": (
        2,
        1,
        [
            Case("seq1f1b-interleaved", (3,), {"chunks": 2, "virtual_stages": 2, "kv_grad_fp32": True}, per_token=True),
            Case("zbv", (4,), per_token=True),
            Case("seq1f1b", (4,), {"chunks": 3, "recompute": FULL}, bare=True),
            Case("interleaved-1f1b", (2,), {"virtual_stages": 2, "recompute": FULL}, overlap=True),
            Case("helix", (4,), {"recompute": RecomputeOptions("selective"), "helix_ship": "none"}, per_token=True),
            Case("adapipe", (3,)),
            Case("zb1p", (3, 1), style="further"),
            Case("sppo", (2, 1), {"chunks": 2}, style="further"),
            Case("weipipe", (2,), {"chunks": 2}, style="further"),
            Case("seq1f1b", (2,), {"chunks": 2}, bf16=True),
        ],
    ),
    "context-parallel": (
        1,
        2,
        [
            Case("seq1f1b", (1, 4), {"chunks": 3}),
            Case("none", (2,), cp_comm_type="p2p", tied=False),
            Case("zb1p", (3,), per_token=True, overlap=True),
        ],
    ),
    "data-parallel": (1, 1, [Case("none", (3,)), Case("zb1p", (2,), per_token=True, overlap=True)]),
}


@pytest.mark.parametrize("group", graded(list(GROUPS), lambda group: group != "sizes"))
def test_equals_one_process(group: str) -> None:
    pp, cp, cases = GROUPS[group]
    for rank, results in enumerate(run_ranks(compare, 2, pp, cp, cases, timeout=600)):
        for case, found in zip(cases, results, strict=True):
            where = f"{case} on rank {rank}: {found}"
            tolerance = BF16_TOLERANCE if case.bf16 else TOLERANCE
            assert all(error <= tolerance for error, _ in found["gradients"]), where
            assert len(found["gradients"]) == len(case.sizes), where
            has_losses = pp == 1 or rank == 1 or case.schedule in ("chimera", "helix", "zbv", "weipipe", "wzb2")
            if not has_losses:
                assert found["losses"] == found["validation"] == [[] for _ in case.sizes], where
            elif pp > 1 or cp > 1 or rank == 0:
                for losses, again, expected in zip(
                    found["losses"], found["validation"], found["expected"], strict=True
                ):
                    assert losses == pytest.approx(expected, rel=tolerance), where
                    assert again == pytest.approx(losses, rel=tolerance), where


def test_dropout_depends_on_the_step_and_not_on_the_schedule() -> None:
    _, (first, second, again, other_first, other_second, _) = run_ranks(dropout, 2)
    assert len(first) == 3 and first[:2] != second[:2]
    assert again == second
    assert other_first == pytest.approx(first, rel=TOLERANCE) and other_second == pytest.approx(second, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("ranks", "pp", "case"),
    [(2, 1, Case("seq1f1b", (2,), {"chunks": 3})), (4, 2, Case("helix", (2,), {"helix_folds": 1}))],
)
def test_overlapping_data_parallel_reductions_and_gathers(ranks: int, pp: int, case: Case) -> None:
    """Weights of helix leave for another rank before their own rank has a use for them."""
    for plain, overlapped in run_ranks(optimize, ranks, pp, case, timeout=600):
        assert overlapped == pytest.approx(plain, rel=1e-4)
        assert len(set(plain)) == 6


def test_auxiliary_losses_count_tokens_where_no_data_is_read() -> None:
    """With per-token loss, whose gradients are divided by all tokens afterwards."""
    model: Any = SimpleNamespace(pieces=[Piece("mlp", 0)], context=None)
    config: Any = SimpleNamespace(calculate_per_token_loss=True, grad_scale_func=lambda each: 4 * each)
    assert read(model, config, None, 3, (2, 5)).auxiliary_gradient(2) == 4 * 2 * 5


def test_refusals() -> None:
    for found in run_ranks(refusals, 2):
        expected = [
            "forward_step_func is not used with a PipelineModel",
            "data_iterator is None on a rank that holds the embedding or the head",
            "data_iterator must yield helixpipe.model.Microbatch with a PipelineModel, not int",
            r"tokens of shape \(2, 12\), but micro_batch_size and seq_length are \(3, 12\)",
            "collect_non_loss_data is not supported",
            "decoder_seq_length must be seq_length, 12",
            "model has 2 chunks, a PipelineModel among them",
            r"chunk lengths \(5, 6\) do not add up to the sequence's 12 tokens",
            "helix with 4 microbatches places other pieces on pipeline rank",
            "is a program for 8 layers, but num_layers is 4",
            "num_microbatches is 2",
            r"in chunks through a model of one.s own with model\[0\], a Linear, which is not of self-attention",
            r"pg_collection.cp has the ranks \[0, 1\], but the PipelineModel was built with \[[01]\]",
            r"pg_collection.tp has the ranks \[0, 1\], but the PipelineModel was built with \[[01]\]",
        ]
        assert len(found) == len(expected), found
        for message, pattern in zip(found, expected, strict=True):
            assert re.search(pattern, message), message


def test_options_need_our_own_model() -> None:
    with pytest.raises(UserError, match="chunks, chunk_lengths belong to a schedule given by its name or file"):
        get_forward_backward_func(get_forward_backward_func("1f1b").program(2, 2, 1), chunk_lengths=(1, 2))
    with pytest.raises(UserError, match=r"virtual_stages need a helixpipe.model.PipelineModel"):
        get_forward_backward_func("interleaved-1f1b", virtual_stages=2).program(2, 2, 2)


def test_documented_code() -> None:
    document = (Path(__file__).parents[2] / "docs" / "megatron_core.md").read_text(encoding="utf-8")
    block = re.findall(r"```python\n(.*?)```", document, flags=re.DOTALL)[3]
    first, last = run_ranks(run_documented, 2, block)
    assert first["losses"] == [] and last["losses"] == pytest.approx(last["expected"], rel=TOLERANCE)
    assert first["gradients"][0] <= TOLERANCE and last["gradients"][0] <= TOLERANCE
