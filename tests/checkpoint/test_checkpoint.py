"""Saving, resuming on other layouts, and damaged checkpoints, on two ranks; one process group runs all cases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint import cases, malicious
from tests.distributed import run_ranks
from tests.selection import graded

RESUMED = [f"{name} to {other}" for name, (_, others) in cases.RESUMED.items() for other in others]
CORE = (
    "pp2 to same",
    "pp2 to tp2",
    "pp2 to sharded",
    "weipipe to pp2",
    "untied wzb2 to same",
    "spread head to same",
    "tp2 to cp2",
    "cp2 to same",
    "spread head zero to zero",
    "bf16 pp2 to weipipe",
    "bf16 zero to offloaded",
    "half offloaded to same",
    "bf16 sharded to same",
    "bf16 sharded to zero",
    "positions tp2 to tp1",
    "untied spread head to pp2",
    "odd pp2 to split head",
    "split head zero to pp2",
    "bf16 split head to sharded",
    "experts pp2 to ep2 zero",
    "ep2 sharded to zero",
    "bf16 ep2 to ep1",
    "ends zero to same",
    "sgd to same",
    "fused to torch",
    "torch to fused",
    "bf16 fused to torch",
    "fused sharded to same",
)
"""Of nearly each layout saved or resumed once, on the same or on another one."""


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    own = (item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path)
    resuming = {item.callspec.params["case"] for item in own if item.originalname == RESUMES}
    folder: Path = tmp_path_factory.mktemp("checkpoints")
    with pytest.raises(RuntimeError, match=r"died with exit code -9|Connection (closed|reset) by peer"):
        run_ranks(cases.killed, 2, str(folder / "killed"))
    return run_ranks(cases.all_cases, 2, str(folder), resuming, timeout=600.0)


@pytest.mark.parametrize("case", graded(RESUMED, CORE))
def test_resumed_run_equals_the_uninterrupted_one(ranks: list[dict[str, Any]], case: str) -> None:
    """Bit for bit on the same layout; on another one, which may sum and round in another order, within tolerance."""
    assert [results[case] for results in ranks] == ["", ""]


RESUMES = test_resumed_run_equals_the_uninterrupted_one.__name__


@pytest.mark.parametrize("name", cases.RATES)
def test_another_learning_rate_is_the_one_asked_for(ranks: list[dict[str, Any]], name: str) -> None:
    for rank, results in enumerate(ranks):
        (flags, wanted, now), (checkpoint, saved, before) = (results[f"{name}, {source}"] for source in cases.SOURCES)
        assert flags == wanted and checkpoint == saved and wanted != saved
        assert now > 2.5 * before > 0  # the cosine has hardly begun
        assert len(set(wanted)) == (2 if name == "ends" else 1), rank


@pytest.mark.parametrize("name", cases.RATES)
def test_the_learning_rate_goes_on_without_the_optimizer(ranks: list[dict[str, Any]], name: str) -> None:
    for rank, results in enumerate(ranks):
        for source in cases.SOURCES:
            same, lines = results[f"{name}, {source}, weights alone"]
            assert same, source
            assert len(lines) == (1 if rank == 0 else 0)
            assert all("the optimizer's state (--no-load-optim), the random state (--no-load-rng)" in s for s in lines)


@pytest.mark.parametrize("case", cases.DAMAGES)
def test_damaged_newest_checkpoint_is_reported_and_the_previous_one_used(
    ranks: list[dict[str, Any]], case: str
) -> None:
    for rank, results in enumerate(ranks):
        iteration, equal, lines = results[case]
        assert (iteration, equal) == (3, True)
        assert len(lines) == (1 if rank == 0 else 0)
        assert all("iter_0000005 is not usable: " in line for line in lines)


@pytest.mark.parametrize("case", cases.TRACKERS)
def test_tracker(ranks: list[dict[str, Any]], case: str) -> None:
    for rank, results in enumerate(ranks):
        iteration, equal, lines = results[f"tracker {case}"]
        assert (iteration, equal) == (cases.TRACKERS[case][1], True)
        assert len(lines) == (rank == 0 and case != "set back")


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("all damaged", ["no checkpoint in --load", "iter_0000005: __1_0.distcp is truncated", "iter_0000003: "]),
        ("all damaged, arguments", ["no checkpoint in --load", "iter_0000005: __1_0.distcp is truncated"]),
        ("layers", ["--num-layers 2, but the flags say 4", "--use-checkpoint-args"]),
        ("hidden", ["--hidden-size 16, but the flags say 32"]),
        ("schedule", ["another learning-rate schedule", "--override-opt-param-scheduler"]),
        ("step", ["iter_0000004: the folder is missing"]),
        ("missing", ["holds no checkpoint", "--exit-on-missing-checkpoint"]),
        ("nothing there", ["--load ", "holds no checkpoint; leave it out to start from scratch", "--save the same"]),
        ("holds checkpoints", ["--save ", "up to iteration 5", "--load ", "--overwrite-checkpoints"]),
        ("holds checkpoints, but of --load", ["--save ", "up to iteration 5", "--overwrite-checkpoints"]),
        ("no optimizer", ["holds no optimizer", "--no-load-optim"]),
        ("lying", ["of shape [2, ", "these flags make it [4, "]),
    ],
)
def test_mistakes_are_one_sentence_on_every_rank(ranks: list[dict[str, Any]], case: str, words: list[str]) -> None:
    first, second = (results[case] for results in ranks)
    assert first == second and "\n" not in first and first.endswith(".")
    assert all(word in first for word in words), first


def test_other_positions_are_told_where_a_run_is_resumed(ranks: list[dict[str, Any]]) -> None:
    (told,), nothing = (results["other positions"] for results in ranks)
    assert told.endswith("iter_0000000: rotary_base 10000 (here 500)") and nothing == []


@pytest.mark.parametrize("file", malicious.FILES)
def test_no_file_of_a_checkpoint_runs_code(ranks: list[dict[str, Any]], file: str) -> None:
    """Unless it is trusted; the tensors of a checkpoint, which torch reads itself, do not even then."""
    for told, arguments, ran, ran_when_trusted in (results[f"untrusted {file}"] for results in ranks):
        assert "iter_0000005" in told
        assert f"asks for {malicious.NAME}" in told and "--trust-checkpoint" in told and "\n" not in told
        assert arguments == told
        assert not ran and ran_when_trusted == (file != "tensor")


def test_without_a_checkpoint_training_starts_afresh(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        assert results["fresh"] == [None, None, None]
        assert results["untouched"]


def test_parts_of_a_checkpoint(ranks: list[dict[str, Any]]) -> None:
    (told,) = ranks[0]["finetune says"]
    assert all(word in told for word in ("optimizer", "schedule", "random state", "iteration (--finetune)"))
    for results in ranks:
        assert results["finetune"] == (0, {})
        assert results["weights alone"] == 1 and results["weights alone, schedule"] == 4
        assert results["weights alone, offloaded"]


def test_optimizer_saved_before_its_first_step(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        assert all(results[f"saved before the first step, {name}"] for name in ("pp2", "zero", "offloaded"))


def test_arguments(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        arguments = results["arguments"]
        assert arguments["num_layers"] == 2 and arguments["data_path"] == ["a", 0.5]
        assert (arguments["iteration"], arguments["consumed_train_samples"]) == (5, 20)
        assert "rank" not in arguments


@pytest.mark.parametrize(
    ("case", "words", "folders"),
    [
        ("disk full, shard", "No space left on device", ["iter_0000001"]),
        ("disk full, common", "No space left on device", ["iter_0000001"]),
        ("not shared", "is not seen by rank 1 on ", ["iter_0000001"]),
        ("no tracker yet", "No space left on device", ["iter_0000001", "iter_0000002"]),
    ],
)
def test_failed_save_leaves_the_last_checkpoint(
    ranks: list[dict[str, Any]], case: str, words: str, folders: list[str]
) -> None:
    (text, names, tracker), other = (results[case] for results in ranks)
    assert (text, names, tracker) == other
    assert text.startswith("--save ") and words in text and "\n" not in text
    assert (names, tracker) == ([*folders, cases.TRACKER], "1")


def test_save_leaves_nothing_but_checkpoints(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        assert results["hidden left"] == []
        assert not any(results["children"]), "a process is left behind"
        assert results["retained"] == ["iter_0000001", "iter_0000004", "iter_0000005"]
        assert results["files"] == [".metadata", "__0_0.distcp", "__1_0.distcp", "common.pt", "metadata.json"]
        assert {"args", "checkpoint_version", "iteration", "num_floating_point_operations_so_far"} < set(
            results["keys"]
        )
        assert "opt_param_scheduler" in results["keys"]


def test_run_killed_while_saving_resumes_and_its_leftovers_go(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        after = results["after kill"]
        assert after["left"] == [".iter_0000005.tmp", ".lock", "iter_0000003", cases.TRACKER]
        assert after["resumed at"] == 3
        assert after["in the end"] == ["iter_0000003", "iter_0000005", cases.TRACKER]


def test_checkpoint_of_plain_megatron_core_loads(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        loaded = results["from megatron-core"]
        assert loaded["progress"] == (7, 28)
        assert loaded["weights"] and loaded["some"] > 3
        assert "--no-load-optim" in loaded["without --no-load-optim"]


def test_experts_go_to_and_come_from_local_layers_of_megatron_core(ranks: list[dict[str, Any]]) -> None:
    """Its local layers save the norm before experts under another name than its layers of Transformer Engine."""
    for results in ranks:
        wanted = ("their weights", "exported", "our weights", "our optimizer")
        assert results["local layers"] == dict.fromkeys(wanted, True)
