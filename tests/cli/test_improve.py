"""`helixpipe improve`: what it prints, what it saves, what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helixpipe.cli import command_improve
from helixpipe.costs.hardware import GIB
from schedules import command
from tests.cli.commands import run, run_json

SMALL = "improve 1f1b -p 3 -m 2 -L 6 --evaluations 400"
OF_A_MODEL = "improve 1f1b -p 2 -m 2 --model weipipe-1024 --seq-length 4096 --hardware a800 --evaluations 300"


def test_before_and_after(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, SMALL)
    given = run_json(capsys, "simulate 1f1b -p 3 -m 2 -L 6")
    assert found["before"]["step_time"] == given["makespan"] > found["after"]["step_time"]
    assert found["before"]["memory"] == max(given["peak_activation"]) >= found["after"]["memory"]
    assert found["gain"] == pytest.approx(given["makespan"] / found["after"]["step_time"] - 1)
    assert found["evaluations"] <= 400 and not found["interrupted"]
    text = run(capsys, SMALL)
    assert f"{100 * found['gain']:.1f} % faster, simulated, from {found['after']['start']}" in text
    assert run_json(capsys, SMALL + " --seed 0") == found


def test_more_memory_where_there_is_more(capsys: pytest.CaptureFixture[str]) -> None:
    own, more = (run_json(capsys, SMALL.replace("-m 2", "-m 6") + flags) for flags in ("", " --memory-limit 20"))
    assert own["after"]["memory"] <= own["before"]["memory"] < more["after"]["memory"] <= 20
    assert more["after"]["step_time"] < own["after"]["step_time"]


def test_a_saved_program_is_what_was_found(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    found = run_json(capsys, f"{OF_A_MODEL} --save-program {path}")
    size = "--model weipipe-1024 --seq-length 4096 --hardware a800"
    given, again = (run_json(capsys, f"simulate {name} {size}")["step"] for name in ("1f1b -p 2 -m 2", str(path)))
    assert found["before"]["step_time"] == pytest.approx(given["step_time"])
    assert found["after"]["step_time"] == pytest.approx(again["step_time"])
    assert found["after"]["tokens_per_second_per_gpu"] == pytest.approx(again["tokens_per_second_per_gpu"])
    assert found["after"]["memory"] == pytest.approx(
        max(sum(rank[k] for k in rank if k != "total") for rank in again["memory"]), rel=1e-6
    )
    assert run(capsys, f"check {path}").startswith(f"{path} can run")
    further = run_json(capsys, f"improve {path} {size} --evaluations 50 --orders-only")
    assert further["before"]["step_time"] == pytest.approx(again["step_time"])


COSTS = (
    "",
    "--piece-times embed=1,attn=5,mlp=2,head=3 --message-time 0.5",
    "--backward-ratio 1.5 --op-overhead 0.25",
    "--model weipipe-1024 --seq-length 4096 --hardware a800",
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(("1f1b", "zb1p", "zbv", "chimera", "v-half", "seq1f1b -k 2", "hanayo", "gpipe")),
    st.sampled_from((2, 4)),
    st.integers(2, 6).map(lambda half: 2 * half),
    st.sampled_from(COSTS),
)
def test_a_saved_program_has_the_figures_that_were_printed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, schedule: str, ranks: int, microbatches: int, costs: str
) -> None:
    """Also where sequences were cut: into the chunks that whoever runs the file takes."""
    path = tmp_path / "mine.json"
    size = f"-p {ranks} -m {microbatches} -L 8 {costs}"
    found = run_json(capsys, f"improve {schedule} {size} --evaluations 80 --save-program {path}")["after"]
    again = run_json(capsys, f"simulate {path} {costs}")
    assert found["makespan"] == pytest.approx(again["makespan"], rel=1e-7)
    assert found["bubble_ratio"] == pytest.approx(again["bubble_ratio"], abs=1e-6)
    if "--model" not in costs:
        assert found["memory"] == pytest.approx(max(again["peak_activation"]), rel=1e-7)


def test_what_does_not_fit_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert "The step found does NOT fit: " in run(capsys, f"{OF_A_MODEL} --gpu-memory 7 --orders-only")
    assert "The step found fits, with " in run(capsys, f"{OF_A_MODEL} --orders-only")


def test_a_limit_is_kept_to_unless_it_is_to_be_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    limited = f"{OF_A_MODEL.replace('-p 2 -m 2', '-p 4 -m 6 -L 8')} --memory-limit 2.4"
    kept, ignored = (run_json(capsys, limited + flag)["after"]["memory"] for flag in ("", " --ignore-memory-limit"))
    assert kept <= 2.4 * GIB < ignored


def test_without_a_compiler_it_is_said_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_improve, "is_compiled", lambda: False)
    assert run(capsys, SMALL).count("C++ compiler") == 1
    monkeypatch.setattr(command_improve, "is_compiled", lambda: True)
    assert "C++ compiler" not in run(capsys, SMALL)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("1f1b --p2p blocking", "leave --p2p blocking out"),
        ("1f1b --lengths lognormal", "leave --lengths out"),
        ("1f1b --evaluations 0", "--evaluations"),
        ("1f1b --save-program /nowhere/x.json", "/nowhere/x.json"),
        ("1f2b", "did you mean 1f1b"),
    ],
)
def test_refused_in_a_sentence(capsys: pytest.CaptureFixture[str], flags: str, sentence: str) -> None:
    assert command.main(["improve", *flags.split()]) == command.USER_ERROR
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1
