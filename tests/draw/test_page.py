"""The page of timelines as a file: whole, small, safe; what its data say."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from helixpipe.costs.by_hand import PieceTimes
from helixpipe.draw.page import LARGE, SCRIPTS, html_page
from helixpipe.draw.style import KIND_STYLES
from helixpipe.program.program import Op
from helixpipe.program.timeline import OpEvent, Timeline, TransferEvent
from schedules import command as cli
from tests.draw.pages import Page, simulation

ROOT = Path(__file__).resolve().parents[2]
RUN = Timeline(
    "1f1b, measured", 2,
    [
        OpEvent(1, Op("F", 1, 0), 0.003, 0.005),
        OpEvent(0, Op("B", 0, 0), 0.008, 0.012),
        OpEvent(0, Op("F", 0, 0), 0.0, 0.002),
    ],
    [
        TransferEvent("activation", (0, 1), Op("F", 0, 0), Op("F", 1, 0), 0.002, 0.003),
        TransferEvent("gradient", (1, 0), Op("B", 1, 0), Op("B", 0, 0), 0.007, 0.008),
        TransferEvent("offload", (0,), Op("F", 0, 0), None, 0.002, 0.004),
    ],
    "s",
)  # fmt: skip


def test_it_is_whole_and_loads_nothing() -> None:
    page = html_page([simulation(), RUN])
    assert not re.search(r"https?://|//cdn|@import|url\(", page)
    assert "@@" not in page
    parsed = Page(page)
    assert parsed.fetched == [] and parsed.encoding == "none"
    assert "default-src 'none'" in page
    assert [panel["title"] for panel in parsed.data["panels"]] == ["1f1b", "1f1b, measured"]
    assert parsed.data["scale"] == "each on its own time scale: lengths do not compare"
    assert {kind: own["colour"] for kind, own in parsed.data["kinds"].items()} == {
        kind: style.colour for kind, style in KIND_STYLES.items()
    }


def test_titles_are_no_markup() -> None:
    evil = "</script><script>alert(1)</script><!-- & @@DATA@@"
    made = simulation()
    parsed = Page(html_page([replace(made, title=evil)]))
    assert parsed.tags.count("script") == 2
    assert parsed.data["panels"][0]["title"] == evil


def test_large_ones_are_packed() -> None:
    page = html_page([simulation(ranks=64, microbatches=64)])
    assert len(page) < 400_000
    parsed = Page(page)
    assert parsed.encoding == "deflate"
    (panel,) = parsed.data["panels"]
    assert len(panel["order"]) == 64 * 64 * 2 + 63 * 64 * 2 > LARGE / 100
    assert re.fullmatch(r"[A-Za-z0-9+/=]+", parsed.text) and base64.b64decode(parsed.text)


def test_what_a_simulation_is_dumped_as() -> None:
    made = simulation(ranks=2, microbatches=1)
    (panel,) = Page(html_page([made])).data["panels"]
    assert panel["ops"] == {
        "kind": "FBFB", "rank": [0, 0, 1, 1], "stage": [0, 0, 1, 1], "microbatch": [0, 0, 0, 0], "chunk": []
    }  # fmt: skip
    assert panel["messages"] == [[1, 1, 0, 3, 1], [0, 0, 1, 0, 2]]
    before = [[task - back for back in own] for task, own in enumerate(panel["before"])]
    assert [sorted(own) for own in before] == [[], [0, 4], [5], [2], [3], [0]]
    classes = [panel["classes"][own] for own in panel["classOf"]]
    assert [each["time"] for each in classes] == [12, 24, 12, 24, 0.5, 0.5]
    layers = {"B norm": 2, "B qkv": 2, "B attn": 2, "B proj": 2, "B mlp": 2}
    assert classes[1]["amounts"] == {"B embed": 1, **layers, "overhead": 1}
    assert [each["amounts"] for each in classes[3:5]] == [{**layers, "B head": 1, "overhead": 1}, {"message": 1}]
    assert panel["memory"]["unit"] == "microbatch-layers"
    assert panel["makespan"] == made.makespan == 73


def test_what_a_recording_is_dumped_as() -> None:
    """Ops by rank and time; what belongs to ops that were not recorded is left out."""
    (panel,) = Page(html_page([RUN])).data["panels"]
    assert (panel["ops"]["kind"], panel["ops"]["rank"]) == ("FBF", [0, 0, 1])
    assert panel["messages"] == [[0, 0, 1, 0, 2]] and panel["copies"] == [[0, 0, 0]]
    assert panel["start"] == [0.0, 0.008, 0.003, 0.002, 0.002] and panel["end"][-1] == 0.004
    assert panel["measured"] and "order" not in panel


def test_knobs() -> None:
    """Times by hand are given anew; costs that differ cannot be changed together."""
    made = simulation()
    knobs = {knob["name"]: knob for knob in Page(html_page([made])).data["knobs"]}
    assert (knobs["attn"]["value"], knobs["ratio"]["value"], knobs["message"]["value"]) == (3, 2.0, 0.5)
    assert [name for name, knob in knobs.items() if knob.get("splits")] == ["qkv", "proj", "mlp", "head"]
    assert "copy" not in knobs
    other = simulation(costs=PieceTimes({"mlp": 1}))
    assert Page(html_page([made, other])).data["knobs"] == [] == Page(html_page([RUN])).data["knobs"]


def test_the_circle(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    broken, output = tmp_path / "broken.csv", tmp_path / "x.html"
    broken.write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    assert cli.main(["draw", str(broken), "-o", str(output)]) == 2
    error = capsys.readouterr().err
    assert "wait for each other in a circle: 0B0 (rank 0) waits for 1B0 (rank 1), " in error
    assert error.endswith(f"{output} shows it.\n")
    (panel,) = Page(output.read_text()).data["panels"]
    cells = [
        f"{panel['ops']['stage'][op]}{panel['ops']['kind'][op]}{panel['ops']['microbatch'][op]}" for op in range(8)
    ]
    assert [(cells[op], cells[target], direct) for op, target, direct in panel["circle"]] == [
        ("0B0", "1B0", 1), ("1B0", "1F0", 1), ("1F0", "1B1", 0), ("1B1", "1F1", 1), ("1F1", "0F1", 1),
        ("0F1", "0B0", 0),
    ]  # fmt: skip
    assert [cells[op] for op in range(8) if panel["ended"][op]] == ["0F0"]
    assert cli.main(["draw", str(broken), "-o", str(tmp_path / "x.png")]) == 2
    assert not (tmp_path / "x.png").exists() and "shows it" not in capsys.readouterr().err


def test_a_fault_of_one_rank_is_a_circle_of_two(tmp_path: Path) -> None:
    wrong, output = tmp_path / "wrong.csv", tmp_path / "x.html"
    wrong.write_text("0F0,0F1,0B0,0B1\n1F0,1B1,1F1,1B0\n")
    assert cli.main(["draw", str(wrong), "-o", str(output)]) == 2
    (panel,) = Page(output.read_text()).data["panels"]
    assert panel["circle"] == [[5, 6, 1], [6, 5, 0]] and panel["ended"] == [1, 1, 0, 0, 1, 0, 0, 0]


def test_an_installed_package_has_all_parts(tmp_path: Path) -> None:
    """As setuptools builds it from the project's own files."""
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "helixpipe").mkdir()
    shutil.copy(ROOT / "helixpipe/__init__.py", tmp_path / "helixpipe")
    shutil.copytree(ROOT / "helixpipe/draw", tmp_path / "helixpipe/draw")
    built = tmp_path / "built"
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(built)]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    there = {path.name for path in (built / "helixpipe/draw/web").iterdir()}
    assert (
        there == {*SCRIPTS, "page.html", "page.css"} == {path.name for path in (ROOT / "helixpipe/draw/web").iterdir()}
    )
