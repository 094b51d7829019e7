"""Programs in files are taken wherever a schedule's name is, and are the schedules they were written from."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from helixpipe.common.errors import UserError
from helixpipe.lowering.lower import lower
from helixpipe.program.files import load_program, save_program
from helixpipe.program.json_text import json_text
from helixpipe.program.program import Unit
from helixpipe.program.stages import Activations
from helixpipe.program.workload import Slice, Workload
from schedules import CATALOGUE, Shape, build, find
from schedules.command import main
from tests.cli.commands import run, run_json
from tests.cli.test_errors import refused

MORE = [
    "1f1b -p 2 -m 4 -L 4 --recompute-granularity full --recompute-num-layers 2",
    "1f1b -p 2 -m 4 -L 4 --recompute-granularity selective --no-recompute-early",
    "interleaved-1f1b -p 2 -m 4 -v 3 -L 12 --forward-only",
    "seq1f1b-interleaved -p 2 -m 4 -L 4 -k 3 --chunk-lengths 5,4,3",
    "seq1f1b -p 2 -m 2 -L 4 -k 2 --pipe-sp-strategy uniform_comp --recompute-granularity without-attention",
    "helix -p 2 -m 4 -L 4 --helix-ship none --no-helix-spread-head --no-helix-recompute",
    "helix -p 2 -m 4 -L 4 --helix-ship qkv --helix-folds 1",
    "weipipe -p 3 -m 4 -L 5 --no-weipipe-eager --weipipe-slots 2 --weipipe-grad-dtype bf16",
    "wzb1 -p 2 -m 4 -L 4 --recompute-granularity full",
    "zb1p -p 2 -m 4 -L 4 --zb-max-inflight 3",
    "adapipe -p 3 -m 6 -L 7 --memory-limit 6",
]
"""Beside every schedule of the catalogue in its simplest form."""


def sized(name: str) -> str:
    cut = " -k 2" * find(name).chunks
    return f"{name} -p {1 if find(name).one_rank else 2} -m 4 -L 4{cut}"


@pytest.mark.parametrize("command", [*map(sized, CATALOGUE), *MORE])
def test_a_program_in_a_file_is_the_schedule(capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str) -> None:
    path, again = tmp_path / "x.json", tmp_path / "again.json"
    first = run_json(capsys, f"simulate {command} --message-time 0.5 --order --save-program {path}")
    first.pop("makespan_recomputing_late", None)  # takes the schedule without R ops
    assert run_json(capsys, f"simulate {path} --message-time 0.5 --order --save-program {again}") == first
    assert again.read_text() == path.read_text()
    checked = run_json(capsys, f"check {path}")
    assert (checked["ranks"], checked["schedule"]) == (first["ranks"], first["schedule"])
    assert checked["trainable"] is ("--forward-only" not in command)


def test_every_command_takes_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """With the model's costs, too; beside a schedule, which gets the file's size; drawn under its own name."""
    path, picture = tmp_path / "x.json", tmp_path / "both.html"
    model = "--model helix-1.3b --seq-length 16384 --gpus-per-node 2"
    flags = f"seq1f1b -p 2 -m 4 -L 4 --pipe-sp-splits 3 {model}"
    first = run_json(capsys, f"simulate {flags} --order --save-program {path}")
    assert len(set(first["chunk_lengths"])) == 3
    assert run_json(capsys, f"simulate {path} {model} --order") == first
    assert run_json(capsys, f"memory {path} {model}") == run_json(capsys, f"memory {flags}")
    beside = run_json(capsys, f"draw {path} gpipe -o {picture}")["simulations"]
    assert [(each["schedule"], each["ranks"], each["layers"]) for each in beside] == [
        ("seq1f1b", 2, 4),
        ("gpipe", 2, 4),
    ]
    said = refused(capsys, *f"simulate {path} {model.replace('16384', '8192')}".split())
    assert "do not add up to the sequence's 8192 tokens" in said
    assert "is the program that is to be drawn" in refused(capsys, "draw", str(path), "-o", str(path))


def test_flags_that_disagree_with_the_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    flags = "--recompute-granularity full --chunk-lengths 5,3 -L 4"
    run(capsys, f"simulate seq1f1b -p 2 -m 2 {flags} --save-program {path}")
    run(capsys, f"simulate {path} -p 2 -m 2 {flags} -k 2")  # what it says may be said again
    for words, says in (
        ("-p 3", "-p 3 does not fit"),
        ("-L 8", f"-L 8 does not fit {path}, whose layers are 4."),
        ("-k 3", "-k 3 does not fit"),
        ("--chunk-lengths 3,5", "--chunk-lengths 3,5 does not fit"),
        ("-k 2 --pipe-sp-strategy average", "--pipe-sp-strategy average does not fit"),
        ("--recompute-granularity selective", f"{path} says itself what is recomputed"),
        ("--recompute-method block", "--recompute-method block needs --recompute-granularity full"),
        ("--no-recompute-early", f"--no-recompute-early does not fit {path}"),
        ("--helix-folds 2", "--helix-folds is an option of helix, not of a file."),
    ):
        assert says in refused(capsys, "simulate", str(path), *words.split())


def test_bad_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What `validate` refuses as well as what cannot be read: one sentence, exit code 2."""
    path = tmp_path / "x.json"
    program = build("1f1b", Shape(2, 2, 2))
    bad = [
        (replace(program, activations={Unit(0, 5): Activations()}), "for the unit of 0F5"),
        (replace(program, workload=Workload((((Slice(0, 0, 2),),), ((Slice(0, 1, 2),),)))), "overlap"),
        (replace(program, stages=(replace(program.stages[0], placement="moving"), program.stages[1])), "'moving'"),
    ]
    for each, says in bad:
        save_program(each, path)
        for command in ("simulate", "check", "draw"):
            assert says in refused(capsys, command, str(path))
    path.write_text(json.dumps({"title": "a timeline"}))
    assert "x.json is no program" in refused(capsys, "check", str(path))


CELLS = st.sampled_from(["0F0", "1F0", "0B0", "1B1", "0F1.1", "9F9", "0X0", "2F", "0I0", "0R0", "F", "", "-1F0"])
COMMANDS = ["check", "simulate", "memory --model llama2-7b", "improve --evaluations 1"]
JSON_VALUES = st.sampled_from([None, 3, -1, "x", [], {}, ["0F0"], [["0[0:1]"]], 1e99, "layers 9-0", True])


@settings(max_examples=60, phases=(Phase.generate,))
@given(data=st.data())
def test_every_error_about_a_file_names_it(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever is wrong with it, and whoever reads it: the command, the catalogue of training, or a lowering."""
    folder = tmp_path_factory.getbasetemp()
    if data.draw(st.booleans()):
        path = folder / "damaged.csv"
        rows = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
        for _ in range(data.draw(st.integers(1, 3))):
            row = data.draw(st.sampled_from(rows))
            row[data.draw(st.integers(0, 3))] = data.draw(CELLS)
        path.write_text("\n".join(map(",".join, rows)))
    else:
        path = folder / "damaged.json"
        content = json.loads(json_text(build("seq1f1b", Shape(2, 2, 2, 2, chunk_lengths=(5, 3)))))
        entry = data.draw(st.sampled_from([content, content["stages"][1], content["workload"]]))
        entry[data.draw(st.sampled_from([*entry, "odd"]))] = data.draw(JSON_VALUES)
        path.write_text(json.dumps(content))

    name, *flags = data.draw(st.sampled_from(COMMANDS)).split()
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = main([name, str(path), *flags])
    assert code in (0, 2) and (code == 0 or said.getvalue().count(path.name) == 1)
    try:
        lower(build(str(path), Shape(2, 2, 2)))
    except UserError as error:
        assert str(error).count(path.name) == 1


def test_a_table_names_a_file_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "damaged.csv"
    path.write_text("0B0,0F0")
    assert main(["compare", "1f1b", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{path}: rank 0: 0B0 ")


def test_what_a_csv_file_cannot_hold_is_not_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    said = refused(capsys, *f"simulate helix -p 2 -m 4 -L 4 --save-program {path}".split())
    assert "a CSV file cannot hold a program whose stages are not equally many whole layers" in said
    assert "ends in .json" in said and not path.exists()
    assert "ends in .json or .csv" in refused(capsys, "simulate", "1f1b", "--save-program", str(tmp_path / "x.txt"))


def test_the_catalogue_takes_it(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    shape = Shape(2, 2, 4, chunks=2, chunk_lengths=(5, 3))
    save_program(build("seq1f1b", shape), path)
    for same in (shape, Shape(2, 2, 4), Shape(2, 2, 4, chunks=2)):
        assert build(str(path), same) == load_program(path)
    for other, says in (
        (Shape(2, 2, 8), "has 4 layers, but the run has 8"),
        (Shape(2, 4, 4), "2 ranks and 2 microbatches, but the run has 2 and 4"),
        (replace(shape, chunk_lengths=(4, 4)), "it is not 4, 4 tokens as the run has them"),
    ):
        with pytest.raises(ValueError, match=says):
            build(str(path), other)
    save_program(build("seq1f1b", Shape(2, 2, 4, chunks=2)), path)
    assert build(str(path), shape).chunk_lengths == (5, 3)  # a file need not say how long chunks are


SIZES = "--model llama3-8b --seq-length 4096"
WINDOWS = f"{SIZES} --window-size 255,0 --window-attn-skip-freq 2 --no-rope-freq 2"


@pytest.mark.parametrize("name", ["1f1b", "helix"])
def test_a_program_for_windows_is_taken_by_the_model_that_has_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    """And one for plain layers by any; the model's layers say what it costs. Without a model either is drawn."""
    path, plain, shape = tmp_path / "x.json", tmp_path / "plain.json", "-p 2 -m 4 -L 4"
    first = run_json(capsys, f"simulate {name} {shape} {WINDOWS} --save-program {path}")
    slower = run_json(capsys, f"simulate {name} {shape} {SIZES} --save-program {plain}")
    assert first["makespan"] < slower["makespan"]
    for file in (path, plain):
        assert run_json(capsys, f"simulate {file} {WINDOWS}")["makespan"] == pytest.approx(first["makespan"])
        assert run_json(capsys, f"simulate {file}")["ranks"] == 2
    said = refused(capsys, "simulate", str(path), *SIZES.split())
    assert "it has attn.window[0] where this one has attn[0]" in said and str(path) in said


def test_a_file_runs_in_pairs_as_its_schedule_does(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    model = "-p 2 -m 4 --model llama3-8b --num-layers 4 --seq-length 8192 --tensor-parallel 4 --nodes 1"
    off = run_json(capsys, f"simulate 1f1b {model} --save-program {path}")
    pairs = [run_json(capsys, f"simulate {name} {model} --overlap-tp-comm pairs") for name in ("1f1b", str(path))]
    assert pairs[0]["makespan"] == pairs[1]["makespan"] < off["makespan"]
