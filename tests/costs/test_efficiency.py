"""Shares of a hardware's peaks from a profile. Profiles here are made up: their times are the costs' own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helixpipe.cli.profile import efficiency_table, hardware_measured
from helixpipe.cli.profile_options import ProfileOptions
from helixpipe.costs.efficiency import fitted, reached
from helixpipe.costs.hardware import HARDWARE, Efficiency, find_device
from helixpipe.costs.measured_chunks import MeasuredChunk
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import MODELS, Chunk, Layout, ModelShape
from helixpipe.costs.piece_kinds import flops
from helixpipe.costs.profile_costs import MessageTimes, Profile
from helixpipe.program.program import OP_KINDS
from schedules import command as cli

H100 = HARDWARE["h100"]
MODEL, TOKENS = MODELS["llama2-7b"], 8192
SHARES = Efficiency(matmul=0.55, attention=0.35, memory=0.6, network=0.75)
SIMULATE = "simulate 1f1b --model llama2-7b --seq-length 8192 -p 8 -m 8 --json"


def make_profile(shares: Efficiency = SHARES, model: ModelShape = MODEL, **changes: Any) -> Profile:
    """Return what a machine would measure that reaches exactly these shares."""
    costs = ModelCosts(model, replace(H100, efficiency=shares), Layout(), TOKENS)
    pieces = {piece: {kind: costs.piece_time(piece, kind, Chunk(TOKENS)) for kind in OP_KINDS} for piece in model.kinds}
    content: dict[str, Any] = {
        "model": model,
        "layout": Layout(),
        "dtype": "bfloat16",
        "seq_length": TOKENS,
        "chunks": (MeasuredChunk(TOKENS, 0, pieces, dict.fromkeys(OP_KINDS, 0.0)),),
        "messages": MessageTimes(1e-5, 1e9, "nccl"),
        "machine": {"device": "NVIDIA H100 80GB HBM3"},
    }
    return Profile(**{**content, **changes})


def test_shares_are_found_again() -> None:
    found = fitted(make_profile(), H100).efficiency
    assert vars(found) == pytest.approx(vars(SHARES), rel=1e-6)
    assert vars(fitted(make_profile(), H100, given=["matmul"]).efficiency) == pytest.approx(
        vars(replace(SHARES, matmul=H100.efficiency.matmul)), rel=1e-6
    )


@pytest.mark.parametrize("windowed", [(1,), (1, 0)])
def test_shares_are_found_again_where_layers_attend_to_a_window(windowed: tuple[int, ...]) -> None:
    """All of them, or every second one."""
    profile = make_profile(model=replace(MODEL, window=1024, windowed=windowed, unrotated=(0, 1)))
    assert vars(fitted(profile, H100).efficiency) == pytest.approx(vars(SHARES), rel=1e-6)
    assert reached(profile, H100)["attn.window"]["F"] == pytest.approx(SHARES.attention)


def test_a_share_is_never_above_one() -> None:
    whole = make_profile(Efficiency(1.0, 1.0, 1.0, 0.75))
    (times,) = whole.chunks
    faster = {piece: {kind: time / 2 for kind, time in by_kind.items()} for piece, by_kind in times.pieces.items()}
    assert fitted(replace(whole, chunks=(replace(times, pieces=faster),)), H100).efficiency == Efficiency(
        1.0, 1.0, 1.0, 0.75
    )


def test_what_is_reached_is_flops_over_seconds_and_peak() -> None:
    profile = make_profile()
    shares = reached(profile, H100)
    assert set(shares) == {"qkv", "attn", "proj", "mlp", "head"}
    assert "W" not in shares["attn"]
    assert shares["attn"]["F"] == pytest.approx(SHARES.attention)
    seconds = profile.chunks[0].pieces["mlp"]["B"]
    work = flops(MODEL, Layout(), "mlp", "B", Chunk(TOKENS))
    assert shares["mlp"]["B"] == pytest.approx(work / seconds / 989e12)
    assert 0.4 < shares["mlp"]["B"] < SHARES.matmul  # the norm and the activation function take time, and no FLOPs


def test_the_table_of_profile() -> None:
    text = efficiency_table(make_profile(), H100)
    assert "Percent of the 989 TFLOP/s (bfloat16) of h100" in text
    assert "matrix products 55 %, attention 35 %, memory 60 %" in text
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines()}
    assert rows["attn"] == ["35.0", "35.0", "-", "35.0"]


def test_the_machine_is_known_by_the_name_its_driver_gives() -> None:
    assert find_device("NVIDIA H20") is HARDWARE["h20"]
    assert find_device("NVIDIA H200") is HARDWARE["h200"]
    assert find_device("AMD EPYC") is None
    assert len({hardware.device for hardware in HARDWARE.values()}) == len(HARDWARE)
    assert hardware_measured(ProfileOptions(), make_profile()) is H100
    assert hardware_measured(ProfileOptions(hardware="a800"), make_profile()) == HARDWARE["a800"]
    assert hardware_measured(ProfileOptions(), make_profile(machine={})) is None


def simulated(capsys: pytest.CaptureFixture[str], flags: str) -> Mapping[str, Any]:
    assert cli.main(f"{SIMULATE} {flags}".split()) == 0
    step: Mapping[str, Any] = json.loads(capsys.readouterr().out)["step"]
    return step


def test_simulate_takes_the_shares_of_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    make_profile().save(path)
    by_file = simulated(capsys, f"--efficiency-from {path}")
    by_flags = simulated(capsys, "--matmul-efficiency 0.55 --attention-efficiency 0.35 --memory-efficiency 0.6")
    assert by_file["step_time"] == pytest.approx(by_flags["step_time"], rel=1e-6)
    assert (by_file["efficiency_from"], by_flags["efficiency_from"]) == (str(path), None)
    mixed = simulated(capsys, f"--efficiency-from {path} --matmul-efficiency 0.5")
    assert mixed["efficiency"] == pytest.approx({**vars(SHARES), "matmul": 0.5}, rel=1e-6)
    assert cli.main(f"{SIMULATE} --efficiency-from {path}".replace("--json", "").split()) == 0
    assert f"Shares of peaks not given by flags are from {path}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"dtype": "float32"}, "was measured in float32, and --model counts bfloat16; measure with --dtype bfloat16."),
        ({"machine": {"device": "NVIDIA H200"}}, "was measured on h200, not on --hardware h100."),
    ],
)
def test_a_file_that_says_nothing_of_this_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    path = tmp_path / "profile.json"
    make_profile(**changes).save(path)
    assert cli.main(f"{SIMULATE} --efficiency-from {path}".split()) == 2
    assert capsys.readouterr().err == f"helixpipe: --efficiency-from: {path} {sentence}\n"


def test_efficiency_from_needs_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "1f1b", "--efficiency-from", "profile.json"]) == 2
    assert "--efficiency-from needs --model" in capsys.readouterr().err
    assert cli.main(["profile", "--model", "llama2-7b", "--hardware", "h1000"]) == 2
    assert "--hardware h1000 is unknown: did you mean h100?" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_profile_of_a_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    flags = "--model llama2-7b --num-layers 3 --seq-length 4096 --dtype bfloat16 --repeats 3"
    assert cli.main(f"profile {flags} --hardware h100 --output {path}".split()) == 0
    output = capsys.readouterr().out
    assert "Percent of the 989 TFLOP/s (bfloat16) of h100" in output
    profile = Profile.load(path)
    assert profile.assumed["clock"] == "CUDA events" and profile.layout.fused_kernels
    shares = reached(profile, H100)
    assert all(0 < share < 1 for by_kind in shares.values() for share in by_kind.values())
