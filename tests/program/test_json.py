"""Programs as JSON files: nothing is lost, and what cannot be read is told with its place."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixpipe.common.errors import ProgramError, ScheduleError, UserError
from helixpipe.costs.by_hand import PieceTimes, unit_costs
from helixpipe.costs.layer_patterns import kinds_of_layers
from helixpipe.lowering.validate import validate
from helixpipe.planning.vocabulary.choice import split_heads
from helixpipe.program.files import load_program, save_program
from helixpipe.program.json_text import from_json, json_text, to_json
from helixpipe.program.program import Program, Unit, of_layers
from helixpipe.program.stages import Activations, LayerKinds, Piece, RingOptions, layer_kinds, model_pieces
from helixpipe.program.workload import Slice, Workload, uniform
from schedules import CATALOGUE, Shape, build
from tests.lowering.random_programs import random_program, random_runs


def read(tmp_path: Path, content: str | bytes) -> Program:
    path = tmp_path / "x.json"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return from_json(path)


def varied(rng: Random) -> Program:
    """A random program; half of them with a workload and activations that no schedule makes."""
    program = random_program(rng)
    if rng.random() < 0.5:
        return program
    documents = [Slice(rng.randrange(4), start := rng.randrange(99), rng.randint(1, 9) + start) for _ in range(9)]
    chunks = tuple(tuple(rng.sample(documents, rng.randrange(4))) for _ in range(rng.randint(1, 3)))
    units = rng.sample(list(program.units()), 1)
    own = {
        unit: Activations(
            random_runs(program.stages[unit.stage].pieces, 0.5, rng),
            tuple((run, rng.random()) for run in random_runs(program.stages[unit.stage].pieces, 0.5, rng)),
        )
        for unit in units
    }
    workload = Workload((chunks, *program.workload.microbatches), rng.random() < 0.3)
    return replace(program, workload=workload, activations=own)


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32))
def test_any_program_comes_back(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    program = varied(Random(seed))
    path = tmp_path_factory.getbasetemp() / "program.json"
    to_json(program, path)
    assert from_json(path) == program
    assert json_text(from_json(path)) == path.read_text(encoding="utf-8")


def test_a_person_can_read_it() -> None:
    """A line a stage, a rank and a microbatch; what is as always is left out."""
    program = build("1f1b", Shape(2, 2, 4))
    first, last = program.stages
    last = replace(last, recompute=((*last.pieces[1:3],), last.pieces[5:10]))
    program = replace(program, stages=(replace(first, placement="shipped", owner=1), last), ring=RingOptions(2))
    documents = (((Slice(0, 0, 5), Slice(1, 0, 3)),), ((Slice(1, 3, 8),),))
    own = {Unit(1, 0): Activations((last.pieces[:1],), (((Piece("mlp", 3),), 0.5),)), Unit(1, 1): Activations()}
    program = replace(program, workload=Workload(documents), activations=own)
    assert (
        json_text(program)
        == """{
  "format": "helixpipe program",
  "version": 1,
  "schedule": "1f1b",
  "ring": {"slots": 2, "gradient_bytes": 4},
  "stages": [
    {"pieces": "embed layers 0-1", "placement": "shipped", "owner": 1},
    {"pieces": "layers 2-3 head", "recompute": ["qkv[2] attn[2]", "layer 3"]}
  ],
  "workload": {
    "microbatches": [
      ["0[0:5] 1[0:3]"],
      ["1[3:11]"]
    ]
  },
  "ranks": [
    "0F0 0F1 0B0 0B1",
    "1F0 1B0 1F1 1B1"
  ],
  "activations": [
    {"units": "1F0", "recompute": ["norm[2]"], "offload": [{"pieces": "mlp[3]", "share": 0.5}]},
    {"units": "1F1"}
  ]
}
"""
    )
    assert '"workload": {"microbatches": 4, "chunks": 2}' in json_text(replace(program, workload=uniform(4, 2)))
    assert '"workload": {"microbatches": 4, "lengths": [9, 7]}' in json_text(
        replace(program, workload=uniform(4, 2, (9, 7)))
    )
    assert '"workload": {"microbatches": 4, "lengths": [9, 7], "proportional": true}' in json_text(
        replace(program, workload=uniform(4, 2, (9, 7), proportional=True))
    )


GOOD = json_text(build("1f1b", Shape(2, 2, 2)))

TEXTS: list[tuple[str | bytes, str]] = [
    ("", "x.json, line 1, column 1: Expecting value."),
    (GOOD[:100], "x.json, line 6, column "),
    (GOOD[:-2], "x.json, line "),
    (b"\xff\xfe{}", "'utf-8' codec can't decode"),
    ("[" * 100_000, "nested more than 100 deep"),
    ('{"a":' * 100_000, "nested more than 100 deep"),
    ("9" * 5000, "cannot read the schedule file"),
    ("NaN", "NaN is no number of JSON"),
    ("[]", 'x.json is no program: it must be an object whose "format" is "helixpipe program".'),
    ('{"title": "a timeline"}', "x.json is no program"),
    (GOOD.replace('"version": 1', '"version": 2'), "x.json has version 2 of the format, and 1 is known here."),
    (GOOD.replace('"schedule"', '"format": "", "schedule"'), 'the key "format" is twice in one object'),
]


@pytest.mark.parametrize(("content", "says"), TEXTS, ids=[says for _, says in TEXTS])
def test_what_is_no_program(tmp_path: Path, content: str | bytes, says: str) -> None:
    with pytest.raises(ProgramError) as caught:
        read(tmp_path, content)
    sentence = str(caught.value)
    assert says in sentence and "x.json" in sentence and sentence.endswith(".") and "\n" not in sentence


Content = dict[str, Any]

CHANGES: list[tuple[Callable[[Content], Any], str]] = [
    (lambda c: c.pop("ranks"), "x.json: the key ranks is missing."),
    (lambda c: c.update(rank=[]), 'x.json: unknown key "rank"; did you mean ranks?'),
    (lambda c: c.update(version=True), "x.json, version must be a whole number of at most 15 digits, not true."),
    (lambda c: c.update(schedule="a\nb"), 'x.json, schedule must be text without line breaks, not "a\\nb".'),
    (lambda c: c.update(schedule="\ud800"), 'x.json, schedule must be text without line breaks, not "\\ud800".'),
    (lambda c: c.update(forward_only=0), "x.json, forward_only must be true or false, not 0."),
    (lambda c: c.update(ranks="0F0"), 'x.json, ranks must be a list, not "0F0".'),
    (lambda c: c.update(ranks=[]), "x.json contains no ops."),
    (lambda c: c.update(ranks=[["0F0"]]), "x.json, ranks[0] must be text without line breaks, not a list."),
    (lambda c: c.update(ranks=["", "0F0 0F1x"]), "x.json, ranks[1], op 2: cell '0F1x' is not an op: write stage"),
    (lambda c: c.update(ranks=["0SEND_F1"]), "x.json, ranks[0], op 1: cell '0SEND_F1' is not one op, such as 2F5."),
    (lambda c: c.update(stages=[]), "x.json, stages must list at least one stage."),
    (lambda c: c.update(stages=[[]]), "x.json, stages[0] must be an object, not a list."),
    (lambda c: c["stages"][1].update(place=""), 'x.json, stages[1]: unknown key "place"; did you mean placement?'),
    (lambda c: c["stages"][1].update(owner=0.5), "x.json, stages[1].owner must be a whole number"),
    (lambda c: c["stages"][1].update(owner=10**15), "x.json, stages[1].owner must be a whole number"),
    (lambda c: c["stages"][0].update(pieces="embed nrom[0]"), 'x.json, stages[0].pieces: "nrom[0]" is no piece; write'),
    (lambda c: c["stages"][0].update(pieces="norm[100000]"), 'x.json, stages[0].pieces: "norm[100000]" is no piece;'),
    (lambda c: c["stages"][0].update(pieces="layers 3-2"), "layers 3-2 must count up, to 99999 at most."),
    (lambda c: c["stages"][0].update(pieces="layers 0-999999999"), "layers 0-999999999 must count up, to 99999"),
    (lambda c: c["stages"][0].update(pieces="layers 0-"), '"layers" is no piece'),
    (lambda c: c["stages"][0].update(recompute=[3]), "x.json, stages[0].recompute[0] must be text"),
    (lambda c: c.update(ring={"slots": 3}), "x.json, ring: the key gradient_bytes is missing."),
    (
        lambda c: c.update(ring={"slots": 3, "gradient_bytes": 3}),
        "x.json, ring.gradient_bytes must be 2 or 4, not 3.",
    ),
    (
        lambda c: c.update(workload={"microbatches": 999_999_999, "chunks": 1}),
        "x.json, workload: 999999999 microbatches of 1 chunks are more than the 8 ops.",
    ),
    (lambda c: c.update(workload={"microbatches": 0, "chunks": 1}), "x.json, workload: the number of microbatches"),
    (lambda c: c.update(workload={"microbatches": 2, "lengths": [4, 0]}), "x.json, workload: chunk lengths (4, 0)"),
    (lambda c: c.update(workload={"microbatches": 2, "lengths": []}), "x.json, workload: the number of chunks"),
    (lambda c: c.update(workload={"microbatches": 2}), "x.json, workload must have microbatches and either chunks"),
    (
        lambda c: c.update(workload={"microbatches": [["0[0:5]"]], "lengths": [5]}),
        "x.json, workload: lengths has nothing to say where each microbatch lists its chunks.",
    ),
    (
        lambda c: c.update(workload={"microbatches": [["0[0:5] 1[3]"]]}),
        'x.json, workload.microbatches[0][0]: "1[3]" is no slice; 3[0:512] is tokens 0 to 511 of document 3.',
    ),
    (lambda c: c.update(activations=[{"units": "0B0"}]), "x.json, activations[0].units: 0B0 is no forward"),
    (
        lambda c: c.update(activations=[{"units": "0F0"}, {"units": "1F0 0F0.0"}]),
        "x.json, activations[1].units: 0F0 is there twice.",
    ),
    (
        lambda c: c.update(activations=[{"units": "0F0", "offload": [{"pieces": "attn[0]", "share": "all"}]}]),
        'x.json, activations[0].offload[0].share must be a number, not "all".',
    ),
    (
        lambda c: c.update(activations=[{"units": "0F0", "offload": [{"pieces": "attn[0]"}]}]),
        "x.json, activations[0].offload[0]: the key share is missing.",
    ),
]


@pytest.mark.parametrize(("change", "says"), CHANGES, ids=[says for _, says in CHANGES])
def test_a_mistake_is_told_with_its_place(tmp_path: Path, change: Callable[[Content], Any], says: str) -> None:
    content = json.loads(GOOD)
    change(content)
    with pytest.raises(ProgramError) as caught:
        read(tmp_path, json.dumps(content))
    sentence = str(caught.value)
    assert says in sentence and sentence.startswith("x.json") and "\n" not in sentence


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "none.json", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ProgramError, match=f"cannot read the schedule file .*: {reason}"):
            from_json(path)


def test_files_by_their_ending(tmp_path: Path) -> None:
    program = build("1f1b", Shape(2, 2, 4))
    for name in ("x.json", "x.csv"):
        save_program(program, tmp_path / name)
    assert load_program(tmp_path / "x.json", 99) == program
    assert load_program(tmp_path / "x.csv", 4) == replace(program, schedule="x.csv")
    with pytest.raises(UserError, match=r"ends in \.json or \.csv, not to .*x\.txt\.$"):
        save_program(program, tmp_path / "x.txt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.csv", "x.json"]


MIXED = kinds_of_layers(8, (1, 1, 0), (0, 0, 0, 1))
"""Of a model some of whose layers attend to a window and some have no RoPE."""


@dataclass(frozen=True)
class MixedTimes(PieceTimes):
    def layer_kinds(self, layers: int) -> tuple[LayerKinds, ...]:
        return MIXED[:layers]


@pytest.mark.parametrize("name", CATALOGUE)
def test_programs_of_layers_that_are_unlike_come_back(tmp_path: Path, name: str) -> None:
    """Each schedule's, which has the pieces of the model's layers. The file of a program of plain layers becomes the
    same when it is run with that model."""
    schedule, path = CATALOGUE[name], tmp_path / "x.json"
    ranks, stages = 1 if schedule.one_rank else 2, 2 if schedule.virtual_stages else None
    shape = Shape(ranks, 4, 8, 1, stages, costs=MixedTimes())
    program = build(name, shape)
    chain = tuple(piece for stage in program.stages for piece in stage.pieces)
    assert chain == model_pieces(MIXED) and program.layer_kinds == MIXED
    save_program(program, path)
    assert load_program(path) == program
    plain = build(name, replace(shape, costs=PieceTimes()))
    save_program(plain, path)
    assert of_layers(load_program(path), MIXED) == program


def test_whole_layers_say_what_kinds_they_are_of(tmp_path: Path) -> None:
    save_program(build("1f1b", Shape(2, 2, 8, costs=MixedTimes())), tmp_path / "x.json")
    text = (tmp_path / "x.json").read_text()
    assert (
        "embed layers 0-1 (norm qkv attn.window proj mlp) layer 2 layer 3 (norm qkv.norope attn.window proj mlp)"
        in text
    )


def test_a_program_of_another_model_is_refused() -> None:
    program = build("1f1b", Shape(2, 2, 8, costs=MixedTimes()))
    with pytest.raises(ScheduleError, match=r"it has attn\.window\[0\] where this one has attn\[0\]"):
        of_layers(program, layer_kinds(8))
    assert of_layers(program, MIXED) is program


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_divided_head_round_trips(tmp_path: Path, ranks: int) -> None:
    program = split_heads(build("1f1b", Shape(ranks, 2, 6)), unit_costs())
    save_program(program, tmp_path / "x.json")
    assert f"head.part[1/{ranks}]" in (tmp_path / "x.json").read_text()
    assert load_program(tmp_path / "x.json") == program
    for word in ("head.part", "head.norm[0/2]", "head.part[1]", "attn[0/2]"):
        (tmp_path / "y.json").write_text((tmp_path / "x.json").read_text().replace(f"head.part[1/{ranks}]", word))
        with pytest.raises(ProgramError, match=r"is no piece; write .* as head\.part\[0/4\] to head\.part\[3/4\]"):
            load_program(tmp_path / "y.json")


@pytest.mark.parametrize("words", ["attn.hole[1]", "layer 1 (norm qkv attn.hole proj mlp)", "layer 1 (norm"])
def test_a_kind_that_is_none_is_refused(tmp_path: Path, words: str) -> None:
    save_program(build("1f1b", Shape(2, 2, 2)), tmp_path / "x.json")
    text = (tmp_path / "x.json").read_text()
    (tmp_path / "x.json").write_text(text.replace("layer 1 head", f"{words} head"))
    with pytest.raises(
        ProgramError,
        match=r"is no piece; write .*, head, qkv\.norope, attn\.window, qkv\.latent, .* head\.norm, .* those",
    ):
        load_program(tmp_path / "x.json")


def test_a_csv_file_holds_the_program_of_such_a_model(tmp_path: Path) -> None:
    program = build("1f1b", Shape(2, 2, 8, costs=MixedTimes()))
    save_program(program, tmp_path / "x.csv")
    read = of_layers(load_program(tmp_path / "x.csv", 8), MIXED)
    assert replace(read, schedule="1f1b") == program


CHAIN = model_pieces(2)
LOST: list[tuple[Callable[[Program], Program], str]] = [
    (lambda p: replace(p, workload=uniform(2, 1, (8,))), "the lengths of its chunks"),
    (lambda p: replace(p, workload=Workload(uniform(2).microbatches[::-1], True)), "how its documents are numbered"),
    (
        lambda p: replace(p, workload=Workload((((Slice(0, 0, 2),),), ((Slice(0, 2, 3),),)))),
        "chunks that differ between microbatches",
    ),
    (
        lambda p: replace(
            p, stages=tuple(replace(s, pieces=q) for s, q in zip(p.stages, (CHAIN[:3], CHAIN[3:]), strict=True))
        ),
        "stage 0: the stages are not equally many whole layers",
    ),
    (
        lambda p: replace(p, stages=(replace(p.stages[0], placement="shipped", owner=0), p.stages[1])),
        "stage 0, which is shipped",
    ),
    (
        lambda p: replace(p, stages=(p.stages[0], replace(p.stages[1], recompute=(p.stages[1].pieces,)))),
        "what stage 1 recomputes, which is not the whole stage by R ops",
    ),
    (lambda p: replace(p, ring=RingOptions(1)), "how the weights of its ring travel"),
    (
        lambda p: replace(p, activations={Unit(0, 0): Activations()}),
        "units whose activations are not treated as their stage says",
    ),
    (lambda p: replace(p, ranks=(*p.ranks, ())), "rank 2, which has no ops"),
    (lambda p: replace(p, turns=((p.ranks[0][0],),)), "its turns"),
]


@pytest.mark.parametrize(("change", "lost"), LOST, ids=[lost for _, lost in LOST])
def test_a_csv_file_refuses_what_it_cannot_hold(
    tmp_path: Path, change: Callable[[Program], Program], lost: str
) -> None:
    path = tmp_path / "x.csv"
    path.write_text("old")
    with pytest.raises(ProgramError) as caught:
        save_program(change(build("1f1b", Shape(2, 2, 2))), path)
    assert str(caught.value) == f"{path}: a CSV file cannot hold {lost}; give the file a name that ends in .json."
    assert path.read_text() == "old"


def test_a_csv_file_holds_recomputed_stages_and_rings(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("0F0,0R0,0B0\n1F0,1B0\n")
    first = load_program(path, 4)
    save_program(first, path)
    assert load_program(path, 4) == first
    ring = build("weipipe", Shape(2, 4, 4))
    save_program(ring, path)
    assert load_program(path, 4) == replace(ring, schedule="x.csv")
    validate(load_program(path, 4))
