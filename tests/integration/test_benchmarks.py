"""The benchmarks run and their engines agree; their figures are not looked at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import infinipipe, network, saves, sppo_setups, steps
from benchmarks.network_costs import Case, Link
from benchmarks.pages import written_into
from tests.integration.forked import run_forked
from tests.integration.launching import Launch

ROOT = Path(__file__).parents[2]
TINY = "4 32 4 2 48 64 1 2"  # layers, hidden, heads, groups, ffn, tokens, micro batch, microbatches


def test_every_row_on_a_tiny_model(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    rows = "empty,1f1b,zero-bubble,memory,seq1f1b,helix"
    run_forked(Launch("benchmark", f"{output} 2 {rows} {TINY}", script="benchmarks/measure.py")).done()
    result = json.loads(output.read_text(encoding="utf-8"))
    assert list(result) == ["empty", "1f1b", "zero-bubble", "memory", "seq1f1b", "helix"]
    for rows in ("empty", "1f1b", "zero-bubble", "seq1f1b", "helix"):
        assert max(row["gradient_difference"] for row in result[rows]["engines"].values()) < 1e-5


def test_steps_with_and_without_a_flush(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "steps.json"
    tiny = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --seq-length 32"
    run_forked(Launch("steps", f"ranks {output} 2 wzb2 {tiny}", script="benchmarks/steps.py")).done()
    rows = json.loads(output.read_text(encoding="utf-8"))
    assert [row["name"] for row in rows] == ["wzb2", "wzb2, every step clipped"]
    steps.report(rows)
    printed = capsys.readouterr().out
    assert all(len(row["ratios"]) == 2 and f"| {row['name']} |" in printed for row in rows)


def test_saves_at_once_and_beside_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "saves.json"
    tiny = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --seq-length 32"
    run_forked(Launch("saves", f"ranks {output} 3 {tiny}", script="benchmarks/saves.py")).done()
    found = json.loads(output.read_text(encoding="utf-8"))
    assert [set(each) for each in found["rounds"]] == [set(saves.KINDS)] * 3
    saves.report(found)
    printed = capsys.readouterr().out
    assert "| at once | " in printed and "| beside | " in printed and "medians of 3" in printed
    assert list(tmp_path.iterdir()) == [output]


def test_published_setups(tmp_path: Path) -> None:
    output = tmp_path / "table.md"
    command = [sys.executable, str(ROOT / "benchmarks/setups.py"), "--output", str(output), "--jobs", "1"]
    command += ["--hardware", "h20", "--models", "1.3b", "--tokens", "4", "--nodes", "2"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    written = output.read_text(encoding="utf-8")
    assert written == done.stdout and "\nSimulated, not measured." in written
    (row,) = [line for line in written.splitlines() if line.startswith("| h20 | 1.3b | 4k | 2 |")]
    assert row.count("|") == 12 and row.count("**") == 6
    assert "- h20: 80% of 148 TFLOP/s in matrix products" in written


def test_tables_of_infinipipe_have_their_places_in_the_page() -> None:
    page = infinipipe.PAGE.read_text(encoding="utf-8")
    tables = {name: [f"| {name} |", "|---|"] for name in ("balance", "planning", "steps")}
    written = written_into(page, tables)
    assert all(f"<!-- bench: {name} -->\n| {name} |\n|---|\n<!-- end -->" in written for name in tables)
    assert written_into(written, tables) == written
    lines = [line for line in page.splitlines() if line not in written.splitlines()]
    assert lines and all(line.startswith("|") for line in lines)
    with pytest.raises(ValueError, match="no place for the table other"):
        written_into(page, {"other": []})


def test_published_setups_of_sppo() -> None:
    """A small one in place of those on the page, which take minutes."""
    small = sppo_setups.Setup("7b", 32, 8, 4, {32: 4})
    row = sppo_setups.row(small, 32, 4)
    lines = sppo_setups.text([row]).splitlines()
    (first, second) = [line for line in lines if line.startswith("| 7b, 32 | 32k | 4 |")]
    assert first.count("**") == 6 and second.count("**") == 8
    assert any("of the network's 100 GB/s a node" in line for line in lines)
    alone = row.schedules["sppo"].step
    assert row.alone.makespan == pytest.approx(alone, rel=0.02)  # the same order but for the head; and the optimizer
    assert row.helped[True, True].makespan < row.helped[True, False].makespan


def test_engines_over_a_link_and_their_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Here over loopback; tests of the lab itself are in test_netlab.py."""
    output, engines = tmp_path / "result.json", ["1f1b", "gpipe", "weipipe", "fsdp2", "fsdp2-once"]
    cases = [Case(sequence=16, micro=1), Case(sequence=64, micro=2)]
    flags = " ".join([str(output), "2", ",".join(engines), *(case.argument for case in cases)])
    run_forked(Launch("network", flags, script="benchmarks/network_ranks.py")).done()
    results = json.loads(output.read_text(encoding="utf-8"))
    link = Link(1e6, 1e-3)
    rows = [network.Row(case, "8mbit", link, result) for case, result in zip(cases, results, strict=True)]
    for row in rows:
        assert list(row.engines) == engines
        for name, measured in row.engines.items():
            assert measured["gradient_difference"] < 1e-5
            assert row.predicted(name) > network.sent_bytes(row.case, name) / link.bytes_per_second
    network.report(rows[:1], rows, engines)
    printed = capsys.readouterr().out
    assert "| gpipe over fsdp2" in printed and "fsdp2 is as fast as 1f1b at G·S/12H = " in printed
    network.draw(rows, rows, engines, str(tmp_path / "network.png"))
    assert (tmp_path / "network.png").read_bytes().startswith(b"\x89PNG")


def test_bytes_over_a_link_are_those_of_the_formulas() -> None:
    case = Case(sequence=288, micro=2, microbatches=8)
    hidden_states = 2 * 288 * 48 * 4
    assert network.sent_bytes(case, "1f1b") == 8 * hidden_states, "one way activations, the other their gradients"
    layers, ends = (2 * 12 * 48**2 + 4 * 48) * 4, (2 * 128 * 48 + 48) * 4
    assert network.sent_bytes(case, "weipipe") == layers + ends, "weights and gradients of its layer, gradients of ends"
    weights = layers + ends
    assert network.sent_bytes(case, "fsdp2") == 3 * 4 * weights / 2
    assert network.sent_bytes(case, "fsdp2-once") == 2 * weights / 2
    assert case.weight == 1.0
    assert network.crossing([0.5, 1, 2], [0.25, 0.5, 2]) == "1.41" and network.crossing([1, 2], [2, 3]) == "-"


def test_choosing_prints_what_stands_on_its_page() -> None:
    """One row, the fastest to make; `make bench-choosing` writes all of them."""
    command = [sys.executable, str(ROOT / "benchmarks/choosing.py"), "--rows", "3", "--jobs", "1"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    head, _, row = done.stdout.splitlines()
    page = (ROOT / "docs/choosing.md").read_text(encoding="utf-8").splitlines()
    assert row.startswith("| 3 |") and {head, row} <= set(page)
