"""`helixpipe profile` and costs from its file: format, sums, refusals, and a tiny model measured from end to end."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helixpipe.cli import profile as cli_profile
from helixpipe.common.errors import UserError
from helixpipe.costs.models import Chunk, Layout, ModelShape
from helixpipe.costs.piece_bytes import PieceBytes
from helixpipe.costs.profile_costs import ChunkTimes, MessageTimes, Profile, ProfileCosts
from helixpipe.lowering.lower import lower
from helixpipe.planning.recompute import RecomputeOptions
from helixpipe.profile.message_times import fit_line
from helixpipe.profile.profiler import scale_to_whole_units
from helixpipe.program.program import PIECE_KINDS, Op, Program, Stage, even_stages, model_pieces
from helixpipe.simulate.simulator import simulate
from schedules import Shape, build
from schedules import command as cli

MODEL = ModelShape("own", 4, 32, 4, 2, 40, True, 200, False, "RMSNorm", "rope", False, 16)
LAYOUT = Layout(micro_batch_size=2, element_bytes=4, fused_kernels=False)
SECONDS = {"embed": 0.5, "norm": 1.0, "qkv": 2.0, "attn": 4.0, "proj": 8.0, "mlp": 16.0, "head": 32.0}
OVERHEAD = {"F": 0.25, "I": 0.5, "W": 0.125, "B": 0.75, "R": 0.25}
OWN = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --vocab-size 200 --seq-length 16"


def make_profile(**changes: Any) -> Profile:
    """F of each piece as in SECONDS, B twice that, I as F and W half of F."""
    factors = {"F": 1.0, "I": 1.0, "W": 0.5, "B": 2.0, "R": 1.0}
    pieces = {piece: {kind: factors[kind] * SECONDS[piece] for kind in factors} for piece in PIECE_KINDS}
    content = {
        "model": MODEL,
        "layout": LAYOUT,
        "dtype": "float32",
        "seq_length": 16,
        "chunks": (ChunkTimes(16, 0, pieces, OVERHEAD),),
        "messages": MessageTimes(latency=0.5, bandwidth=1000.0, backend="gloo"),
        "torch": "2.0",
        "machine": {"device": "a processor"},
        "assumed": {"processes": 2, "threads": 1},
    }
    return Profile(**{**content, **changes})


@pytest.fixture
def saved(tmp_path: Path) -> str:
    path = tmp_path / "profile.json"
    make_profile().save(path)
    return str(path)


def one_stage_each(microbatches: int = 2) -> Program:
    return build("1f1b", Shape(2, microbatches, layers=4))


def test_file_comes_back_as_it_was(saved: str) -> None:
    assert Profile.load(saved) == make_profile()
    other = make_profile(messages=MessageTimes(0.5, 1000.0, "nccl", (1.0, 1e-3), (2.0, 2e-3)))
    other.save(saved)
    assert Profile.load(saved) == other
    content = json.loads(Path(saved).read_text(encoding="utf-8"))
    assert (content["format"], content["version"]) == ("helixpipe profile", 1)


def test_an_op_takes_its_pieces_and_the_overhead() -> None:
    costs, program = ProfileCosts(make_profile()), one_stage_each()
    layer = 1 + 2 + 4 + 8 + 16
    recomputed = replace(program, stages=RecomputeOptions("full").stages(program.stages))
    assert costs.op_time(recomputed, Op("R", 0, 0)) == 2 * layer + OVERHEAD["R"]
    for kind, factor in (("F", 1.0), ("I", 1.0), ("W", 0.5), ("B", 2.0)):
        assert costs.op_time(program, Op(kind, 0, 0)) == factor * (0.5 + 2 * layer) + OVERHEAD[kind]
        assert costs.op_time(program, Op(kind, 1, 1)) == factor * (2 * layer + 32) + OVERHEAD[kind]


def test_a_message_takes_latency_and_its_bytes() -> None:
    costs, program = ProfileCosts(make_profile()), one_stage_each()
    for message in lower(program).messages:  # one hidden state of 16 tokens, 2 sequences, 32 channels, 4 bytes
        assert costs.message_bytes(program, message) == 4096
        assert costs.message_time(program, message) == 0.5 + 4.096


def test_messages_take_time_of_their_ranks() -> None:
    """One hidden state is 4096 bytes: 1 + 4.096 to send, 2 + 8.192 to receive."""
    plain = ProfileCosts(make_profile())
    costs = ProfileCosts(make_profile(messages=MessageTimes(0.5, 1000.0, "gloo", (1.0, 1e-3), (2.0, 2e-3))))
    send, receive = 1.0 + 4.096, 2.0 + 8.192

    def extra(program: Program, op: Op) -> float:
        return costs.op_time(program, op) - plain.op_time(program, op)

    program = one_stage_each()
    first = [extra(program, Op(kind, 0, 0)) for kind in "FBIWR"]
    last = [extra(program, Op(kind, 1, 0)) for kind in "FBIWR"]
    assert first == pytest.approx([send, receive, receive, 0, 0])
    assert last == pytest.approx([receive, send, send, 0, 0])
    middle = build("1f1b", Shape(4, 2, layers=4))
    assert extra(middle, Op("F", 1, 0)) == pytest.approx(send + receive)
    vee = build("zbv", Shape(2, 4, layers=4))  # stages 0 and 3 on rank 0, stages 1 and 2 on rank 1
    assert [extra(vee, Op("F", stage, 0)) for stage in range(4)] == pytest.approx([send, receive, send, receive])
    assert extra(replace(program, ranks=()), Op("F", 0, 0)) == pytest.approx(send)


def test_memory_is_counted_in_bytes() -> None:
    costs, program = ProfileCosts(make_profile()), one_stage_each()
    counted, chunk, pieces = PieceBytes(MODEL, LAYOUT), Chunk(16), program.stages[1].pieces
    assert costs.memory_unit == "bytes"
    assert costs.stash(program, Op("F", 1, 0)) == counted.stash(pieces, chunk)
    recomputed = replace(program, stages=RecomputeOptions("full", recompute_num_layers=2).stages(program.stages))
    head = counted.stash(pieces[-1:], chunk)
    assert costs.stash(recomputed, Op("F", 1, 0)) == 4096 + head
    assert costs.deferred_stash(program, Op("I", 1, 0)) == counted.deferred_stash(pieces, chunk)
    assert costs.static_memory(pieces) == counted.parameters(pieces) * (4 + 4 + 8)
    half = ProfileCosts(make_profile(layout=replace(LAYOUT, element_bytes=2)))
    assert half.static_memory(pieces) == counted.parameters(pieces) * (2 + 4 + 12)
    peaks = simulate(lower(program), costs).peak_activation
    assert peaks == [2 * counted.stash(program.stages[0].pieces, chunk), counted.stash(pieces, chunk)]


def test_a_chunk_that_was_not_measured_takes_its_share() -> None:
    """4 of 16 tokens after 12: a quarter of everything, but 4(12 + 2) of 16 * 8 of attention."""
    profile = make_profile()
    pieces = profile.chunks[0].pieces
    stages = tuple(Stage((piece,)) for piece in model_pieces(1))
    program = Program("chunked", stages, ((),), 1, num_chunks=2, chunk_lengths=(12, 4))
    costs = ProfileCosts(profile)
    for stage, (piece,) in enumerate(each.pieces for each in stages):
        share = 56 / 128 if piece.kind == "attn" else 1 / 4
        expected = pieces[piece.kind]["F"] * share + OVERHEAD["F"]
        crossing = costs.op_time(program, Op("F", stage, 0, 1)) - expected
        assert crossing == pytest.approx(costs._exchange_time(program, Op("F", stage, 0, 1)))


def test_chunks_are_found_by_their_place() -> None:
    (whole,) = make_profile().chunks
    late = ChunkTimes(4, 12, whole.pieces, {**OVERHEAD, "F": 100.0})
    costs = ProfileCosts(make_profile(chunks=(whole, late)))
    program = Program("chunked", even_stages(1, 1), ((),), 1, num_chunks=2, chunk_lengths=(12, 4))
    assert costs.op_time(program, Op("F", 0, 0, 1)) == sum(SECONDS.values()) + 100.0


def _without_attention(content: dict[str, Any]) -> None:
    del content["chunks"][0]["pieces"]["attn"]


def _negative(content: dict[str, Any]) -> None:
    content["chunks"][0]["pieces"]["mlp"]["B"] = -1.0


def _text(content: dict[str, Any]) -> None:
    content["chunks"][0]["overhead"]["W"] = "short"


def _no_bandwidth(content: dict[str, Any]) -> None:
    content["messages"]["bandwidth"] = 0.0


def _more_of_a_model(content: dict[str, Any]) -> None:
    content["model"]["experts"] = 8


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_without_attention, r"is damaged \('attn' is missing\); measure again"),
        (_negative, r"is damaged \(mlp B is -1.0\)"),
        (_text, r"is damaged \(overhead W is 'short'\)"),
        (_no_bandwidth, r"is damaged \(bandwidth is 0.0\)"),
        (_more_of_a_model, r"is damaged \(.*unexpected keyword argument 'experts'\)"),
        (lambda content: content.update(chunks=[]), r"is damaged \(it has no chunk\)"),
        (lambda content: content.update(version=0), "has version 0 of the format and this program reads version 1"),
        (lambda content: content.update(format="timeline"), "was not written by `helixpipe profile`"),
    ],
)
def test_wrong_files_are_refused_in_one_sentence(saved: str, damage: Any, reason: str) -> None:
    content = json.loads(Path(saved).read_text(encoding="utf-8"))
    damage(content)
    Path(saved).write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(UserError, match=reason) as caught:
        Profile.load(saved)
    assert str(caught.value).startswith(f"--profile: {saved} ")


def test_no_file_and_no_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*missing\.json: No such file or directory\."):
        Profile.load(tmp_path / "missing.json")
    (tmp_path / "text").write_text("pieces", encoding="utf-8")
    with pytest.raises(UserError, match=r"text is not JSON; `helixpipe profile` writes such files\."):
        Profile.load(tmp_path / "text")


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
        ("", "profile needs --model, or else --num-layers, --hidden-size, .*; --num-layers is missing"),
        (OWN.replace("--seq-length 16", ""), "; --seq-length is missing"),
        ("--model llama", "--model llama is unknown: did you mean llama"),
        (f"{OWN} --num-query-groups 3", "--num-query-groups 3 must divide --num-attention-heads 4"),
        ("--model llama2-7b --hidden-size 100", "--hidden-size 100 must be a multiple of --num-attention-heads 32"),
        (f"{OWN} --hidden-size 36 --position-embedding-type rope", "rope needs an even .*, not 9"),
        (f"{OWN} --repeats 0", "--repeats must be at least 1, not 0"),
        (f"{OWN} --dtype float64", "--dtype: .*'float64'"),
        (f"{OWN} --hidden 8", "unknown flag --hidden; did you mean --"),
    ],
)
def test_wrong_flags_of_profile(capsys: pytest.CaptureFixture[str], flags: str, sentence: str) -> None:
    assert re.search(sentence, refused(capsys, f"profile {flags}"))


def test_flags_change_a_preset() -> None:
    shape = cli_profile.model_shape(
        cli_profile.ProfileOptions(
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
    monkeypatch.setattr(cli_profile.sys, "executable", "/bin/false")
    assert "a process that measures failed: exit code 1" in refused(capsys, f"profile {OWN}")


@pytest.mark.parametrize(
    ("style", "processes"),
    [
        ("", 2),
        (
            "--swiglu --normalization RMSNorm --position-embedding-type rope --dtype bfloat16 --processes 3 "
            "--chunk-size 5",
            3,
        ),
    ],
)
def test_a_tiny_model_from_end_to_end(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, style: str, processes: int
) -> None:
    path = tmp_path / "measured.json"
    assert cli.main(f"profile {OWN} {style} --repeats 2 --output {path}".split()) == 0
    output = capsys.readouterr()
    assert output.err == ""
    assert f"wrote {path}; next: helixpipe simulate 1f1b" in output.out
    measured = Profile.load(path)
    assert measured.layout == Layout(element_bytes=2 if style else 4, fused_kernels=False, mlp_chunk=5 if style else 0)
    (times,) = measured.chunks
    assert (times.tokens, times.earlier) == (16, 0)
    for piece in PIECE_KINDS:
        assert all(times.pieces[piece][kind] > 0 for kind in "FBI")
        assert times.pieces[piece]["R"] == times.pieces[piece]["F"]
    assert all(times.pieces[piece]["W"] > 0 for piece in ("qkv", "proj", "head"))
    assert style or times.pieces["mlp"]["W"] > 0  # slices compute it in I
    assert measured.messages.backend == "gloo" and measured.messages.bandwidth > 0
    assert (measured.assumed["processes"], measured.assumed["threads"], measured.assumed["repeats"]) == (
        processes,
        1,
        2,
    )
    assert measured.assumed["kernels"] == (
        f"attention torch CPU, norm torch {measured.model.norm}, linear megatron-core, activation not fused, "
        "transport gloo, gradients float32"
    )
    assert cli.main(f"simulate interleaved-1f1b -p 2 -m 4 -v 2 --profile {path} --json".split()) == 0
    assert json.loads(capsys.readouterr().out)["makespan"] > 0


def test_the_line_through_message_times() -> None:
    latency, per_byte = fit_line([(size, 1e-4 + 2e-9 * size) for size in (1e3, 1e4, 1e6)])
    assert (latency, per_byte) == (pytest.approx(1e-4), pytest.approx(2e-9))
    assert fit_line([(1.0, 1.0), (2.0, 4.0)])[0] == 0.0


def test_pieces_add_up_to_what_whole_units_take() -> None:
    """A layer's pieces measured alone take 31; whole units of one and three layers say 62 a layer and 5 beside."""
    samples = {(piece, "F"): [seconds] for piece, seconds in SECONDS.items()}
    samples["short", "F"], samples["long", "F"] = [62 + 32.5 + 5], [3 * 62 + 32.5 + 5]
    scaled, overhead = scale_to_whole_units(samples, "F")
    assert scaled == {name: seconds * (1 if name in ("embed", "head") else 2) for name, seconds in SECONDS.items()}
    assert overhead == 5.0
