"""`helixpipe list`, `simulate` and `check`: what they print and their exit codes."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helixpipe.costs.by_hand import unit_costs
from helixpipe.draw.text import shape_line
from helixpipe.lowering.lower import lower
from helixpipe.program.program import Unit
from helixpipe.program.stages import Activations, layer_kinds, layer_pieces
from helixpipe.program.text import from_csv
from helixpipe.simulate import simulator
from schedules import CATALOGUE, Shape, build
from schedules import command as cli

PAPER = ["--piece-times", "pre=1,attn=3,post=2"]


def simulate(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main(["simulate", *arguments, "--json"]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    result: dict[str, Any] = json.loads(output.out)
    return result


@pytest.mark.parametrize(
    ("schedule", "makespan", "bubble", "peak"),
    [
        (["1f1b"], 396, 108, [8, 6, 4, 2]),
        (["gpipe"], 396, 108, [16, 16, 16, 16]),
        (["interleaved-1f1b", "-v", "2"], 342, 54, [11, 9, 7, 5]),
    ],
)
def test_figures(
    capsys: pytest.CaptureFixture[str], schedule: list[str], makespan: int, bubble: int, peak: list[int]
) -> None:
    result = simulate(capsys, *schedule, "-p", "4", "-m", "8", "-L", "8", *PAPER)
    assert result["schedule"] == schedule[0]
    assert (result["ranks"], result["microbatches"], result["layers"]) == (4, 8, 8)
    assert (result["makespan"], result["ideal"], result["bubble_time"]) == (makespan, 288, bubble)
    assert result["bubble_ratio"] == pytest.approx(bubble / makespan)
    assert result["busy"] == [288] * 4
    assert result["peak_activation"] == peak
    assert result["messages"] == 2 * 8 * (
        4 * len(schedule[2:]) + 3
    )  # two cuts' worth a microbatch: activation, gradient
    assert "order" not in result


def test_defaults_are_comparable(capsys: pytest.CaptureFixture[str]) -> None:
    """Without flags every schedule of several ranks gets the same model, the issue's example. helix recomputes."""
    assert simulate(capsys, "helix")["ideal"] == 288 + 8 * 8 * 3 / 4
    flags = {"helix": ["--no-helix-recompute"]}
    results = [simulate(capsys, name, *flags.get(name, ())) for name in CATALOGUE if name != "none"]
    assert {(r["ranks"], r["microbatches"], r["layers"], r["ideal"]) for r in results} == {(4, 8, 8, 288)}
    assert simulate(capsys, "none")["ranks"] == 1


def test_costs(capsys: pytest.CaptureFixture[str]) -> None:
    size = ["-p", "2", "-m", "1", "-L", "2"]
    plain = simulate(capsys, "1f1b", *size, "--piece-times", "post=1,head=10", "--backward-ratio", "3")
    assert plain["makespan"] == (1 + 11) * 4
    slow = simulate(
        capsys, "1f1b", *size, "--piece-times", "post=1,head=10", "--backward-ratio", "3", "--message-time", "5"
    )
    assert slow["makespan"] == plain["makespan"] + 2 * 5


def test_forward_only(capsys: pytest.CaptureFixture[str]) -> None:
    result = simulate(capsys, "1f1b", *PAPER, "--forward-only", "--order")
    assert result["makespan"] == (8 + 3) * 12
    assert result["messages"] == 8 * 3
    assert all(cell[1] == "F" for row in result["order"] for cell in row)


def test_summary_for_people(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert cli.main(["simulate", "1f1b", "-p", "2", "-m", "2", "-L", "2", "--order"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("1f1b: 2 ranks, 2 microbatches, 2 layers, 2 stages\n")
    assert "bubble     18  33.3 % of the makespan" in out
    assert "rank 0 |F0F1    B0--  B1--|\nrank 1 |  F0B0--F1B1--    |\n" in out
    assert out.endswith("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    assert "in the unit of --piece-times" in out and "between ranks, which take no time: give --message-time" in out
    monkeypatch.setenv("COLUMNS", "20")  # too narrow for the timeline: left out
    assert cli.main(["simulate", "1f1b", "--message-time", "1"]) == 0
    out = capsys.readouterr().out
    assert "|" not in out and "--message-time" not in out


@pytest.mark.parametrize("schedule", ["zbv", "zb1p", "v-min", "hanayo"])
def test_ops_too_short_for_their_names_are_drawn(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    """A rank's line shows each op by its kind, in order."""
    monkeypatch.setenv("COLUMNS", "100")
    assert cli.main(["simulate", schedule, "-p", "4", "-m", "4", "--order"]) == 0
    text = capsys.readouterr().out
    lines = re.findall(r"^rank \d \|(.*)\|$", text, re.M)
    orders = text.strip().splitlines()[-4:]
    assert len(lines) == 4 and len({len(line) for line in lines}) == 1 and len(lines[0]) <= 100
    for line, order in zip(lines, orders, strict=True):
        assert re.findall("[A-Z]", line) == re.findall("[A-Z]", order)


def test_csv_round_trip(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What `simulate --save-program` writes is checked, and simulates the same; size comes from the file."""
    path = tmp_path / "mine.csv"
    words = ["interleaved-1f1b", "-p", "2", "-m", "4", "-L", "8", "--order"]
    original = simulate(capsys, *words, "--save-program", str(path))
    assert os.listdir(tmp_path) == ["mine.csv"]
    again = simulate(capsys, str(path), "-L", "8", "--order")
    assert {**again, "schedule": original["schedule"]} == original
    assert simulate(capsys, str(path))["layers"] == 4  # one a stage
    assert cli.main(["check", str(path), "-p", "2", "-m", "4", "-v", "2"]) == 0
    assert (
        capsys.readouterr().out == f"{path} can run: 2 ranks, 4 microbatches, 4 stages, 1 chunk, 32 ops, 24 messages.\n"
    )
    assert cli.main(["check", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ops"] == 32


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list"]) == 0
    out = capsys.readouterr().out
    for schedule in CATALOGUE.values():
        (line,) = [line for line in out.splitlines() if line.split()[:1] == [schedule.name]]
        assert schedule.paper in line and schedule.bubble in line and schedule.memory in line
    assert cli.main(["list", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == list(CATALOGUE)


@pytest.mark.parametrize("columns", [60, 240])
def test_list_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert cli.main(["list"]) == 0
    out = capsys.readouterr().out
    table = re.sub(r"\x1b\[\d*m", "", out.split("\n\n")[0])
    assert all(name in table for name in CATALOGUE)
    assert max(map(len, table.splitlines())) <= columns
    assert ("┃" in table) == (columns == 240)


def test_a_process_of_its_own(tmp_path: Path) -> None:
    """Neither torch nor anything slow is imported; a reader that leaves early is no error."""
    slow = "{'torch', 'numpy', 'matplotlib', 'rich', 'megatron'} & set(sys.modules)"
    code = (
        "import sys; from schedules.command import main; code = main(['simulate', '1f1b'])\n"
        f"print({slow} or 'nothing slow', file=sys.stderr); sys.exit(code)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, cwd=tmp_path, env=environment, text=True)
    os.close(writer)
    assert (result.stderr, result.returncode) == ("nothing slow\n", cli.PIPE_CLOSED)


def test_written_program_is_the_schedule(tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    assert cli.main(["simulate", "gpipe", "-p", "2", "-m", "1", "--save-program", str(path)]) == 0
    assert [[str(op) for op in ops] for ops in from_csv(path).ranks] == [["0F0", "0B0"], ["1F0", "1B0"]]


def test_the_default_schedule_is_1f1b(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schedule"] == "1f1b"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("1f1b -p 4 -L 8", None),
        ("1f1b -p 2 -L 4 --recompute-granularity full", "layers recomputed: 2 whole, 2 whole"),
        (
            "gpipe -p 2 -L 2 --recompute-granularity without-attention",
            "layers recomputed: 1 all but attention, 1 all but attention",
        ),
        ("1f1b -p 2 -L 4 --recompute-granularity selective", "layers recomputed: 2 core attention, 2 core attention"),
        (
            "1f1b -p 2 -L 6 --recompute-granularity full --recompute-method block --recompute-num-layers 1",
            "layers recomputed: 1 whole, 1 whole",
        ),
        (
            "1f1b -p 2 -L 2 --recompute-granularity selective --recompute-modules core_attn mlp",
            "layers recomputed: 1 attn+mlp, 1 attn+mlp",
        ),
        ("1f1b -p 12 -L 24 --recompute-granularity full", "layers recomputed: 2 whole (x12)"),
        ("1f1b -p 5 -L 5 --recompute-granularity full", "layers recomputed: 1 whole (x5)"),
        ("1f1b -p 4 -L 4 --recompute-granularity full", "layers recomputed: 1 whole, 1 whole, 1 whole, 1 whole"),
        ("adapipe -p 2 -L 5 --piece-times mlp=1,head=1", "stages: 3 2 layers"),
        ("adapipe -p 2 -L 4 -m 2 --memory-limit 3", "layers recomputed: 1 mlp, none"),
    ],
)
def test_stages_are_shown_where_they_differ_or_recompute(
    capsys: pytest.CaptureFixture[str], arguments: str, line: str | None
) -> None:
    assert cli.main(["simulate", *arguments.split()]) == 0
    second = capsys.readouterr().out.splitlines()[1]
    assert second == ("" if line is None else line)


def test_how_much_single_chunks_recompute_is_said() -> None:
    """Two of eight chunks recompute, as infinipipe's do; one of them recomputes one of the two layers of a stage."""
    program, costs = build("1f1b", Shape(2, 4, 4, chunks=2)), unit_costs()
    layers = [layer_pieces(layer_kinds(2), 2 * stage) for stage in range(2)]
    found = {
        Unit(0, 1, 0): Activations((layers[0],)),
        Unit(1, 1, 0): Activations((layers[1],)),
        Unit(1, 2, 1): Activations((layers[1][:5],)),
    }
    simulation = simulator.simulate(lower(dataclasses.replace(program, activations=found), costs), costs)
    assert shape_line(simulation).splitlines()[1:] == [
        "layers recomputed: 15.6 % over all chunks, some in 2 of 8 chunks"
    ]


def test_one_hardware_queue(capsys: pytest.CaptureFixture[str]) -> None:
    """Rings over slow links wait for it; what is recomputed early is compared on the same device."""
    step = ["weipipe", "-p", "8", "-m", "16", "-L", "8", "--piece-times", "mlp=1", "--message-time", "0.2"]
    many, one = simulate(capsys, *step), simulate(capsys, *step, "--device-queues", "one")
    assert one["makespan"] > one["makespan_many_queues"] == pytest.approx(many["makespan"])
    assert "makespan_many_queues" not in many and one["ideal"] == many["ideal"]
    assert cli.main(["simulate", *step, "--device-queues", "one"]) == 0
    longer = 100 * (one["makespan"] / many["makespan"] - 1)
    line = f"One hardware queue: {longer:.1f} % longer than with one for each stream ({many['makespan']:.6g})."
    assert line in capsys.readouterr().out.splitlines()
    times = ["--piece-times", "qkv=1,attn=3,mlp=2,head=1", "--message-time", "0.5", "--device-queues", "one"]
    recomputed = ["helix", "-p", "4", "-m", "8", "-L", "8", "--recompute-granularity", "full", *times]
    late = simulate(capsys, *recomputed, "--no-recompute-early")
    assert simulate(capsys, *recomputed)["makespan_recomputing_late"] == late["makespan"] > late["makespan_many_queues"]
