"""Plain values of a checkpoint that are not of the types they should be."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint import wrong_types
from tests.distributed import run_ranks


@pytest.mark.hypothesis
def test_whatever_is_replaced_by_whatever_loads_or_is_told_in_a_sentence(tmp_path: Path) -> None:
    (counts,) = run_ranks(wrong_types.replacing_anything, 1, str(tmp_path))
    assert counts.keys() == wrong_types.LAYOUTS.keys()
    assert all(refused and loaded for refused, loaded in counts.values()), counts


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    (sentences,) = run_ranks(wrong_types.named, 1, str(tmp_path_factory.mktemp("named")))
    return dict(sentences)


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("", "iter_0000001: its plain values (common.pt) are list [1], not a dictionary"),
        ("iteration", "(common.pt) have str 'five' as iteration, not a whole number"),
        ("args", "(common.pt) have int 5 as args, not a namespace"),
        ("args.consumed_train_samples", "have str 'many' as args.consumed_train_samples, not a whole number"),
        ("args.index_samples", "have list [3] as args.index_samples, not lists of three whole numbers"),
        ("optimizer", "(common.pt) have list [1] as optimizer, not a dictionary"),
        ("optimizer.param_groups.0.eps", "eps of a group is str 'small', not float 1e-08"),
        ("optimizer.param_groups.0.betas.1", "betas of a group is tuple (0.9, 7), outside of 0 to 1"),
        ("opt_param_scheduler.num_steps", "holds a learning-rate schedule that cannot be read (TypeError"),
    ],
)
def test_what_is_wrong_is_named(told: dict[str, str], place: str, words: str) -> None:
    assert words in told[place] and told[place].endswith(".")
    assert ("--no-load-optim" in told[place]) == place.startswith("optimizer.")
    assert ("--finetune" in told[place]) == place.startswith("opt_param")
