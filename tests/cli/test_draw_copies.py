"""Copies to the host in drawings and reports: lanes under the ranks that copy."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helixpipe.costs.by_hand import PieceTimes
from helixpipe.draw.formats import chrome_trace, draw
from helixpipe.draw.picture import picture
from helixpipe.draw.style import KIND_STYLES, LANE_STYLES
from helixpipe.draw.text import copies_text, text_timeline
from helixpipe.lowering.lower import lower
from helixpipe.program.program import Op, Program
from helixpipe.program.timeline import OpEvent, Timeline, TransferEvent
from helixpipe.simulate.simulator import Simulation, simulate
from schedules import Shape, build
from tests.cli.commands import run, run_json
from tests.simulate.test_copying import leaving

OPS = [OpEvent(0, Op("F", 0, 5), 0.0, 4.0), OpEvent(0, Op("B", 0, 5), 10.0, 18.0), OpEvent(1, Op("F", 1, 5), 4.0, 8.0)]
COPIES = [
    TransferEvent("offload", (0,), Op("F", 0, 5), None, 4.0, 7.0),
    TransferEvent("fetch", (0,), None, Op("B", 0, 5), 8.0, 10.0),
]
BY_HAND = Timeline("by hand", 2, OPS, COPIES)


def simulated(program: Program, copy: float = 3.0) -> Simulation:
    costs = PieceTimes({"qkv": 1, "attn": 3, "mlp": 2}, copy=copy)
    return simulate(lower(program, costs), costs)


def first_three() -> Program:
    """1f1b on 4 ranks, of which the last does not copy."""
    return leaving(build("1f1b", Shape(4, 8, 8)), ahead=1, ranks=3)


def test_lanes_lie_under_their_rank() -> None:
    timeline = simulated(first_three()).timeline
    figure, plain = picture([timeline]), picture([replace(timeline, transfers=timeline.messages)])
    (axes,), (before,) = figure.axes, plain.axes
    names = [text.get_text() for text in axes.texts]
    assert (names.count("out"), names.count("in")) == (3, 3)
    assert Counter(names)["5"] == 2 * 4 + 2 * 3  # ops, and copies of three ranks
    ranks = [label.get_text() for label in axes.get_yticklabels()]
    assert ranks == [label.get_text() for label in before.get_yticklabels()] == [f"rank {rank}" for rank in range(4)]
    texts: list[Any] = list(axes.texts)
    rows, lanes = list(axes.get_yticks()), [text.xy[1] for text in texts if text.get_text() in LANE_STYLES]
    assert sorted([*rows, *lanes]) == [rows[0], *lanes[:2], rows[1], *lanes[2:4], rows[2], *lanes[4:], rows[3]]
    assert list(before.get_yticks()) == [0, 1, 2, 3]
    assert figure.get_size_inches()[1] > plain.get_size_inches()[1]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["F forward", "B backward", "out copy to the host", "in copy back", "idle"]


def test_copies_are_drawn_where_they_are() -> None:
    axes = picture([BY_HAND]).axes[0]
    collections: list[Any] = list(axes.collections)
    ops, copies = collections
    assert [tuple(path.get_extents().intervalx) for path in copies.get_paths()] == [(4.0, 7.0), (8.0, 10.0)]
    out, back = (path.get_extents().intervaly for path in copies.get_paths())
    assert ops.get_paths()[0].get_extents().y1 < out[0] < out[1] < back[0] < back[1]
    assert back[1] < ops.get_paths()[2].get_extents().y0
    colours = {style.colour for style in (*LANE_STYLES.values(), *KIND_STYLES.values())}
    assert len(colours) == 2 + len(KIND_STYLES)
    assert len({tuple(colour) for colour in copies.get_facecolors()}) == 2


def test_text_has_a_row_for_each_lane() -> None:
    lines = ["rank 0 |F5   B5--|", "   out |  F5     |", "    in |    <    |", "rank 1 |  F5     |"]
    assert text_timeline(BY_HAND, 100) == "\n".join(lines)


def test_the_trace_has_a_thread_for_each_lane() -> None:
    events = chrome_trace([BY_HAND])["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    order = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    assert [names[tid] for tid in sorted(order, key=lambda tid: order[tid])] == [
        "rank 0", "rank 0 out", "rank 0 in", "rank 1",
    ]  # fmt: skip
    out, back = (e for e in events if e.get("cat") == "copy")
    assert (names[out["tid"]], out["name"], out["ts"], out["dur"]) == ("rank 0 out", "out 0F5", 4000.0, 3000.0)
    unit = {"stage": 0, "microbatch": 5, "chunk": 0}
    assert out["args"] == {"direction": "copy to the host", "after": "0F5", **unit}
    assert names[back["tid"]] == "rank 0 in" and back["args"] == {"direction": "copy back", "before": "0B5", **unit}


def test_a_saved_timeline_is_drawn_with_its_copies(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    measured = tmp_path / "run.json"
    BY_HAND.save(measured)
    run(capsys, f"draw 1f1b -p 2 -m 2 --measured {measured} -o {tmp_path / 'both.json'}")
    events = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    assert [(e["pid"], e["name"]) for e in events if e.get("cat") == "copy"] == [(1, "out 0F5"), (1, "in 0B5")]
    draw([Timeline.load(measured)], tmp_path / "x.svg")
    assert ">out<" in (tmp_path / "x.svg").read_text() or "<!-- out -->" in (tmp_path / "x.svg").read_text()


def test_what_simulate_and_memory_print(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    run(capsys, f"simulate 1f1b -p 2 -m 4 -L 4 --save-program {path}")
    program = json.loads(path.read_text())
    cells = " ".join(f"0F{microbatch}" for microbatch in range(4))
    everything = [{"pieces": "layers 0-1", "share": 1.0}]
    path.write_text(json.dumps({**program, "activations": [{"units": cells, "offload": everything, "ahead": 1}]}))

    text = run(capsys, f"simulate {path} --copy-time 3")
    result = run_json(capsys, f"simulate {path} --copy-time 3")
    hidden = f"{100 * result['copy_time_hidden']:.1f} % of it hidden"
    assert f"Copies to the host and back: 48 on all ranks together, {hidden}" in text
    assert "   0           8             4  4 of 4, 100 %" in text.splitlines() and result["offloaded"] == [8, 0]
    assert "Copies to the host and back: no time." in run(capsys, f"simulate {path}")
    assert "Copies" not in run(capsys, "simulate 1f1b -p 2 -m 4 -L 4")

    model = "--model llama2-7b --seq-length 4096 --hardware h20 --nodes 1 --tensor-parallel 4"
    step = run_json(capsys, f"simulate {path} {model}")
    (first, second), gib = step["step"]["memory"], 2**30
    assert first["host_activations"] == round(step["peak_host"][0]) > 0 == second["host_activations"]
    lines = run(capsys, f"memory {path} {model}").splitlines()
    assert lines[1].endswith("total  on host")
    assert lines[2].split()[-2:] == [f"{first['total'] / gib:.2f}", f"{first['host_activations'] / gib:.2f}"]
    assert "on host" not in run(capsys, f"memory 1f1b -m 4 {model}")


def test_many_ranks_on_one_line() -> None:
    text = copies_text(simulated(leaving(build("1f1b", Shape(20, 20, 20)), ahead=1, ranks=19)))
    assert text is not None
    assert text.endswith(
        "each rank copies 0 to 20 microbatch-layers out in a step, and has 0 to 20 at most on its host"
    )
