"""`helixpipe profile` and costs from its file: format, sums, refusals, and a tiny model measured from end to end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helixpipe.common.errors import UserError
from helixpipe.costs.hardware import HARDWARE
from helixpipe.costs.measured_chunks import MeasuredChunk
from helixpipe.costs.models import Chunk, Layout, ModelShape
from helixpipe.costs.piece_bytes import PieceBytes
from helixpipe.costs.profile_costs import CopyTimes, MessageTimes, Profile, ProfileCosts, WeightTimes
from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.lower import lower
from helixpipe.planning.memory.recompute import RecomputeOptions
from helixpipe.profile import measurement
from helixpipe.profile.measurement import MicrobatchShape, rows, scale_to_whole_units
from helixpipe.profile.message_times import fit_line
from helixpipe.program.costs import Contents, Load
from helixpipe.program.program import Op, Program
from helixpipe.program.stages import LayerKinds, Segment, Stage, even_stages, model_pieces, role_of
from helixpipe.program.workload import uniform
from helixpipe.simulate.simulator import simulate
from schedules import Shape, build
from tests.costs.asking import copy_time, copying_time, message_bytes, op_time, sizes

MODEL = ModelShape("own", 4, 32, 4, 2, 40, True, 200, False, "RMSNorm", "rope", False, 16)
LAYOUT = Layout(micro_batch_size=2, element_bytes=4, fused_kernels=False)
SECONDS = {"embed": 0.5, "norm": 1.0, "qkv": 2.0, "attn": 4.0, "proj": 8.0, "mlp": 16.0, "head": 32.0}
COPIES = CopyTimes(0.5, (2000.0, 1000.0), (4000.0, 500.0))
OVERHEAD = {"F": 0.25, "I": 0.5, "W": 0.125, "B": 0.75, "R": 0.25}
OWN = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --vocab-size 200 --seq-length 16"


def make_profile(**changes: Any) -> Profile:
    """F of each piece as in SECONDS, B twice that, I as F and W half of F."""
    factors = {"F": 1.0, "I": 1.0, "W": 0.5, "B": 2.0, "R": 1.0}
    kinds = changes.get("model", MODEL).kinds
    pieces = {piece: {kind: factors[kind] * SECONDS[role_of(piece)] for kind in factors} for piece in kinds}
    content = {
        "model": MODEL,
        "layout": LAYOUT,
        "dtype": "float32",
        "seq_length": 16,
        "chunks": (MeasuredChunk(16, 0, pieces, OVERHEAD),),
        "messages": MessageTimes(latency=0.5, bandwidth=1000.0, backend="gloo"),
        "torch": "2.0",
        "machine": {"device": "a processor"},
        "assumed": {"processes": 2, "threads": 1},
        "copies": COPIES,
    }
    return Profile(**{**content, **changes})


def one_stage_each(microbatches: int = 2) -> Program:
    return build("1f1b", Shape(2, microbatches, layers=4))


def test_file_comes_back_as_it_was(saved: str) -> None:
    assert Profile.load(saved) == make_profile()
    other = make_profile(messages=MessageTimes(0.5, 1000.0, "nccl", (1.0, 1e-3), (2.0, 2e-3)))
    other.save(saved)
    assert Profile.load(saved) == other
    mixed = make_profile(model=replace(MODEL, window=5, windowed=(1, 0), unrotated=(0, 0, 1, 0)))
    mixed.save(saved)
    assert Profile.load(saved) == mixed and set(mixed.chunks[0].pieces) > {"attn", "attn.window", "qkv", "qkv.norope"}
    content = json.loads(Path(saved).read_text(encoding="utf-8"))
    assert (content["format"], content["version"]) == ("helixpipe profile", 2)


def test_an_op_takes_its_pieces_and_the_overhead() -> None:
    costs, program = ProfileCosts(make_profile()), one_stage_each()
    layer = 1 + 2 + 4 + 8 + 16
    recomputed = replace(program, stages=RecomputeOptions("full").stages(program.stages))
    assert op_time(costs, recomputed, Op("R", 0, 0)) == 2 * layer + OVERHEAD["R"]
    for kind, factor in (("F", 1.0), ("I", 1.0), ("W", 0.5), ("B", 2.0)):
        assert op_time(costs, program, Op(kind, 0, 0)) == factor * (0.5 + 2 * layer) + OVERHEAD[kind]
        assert op_time(costs, program, Op(kind, 1, 1)) == factor * (2 * layer + 32) + OVERHEAD[kind]


def test_a_message_takes_latency_and_its_bytes() -> None:
    costs, program = ProfileCosts(make_profile()), one_stage_each()
    for message in lower(program).messages:  # one hidden state of 16 tokens, 2 sequences, 32 channels, 4 bytes
        assert message_bytes(costs, program, message) == 4096
        assert BoundCosts(program, costs).transfer_time(message) == 0.5 + 4.096


def test_a_copy_takes_latency_and_its_bytes_with_both_directions_in_use(saved: str) -> None:
    costs = ProfileCosts(Profile.load(saved))
    assert [copy_time(costs, 1000, inward) for inward in (False, True)] == [1.5, 2.5]


def test_a_file_from_before_copies_were_measured(saved: str) -> None:
    """It has the copies of the hardware it was measured on, or none."""
    content = json.loads(Path(saved).read_text(encoding="utf-8"))
    del content["copies"]
    Path(saved).write_text(json.dumps(content), encoding="utf-8")
    costs = ProfileCosts(Profile.load(saved))
    assert costs.op_time(BoundCosts(one_stage_each(), costs).work(Op("F", 0, 0))) > 0
    with pytest.raises(UserError, match=r"nothing of copies .* nor is anything known of a processor; measure again\."):
        copy_time(costs, 1000, inward=False)
    known = ProfileCosts(make_profile(copies=None, machine={"device": "NVIDIA A100-SXM4-80GB"}))
    assert copy_time(known, 1e9, True) == 10e-6 + 1e9 / HARDWARE["a100-80"].host_bandwidth(both=True)


def test_messages_take_time_of_their_ranks() -> None:
    """One hidden state is 4096 bytes: 1 + 4.096 to send, 2 + 8.192 to receive."""
    plain = ProfileCosts(make_profile())
    costs = ProfileCosts(make_profile(messages=MessageTimes(0.5, 1000.0, "gloo", (1.0, 1e-3), (2.0, 2e-3))))
    send, receive = 1.0 + 4.096, 2.0 + 8.192

    def extra(program: Program, op: Op) -> float:
        return op_time(costs, program, op) - op_time(plain, program, op)

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


def test_weights_and_copies_take_time_of_their_ranks(saved: str) -> None:
    """As messages, and packed where they leave, added up where gradients come; copies for each byte."""
    messages = MessageTimes(0.5, 1000.0, "gloo", (1.0, 1e-3), (2.0, 2e-3))
    copies = replace(COPIES, own=(0.25, 0.125))
    make_profile(messages=messages, weights=WeightTimes((3.0, 3e-3), (4.0, 4e-3)), copies=copies).save(saved)
    costs, pieces = ProfileCosts(Profile.load(saved)), tuple(model_pieces(1))
    size = 4 * costs.bytes.parameters(pieces)

    def handled(kind: str, sends: bool) -> float:
        contents = Contents(kind, (Segment(pieces, False),), (), 16.0)
        return costs.handling_time(Load(kind, (0, 1), contents), sends)

    assert handled("weights", True) == pytest.approx(1 + 3 + 4e-3 * size)
    assert handled("weights", False) == pytest.approx(2 + 2e-3 * size)
    assert handled("weight_gradients", True) == pytest.approx(1 + 1e-3 * size)
    assert handled("weight_gradients", False) == pytest.approx(2 + 4 + 6e-3 * size)
    assert [copying_time(costs, 8, inward) for inward in (False, True)] == [2.0, 1.0]
    content = json.loads(Path(saved).read_text(encoding="utf-8"))
    del content["weights"], content["copies"]["own"]
    Path(saved).write_text(json.dumps(content), encoding="utf-8")
    before = Profile.load(saved)  # a file from before they were measured
    assert before.weights == WeightTimes() and before.copies == COPIES


def test_memory_is_counted_in_bytes() -> None:
    costs, program = ProfileCosts(make_profile()), one_stage_each()
    counted, chunk, pieces = PieceBytes(MODEL, LAYOUT), Chunk(16), program.stages[1].pieces
    assert costs.memory_unit == "bytes"
    assert sizes(costs, program, Op("F", 1, 0), "saved") == counted.stash(pieces, chunk)
    recomputed = replace(program, stages=RecomputeOptions("full", recompute_num_layers=2).stages(program.stages))
    head = counted.stash(pieces[-1:], chunk)
    assert sizes(costs, recomputed, Op("F", 1, 0), "saved") == 4096 + head
    assert sizes(costs, program, Op("I", 1, 0), "deferred") == counted.deferred_stash(pieces, chunk)
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
    program = Program("chunked", stages, ((),), uniform(1, 2, (12, 4)))
    costs = ProfileCosts(profile)
    for stage, (piece,) in enumerate(each.pieces for each in stages):
        share = 56 / 128 if piece.kind == "attn" else 1 / 4
        expected = pieces[piece.kind]["F"] * share + OVERHEAD["F"]
        assert op_time(costs, program, Op("F", stage, 0, 1)) == pytest.approx(expected)


def test_chunks_are_found_by_their_place() -> None:
    (whole,) = make_profile().chunks
    late = MeasuredChunk(4, 12, whole.pieces, {**OVERHEAD, "F": 100.0})
    costs = ProfileCosts(make_profile(chunks=(whole, late)))
    program = Program("chunked", even_stages(1, 1), ((),), uniform(1, 2, (12, 4)))
    assert op_time(costs, program, Op("F", 0, 0, 1)) == sum(SECONDS.values()) + 100.0


def test_a_file_of_version_1(saved: str) -> None:
    """Its chunks say nothing of documents."""
    content = json.loads(Path(saved).read_text(encoding="utf-8"))
    content["version"] = 1
    del content["chunks"][0]["documents"]
    Path(saved).write_text(json.dumps(content), encoding="utf-8")
    assert Profile.load(saved) == make_profile()


def test_rows_that_are_measured() -> None:
    """Fourths down to 64 tokens; the two longest in four chunks; eight documents in all but the longest."""
    assert rows(16) == [MicrobatchShape((16,))]
    assert rows(1030) == [
        *(MicrobatchShape((1030,)), MicrobatchShape((257,)), MicrobatchShape((64,))),
        *(MicrobatchShape((257,) * 4), MicrobatchShape((64,) * 4)),
        *(MicrobatchShape((256,), 8), MicrobatchShape((64,), 8)),
    ]
    assert [row.whole for row in rows(256)] == [True, True, False, False]


def _no_documents(content: dict[str, Any]) -> None:
    content["chunks"][0]["documents"] = 0


def _without_attention(content: dict[str, Any]) -> None:
    del content["chunks"][0]["pieces"]["attn"]


def _negative(content: dict[str, Any]) -> None:
    content["chunks"][0]["pieces"]["mlp"]["B"] = -1.0


def _text(content: dict[str, Any]) -> None:
    content["chunks"][0]["overhead"]["W"] = "short"


def _odd_piece(content: dict[str, Any]) -> None:
    content["chunks"][0]["pieces"]["odd"] = content["chunks"][0]["pieces"]["mlp"]


def _no_bandwidth(content: dict[str, Any]) -> None:
    content["messages"]["bandwidth"] = 0.0


def _no_copies(content: dict[str, Any]) -> None:
    content["copies"]["inward"][1] = 0.0


def _negative_packing(content: dict[str, Any]) -> None:
    content["weights"]["pack"][1] = -1.0


def _no_own(content: dict[str, Any]) -> None:
    content["copies"]["own"] = [None, 0.0]


def _one_way(content: dict[str, Any]) -> None:
    del content["copies"]["out"]


def _more_of_a_model(content: dict[str, Any]) -> None:
    content["model"]["towers"] = 8


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_without_attention, r"is damaged \('attn' is missing\); measure again"),
        (_no_documents, r"is damaged \(a chunk has 16 tokens after 0, 0 documents\)"),
        (_negative, r"is damaged \(mlp B is -1.0\)"),
        (_text, r"is damaged \(overhead W is 'short'\)"),
        (_odd_piece, r"is damaged \(a chunk has times of 'odd'\)"),
        (lambda content: content["chunks"][0]["overhead"].update(X=1.0), r"is damaged \(a chunk has times of 'X'\)"),
        (_no_bandwidth, r"is damaged \(bandwidth is 0.0\)"),
        (_no_copies, r"is damaged \(a bandwidth of copies is 0\)"),
        (_negative_packing, r"is damaged \(packing weights, a byte is -1.0\)"),
        (_no_own, r"is damaged \(own time 0 of copies is None\)"),
        (_one_way, r"is damaged \('out' is missing\)"),
        (_more_of_a_model, r"is damaged \(.*unexpected keyword argument 'towers'\)"),
        (lambda content: content.update(chunks=[]), r"is damaged \(it has no chunk\)"),
        (lambda content: content["model"].update(layers=4.5), r"is damaged \(model layers is 4.5\)"),
        (lambda content: content["model"].update(hidden=True), r"is damaged \(model hidden is True\)"),
        (lambda content: content.update(expert_loads=[[10**400]]), r"is damaged \(int too large to convert to float\)"),
        (lambda content: content["model"].update(hidden=[0]), r"is damaged \(model hidden is \(0,\)\)"),
        (lambda content: content["model"].update(windowed=[2]), r"is damaged \(model windowed is \(2,\)\)"),
        (lambda content: content["model"].update(vocab=10**30), r"is damaged \(model vocab is 10+\)"),
        (lambda content: content["model"].update(gated="no"), r"is damaged \(model gated is 'no'\)"),
        (lambda content: content["layout"].update(tensor_parallel=0), r"is damaged \(layout tensor_parallel is 0\)"),
        (lambda content: content.update(seq_length="16"), r"is damaged \(seq_length is '16'\)"),
        (lambda content: content.update(machine=[]), r"is damaged \(machine is no object\)"),
        (lambda content: content["messages"].update(bandwidth=10**400), r"is damaged \(bandwidth is 10+\)"),
        (
            lambda content: content.update(version=0),
            "has version 0 of the format and this program reads versions 1 to 2",
        ),
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


def test_the_line_through_message_times() -> None:
    latency, per_byte = fit_line([(size, 1e-4 + 2e-9 * size) for size in (1e3, 1e4, 1e6)])
    assert (latency, per_byte) == (pytest.approx(1e-4), pytest.approx(2e-9))
    assert fit_line([(1.0, 1.0), (2.0, 4.0)])[0] == 0.0
    once, per_byte = fit_line([(1.0, 0.0), (2.0, 0.0), (1000.0, 1.0)])  # a difference of two times may be nothing
    assert (once, per_byte) == (pytest.approx(0.0, abs=1e-2), pytest.approx(1e-3, rel=1e-2))


def test_pieces_add_up_to_what_whole_units_take() -> None:
    """A layer's pieces measured alone take 31; whole units of one and three layers say 62 a layer and 5 beside."""
    samples = {(piece, "F"): [seconds] for piece, seconds in SECONDS.items()}
    samples["short 0", "F"], samples["long 0", "F"] = [62 + 32.5 + 5], [3 * 62 + 32.5 + 5]
    scaled, overhead = scale_to_whole_units(samples, "F")
    assert scaled == {name: seconds * (1 if name in ("embed", "head") else 2) for name, seconds in SECONDS.items()}
    assert overhead == 5.0


def test_layers_that_are_unlike_are_measured_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by itself; what they have in common is that of the first, and progress goes on."""
    made: list[tuple[LayerKinds, tuple[int, int]]] = []

    class Given:
        def __init__(self, task: Any, group: Any, layer: LayerKinds, part: tuple[int, int]):
            made.append((layer, part))
            self.number, self.layer = len(made), layer

        def run(self) -> tuple[MeasuredChunk, ...]:
            pieces = {piece: dict.fromkeys("FIWBR", self.number) for piece in ("embed", *self.layer, "head")}
            return tuple(MeasuredChunk(tokens, 0, pieces, OVERHEAD) for tokens in (16, 8))

        def expert_loads(self) -> tuple[tuple[float, ...], ...]:
            return ((self.number, 1.0),)

    monkeypatch.setattr(measurement, "Measurement", Given)
    model = replace(MODEL, window=5, windowed=(1, 0), unrotated=(0, 1))
    first, chunks, loads = measurement.measured_layers(SimpleNamespace(model=model), None)
    assert loads == ((1, 1.0), (2, 1.0))
    assert made == [(model.kinds_of(4)[0], (0, 2)), (model.kinds_of(4)[1], (1, 2))]
    assert first.layer == made[0][0]  # type: ignore[attr-defined]
    assert [chunk.tokens for chunk in chunks] == [16, 8]
    for chunk in chunks:
        assert set(chunk.pieces) == set(model.kinds)
        seconds = {piece: times["F"] for piece, times in chunk.pieces.items()}
        assert (seconds["attn.window"], seconds["qkv"], seconds["mlp"]) == (1, 1, 1)
        assert (seconds["attn"], seconds["qkv.norope"]) == (2, 2)
