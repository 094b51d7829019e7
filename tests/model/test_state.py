"""Dropout, checkpoints, and megatron-core's DDP and optimizers around the model, on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_ranks
from tests.model import state


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("checkpoints")
    return run_ranks(state.all_checks, 2, str(folder))


@pytest.mark.parametrize(
    "claim",
    [
        "repeats",
        "order does not matter",
        "all differ",
        "evaluation has none",
        "seed matters",
        "no seeding without dropout",
        "layers draw apart in mlp",
        "layers draw apart in proj",
    ],
)
def test_dropout_is_a_function_of_the_unit(ranks: list[dict[str, Any]], claim: str) -> None:
    assert all(results[claim] for results in ranks)


@pytest.mark.parametrize("what", ["hidden dropout", "embedding dropout"])
def test_tensor_parallel_ranks_share_dropout_unless_the_sequence_is_split(
    ranks: list[dict[str, Any]], what: str
) -> None:
    first, second = ranks
    assert first[f"{what} nosp"] == second[f"{what} nosp"]
    assert first[f"{what} sp"] != second[f"{what} sp"]


def test_tensor_parallel_ranks_drop_their_own_heads(ranks: list[dict[str, Any]]) -> None:
    first, second = ranks
    assert first["attention dropout"] != second["attention dropout"]


@pytest.mark.parametrize("style", ["gpt", "llama"])
def test_chunks_make_the_whole_sequence(ranks: list[dict[str, Any]], style: str) -> None:
    for results in ranks:
        parts, whole = results[f"{style} chunk losses"]
        assert parts == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("style", ["gpt", "llama"])
def test_checkpoint_entries_are_those_of_gpt_model(ranks: list[dict[str, Any]], style: str, tied: bool) -> None:
    case = f"{style} {'tied' if tied else 'untied'}"
    for results in ranks:
        assert results[f"{case} entries equal"] == set()
        assert results[f"{case} parts make the whole"]
        assert results[f"{case} copies"] == ([("embedding.word_embeddings.weight", 1)] if tied else [])


@pytest.mark.parametrize("case", ["gpt-True", "llama-True", "llama-False"])
def test_checkpoints_interchange_with_gpt_model(ranks: list[dict[str, Any]], case: str) -> None:
    for results in ranks:
        assert results[f"{case} round trip"] == (True, True)


@pytest.mark.parametrize("dtype", ["torch.float32", "torch.bfloat16"])
def test_distributed_optimizer_trains_as_the_plain_one(ranks: list[dict[str, Any]], dtype: str) -> None:
    for results in ranks:
        plain, distributed = results[f"{dtype} plain steps"], results[f"{dtype} distributed steps"]
        assert distributed[0] == pytest.approx(plain[0], rel=1e-5)
        # The norm is summed in another order, so the factor of clipping may differ in its last bit, and a weight then
        # round to the other of two neighbours in bfloat16, which are 2**-8 apart.
        later = 1e-5 if dtype == "torch.float32" else 1e-4
        for before, after in zip(plain[1:], distributed[1:], strict=True):
            assert after == pytest.approx(before, rel=later)
        norms = [norm for _, norm in plain]
        assert all(norm > 0.1 for norm in norms), "nothing was clipped, so clipping was not tested"
        assert norms == pytest.approx([norm for _, norm in ranks[0][f"{dtype} plain steps"]])
