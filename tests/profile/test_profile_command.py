"""`helixpipe profile`, and its file given to other commands."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from helixpipe.cli import measuring, profile_options
from helixpipe.common.progress import ProgressLine
from helixpipe.costs.expert_loads import parse_loads
from helixpipe.costs.models import Layout, ModelShape
from helixpipe.costs.profile_costs import Profile
from helixpipe.profile.measurement import MICROBATCHES, WARM_UP, rows
from helixpipe.program.stages import EXPERTS, PIECE_KINDS
from schedules import command as cli
from tests.profile.test_profile import OWN

# ------------------------------------------------------------------------------------------------------- command line


def refused(capsys: pytest.CaptureFixture[str], command: str) -> str:
    assert cli.main(command.split()) == cli.USER_ERROR
    output = capsys.readouterr()
    assert output.out == ""
    return output.err


def test_simulate_takes_the_file(capsys: pytest.CaptureFixture[str], saved: str) -> None:
    assert cli.main(f"simulate gpipe -p 2 -m 2 --profile {saved} --json".split()) == 0
    result = json.loads(capsys.readouterr().out)
    first, last, message = 62.5, 94.0, 4.596  # forward of rank 0 and 1 without overhead
    assert result["layers"] == 4
    # rank 1 starts after rank 0's first forward, runs 2 F and 2 B, and rank 0 ends with the second B
    expected = first + 0.25 + message + 2 * (last + 0.25) + 2 * (2 * last + 0.75) + message + 2 * first + 0.75
    assert result["makespan"] == pytest.approx(expected)
    assert (result["unit"], result["peak_activation_unit"]) == ("s", "bytes")
    assert result["profile"] == {
        "file": saved, "model": "own", "seq_length": 16, "micro_batch_size": 2, "dtype": "float32"
    }  # fmt: skip
    assert cli.main(f"simulate gpipe -p 2 -m 2 -L 8 --profile {saved} --json".split()) == 0
    assert json.loads(capsys.readouterr().out)["layers"] == 8


def test_chunks_share_the_sequence_of_the_file(capsys: pytest.CaptureFixture[str], saved: str) -> None:
    flags = f"simulate seq1f1b -p 2 -m 2 -k 2 --chunk-alignment 1 --profile {saved} --json"
    assert cli.main(flags.split()) == 0
    assert json.loads(capsys.readouterr().out)["chunk_lengths"] == [8, 8]  # attention is too little to matter


def test_simulate_prints_seconds_bytes_and_where_they_come_from(capsys: pytest.CaptureFixture[str], saved: str) -> None:
    assert cli.main(f"simulate zb1p -p 2 -m 4 --profile {saved}".split()) == 0
    text = capsys.readouterr().out
    for part in (
        "measured on a processor, processes at once 2, threads 1, torch 2.0",
        "Simulated from measured pieces:",
        "tokens a second",
        "kept for backward   weights, gradients, Adam   (MiB)",
    ):
        assert part in text
    assert re.search(r"step time +\S+ ms  forward and backward", text)


def test_draw_takes_the_file(capsys: pytest.CaptureFixture[str], saved: str, tmp_path: Path) -> None:
    output = tmp_path / "steps.json"
    assert cli.main(f"draw 1f1b gpipe -p 2 -m 2 --profile {saved} -o {output}".split()) == 0
    assert output.exists()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--model llama2-7b", "--model"),
        ("--seq-length 32", "--seq-length"),
        ("--piece-times mlp=1", "--piece-times"),
        ("--backward-ratio 3", "--backward-ratio"),
        ("--message-time 1", "--message-time"),
        ("--copy-time 1", "--copy-time"),
        ("--disable-sequence-parallel", "--disable-sequence-parallel"),
    ],
)
@pytest.mark.parametrize("command", ["simulate", "draw"])
def test_other_costs_beside_a_profile_are_refused(
    capsys: pytest.CaptureFixture[str], saved: str, command: str, flags: str, named: str
) -> None:
    sentence = f"helixpipe: {named} cannot be given beside --profile, whose file has a model and its costs.\n"
    assert refused(capsys, f"{command} 1f1b --profile {saved} {flags}") == sentence


@pytest.mark.parametrize("beside", ["", "--model llama2-7b"])
def test_memory_takes_no_profile(capsys: pytest.CaptureFixture[str], saved: str, beside: str) -> None:
    assert "memory takes --model and not --profile; simulate" in refused(
        capsys, f"memory 1f1b --profile {saved} {beside}"
    )


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("", "--num-layers, --hidden-size, .* must be given for a model by its sizes; or give --model"),
        (OWN.replace("--seq-length 16", ""), "--seq-length must be given for a model by its sizes"),
        ("--model llama", "--model llama is unknown: did you mean llama"),
        (f"{OWN} --num-query-groups 3", "--num-query-groups 3 must divide --num-attention-heads 4"),
        ("--model llama2-7b --hidden-size 100", "--hidden-size 100 must be a multiple of --num-attention-heads 32"),
        (f"{OWN} --hidden-size 36 --position-embedding-type rope", "rope needs an even .*, not 9"),
        (f"{OWN} --repeats 0", "--repeats 0 must be at least 1"),
        ("--model deepseek-v3", "no head that predicts further tokens, .* deepseek-v3 has 1: give --mtp-num-layers 0"),
        (f"{OWN} --dtype float64", "--dtype: .*'float64'"),
        (f"{OWN} --hidden 8", "unknown flag --hidden; did you mean --"),
    ],
)
def test_wrong_flags_of_profile(capsys: pytest.CaptureFixture[str], flags: str, sentence: str) -> None:
    assert re.search(sentence, refused(capsys, f"profile {flags}"))


def test_flags_change_a_preset() -> None:
    shape = profile_options.model_shape(
        profile_options.ProfileOptions(
            model="llama2-7b",
            num_query_groups=8,
            swiglu=False,
            untie_embeddings_and_output_weights=False,
            disable_bias_linear=True,
            seq_length=128,
        )
    )
    assert (shape.name, shape.hidden, shape.groups, shape.gated) == ("llama2-7b", 4096, 8, False)
    assert (shape.tied, shape.bias, shape.seq_length) == (True, False, 128)


def test_a_process_that_fails_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert "a process that measures failed: exit code 1" in refused(capsys, f"profile {OWN}")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("style", "processes", "length"),
    [
        ("", 2, 16),
        (
            "--swiglu --normalization RMSNorm --position-embedding-type rope --dtype bfloat16 --processes 1 "
            "--chunk-size 5 --loss-chunk-size 6",
            1,
            256,
        ),
    ],
)
def test_a_tiny_model_from_end_to_end(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    style: str,
    processes: int,
    length: int,
) -> None:
    path = tmp_path / "measured.json"
    told: list[tuple[str, str]] = []
    wait = measuring._wait

    def waited(processes: Sequence[subprocess.Popen[bytes]], outputs: Sequence[Path]) -> None:
        wait(processes, outputs)
        told.extend(measuring.PROGRESS.findall(outputs[0].read_text()))

    monkeypatch.setattr(measuring, "_wait", waited)
    assert cli.main(f"profile {OWN} {style} --seq-length {length} --repeats 1 --output {path}".split()) == 0
    output = capsys.readouterr()
    assert all(line.startswith("measuring: ") for line in output.err.splitlines())
    assert f"wrote {path}; next: helixpipe simulate 1f1b" in output.out
    parts = (WARM_UP + 1) * 2 * len(rows(length))  # with backwards whole and split: a round alone may take minutes
    assert told == [(str(part), str(parts)) for part in range(parts)]
    measured = Profile.load(path)
    slices = {"mlp_chunk": 5, "loss_chunk": 6} if style else {}
    assert measured.layout == Layout(element_bytes=2 if style else 4, fused_kernels=False, **slices)
    (times, *shorter) = measured.chunks
    assert (times.tokens, times.earlier) == (length, 0)
    places = [(64, 0, 1), *((64, earlier, 1) for earlier in (0, 64, 128, 192)), (64, 0, 8)]
    assert [(each.tokens, each.earlier, each.documents) for each in shorter] == (places if length == 256 else [])
    for piece in PIECE_KINDS:
        assert all(times.pieces[piece][kind] > 0 for kind in "FBI")
        assert times.pieces[piece]["R"] == times.pieces[piece]["F"]
    assert all(times.pieces[piece]["W"] > 0 for piece in ("qkv", "proj"))
    assert style or all(times.pieces[piece]["W"] > 0 for piece in ("mlp", "head"))  # slices compute it in I
    assert measured.messages.backend == "gloo" and measured.messages.bandwidth > 0
    assert measured.copies is not None and min(*measured.copies.out, *measured.copies.inward) > 0
    assert re.search(r"copy to the host: \d+ µs and its bytes at [\d.]+ GB/s, back at .*; both at once", output.out)
    assert (measured.assumed["processes"], measured.assumed["threads"], measured.assumed["repeats"]) == (
        processes,
        1,
        1,
    )
    assert measured.assumed["kernels"] == (
        f"attention torch CPU, norm torch {measured.model.norm}, linear megatron-core, activation not fused, "
        "transport gloo, gradients float32"
    )
    assert cli.main(f"simulate interleaved-1f1b -p 2 -m 4 -v 2 --profile {path} --json".split()) == 0
    assert json.loads(capsys.readouterr().out)["makespan"] > 0


LITE = {
    "model_type": "deepseek_v2",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "q_lora_rank": None,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


@pytest.mark.thorough
def test_layers_of_latent_attention_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a Hugging Face folder, which has experts in all layers but the first."""
    (tmp_path / "config.json").write_text(json.dumps(LITE))
    path = tmp_path / "measured.json"
    assert cli.main(f"profile --model {tmp_path} --seq-length 16 --repeats 1 --output {path}".split()) == 0
    measured = Profile.load(path)
    assert {"qkv.latent", "attn.latent", "mlp", "mlp.moe"} < set(measured.model.kinds)
    (times, *_) = measured.chunks
    assert all(times.pieces[piece][kind] > 0 for piece in measured.model.kinds for kind in "FBI")
    capsys.readouterr()
    assert cli.main(f"simulate seq1f1b -p 2 -m 4 --pipe-sp-splits 2 --profile {path} --json".split()) == 0
    assert json.loads(capsys.readouterr().out)["makespan"] > 0


@pytest.mark.thorough
def test_layers_with_experts_are_measured_and_their_loads_kept(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every second layer; the loads are those of a layer's last steps, for --moe-load."""

    def mixed(options: profile_options.ProfileOptions) -> ModelShape:
        shape = profile_options.model_shape(options)
        return replace(shape, bias=False, experts=4, mixed=(1, 0), topk=2, expert_ffn=24)

    monkeypatch.setattr(measuring, "model_shape", mixed)
    path = tmp_path / "measured.json"
    assert cli.main(f"profile {OWN} --seq-length 16 --repeats 1 --processes 1 --output {path}".split()) == 0
    measured = Profile.load(path)
    assert set(measured.chunks[0].pieces) == {*PIECE_KINDS, EXPERTS}
    assert all(measured.chunks[0].pieces[EXPERTS][kind] > 0 for kind in "FIWB")
    loads = parse_loads(str(path)).layers
    assert loads == measured.expert_loads and loads and all(len(layer) == 4 for layer in loads)
    assert {sum(layer) for layer in loads} == {MICROBATCHES * 2 * 16}
    capsys.readouterr()
    assert cli.main(f"simulate 1f1b -p 2 -m 4 --profile {path} --json".split()) == 0
    assert json.loads(capsys.readouterr().out)["makespan"] > 0


def test_measuring_shows_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[int, int]] = []

    class Shown(ProgressLine):
        def at(self, done: int, of: int, note: str = "") -> None:
            shown.append((done, of))

    monkeypatch.setattr(measuring, "ProgressLine", Shown)
    outputs = [tmp_path / "0", tmp_path / "1"]
    for told, percent in (("", 0), ("measured 2 of 8\nmeasured 3 of 8\nmeasured 4 of", 37)):
        outputs[0].write_text(f"a warning\n{told}")  # before the first part, while torch is imported, too
        outputs[1].write_text("measured 7 of 8\n")
        measuring._wait([subprocess.Popen(["true"]) for _ in outputs], outputs)
        assert set(shown) == {(percent, 100)}
        shown.clear()
