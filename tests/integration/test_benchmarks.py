"""The benchmarks run and their engines agree; their figures are not looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench, families, host_time, run, steps
from benchmarks.ranks import result_in, write_call
from netlab import network
from netlab.network_costs import Case, Link, sent_bytes
from schedules import CATALOGUE
from tests.integration.forked import run_forked
from tests.integration.launching import Launch
from tests.selection import graded

ROOT = Path(__file__).parents[2]
TINY = (4, 32, 4, 2, 48, 64, 1, 2)  # layers, hidden, heads, groups, ffn, tokens, micro batch, microbatches
TINY_FLAGS = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --seq-length 32"


def on_two_ranks(folder: Path, function: str, *arguments: Any) -> Any:
    """Return what the benchmark's function returned on rank 0, on ranks that are forked."""
    script, *words = write_call(folder, function, *arguments)
    run_forked(Launch(function.partition(":")[0], " ".join(words), script=script)).done()
    return result_in(folder)


@pytest.mark.parametrize(
    "rows",
    graded(
        [("empty", "memory", "weights"), ("1f1b", "seq1f1b", "helix"), ("stages", "zero-bubble", "chunks")],
        [("empty", "memory", "weights")],
    ),
)
def test_every_row_on_a_tiny_model(tmp_path: Path, rows: tuple[str, ...]) -> None:
    result = on_two_ranks(tmp_path, "benchmarks.measure:measure", TINY, 2, rows)
    assert list(result) == list(rows)
    for row in set(rows) - {"memory"}:
        engines = result[row]["engines"]
        assert max(each["gradient_difference"] for each in engines.values()) < 1e-5
        ours = {name: each["ours"] for name, each in engines.items() if each["ours"]}
        summed = {name for name, each in ours.items() if each["sum_seconds"] > 0}
        copying = ("chimera", "helix", "weipipe", "wzb")
        assert summed == {name for name in ours if any(each in name for each in copying)}
        for each in ours.values():
            assert each["predicted_seconds"] == each["simulated_seconds"] + each["sum_seconds"]


@pytest.mark.thorough
def test_host_time_of_each_kind_of_op() -> None:
    for case, kinds in (
        ("llama layer", {"F", "B"}),
        ("gpt layer, 4 chunks", {"F", "B"}),
        ("gpt layer, split", {"F", "I", "W"}),
    ):
        (steps,), floor = host_time.run_case(case, [ROOT], 1)
        assert set(steps[0]) == kinds and min(steps[0].values()) > 0
        assert set(floor) == (kinds if case == "llama layer" else set())


def test_a_row_has_every_schedule_of_several_ranks() -> None:
    assert {*bench.ROWS} - {"memory"} == {*families.FAMILIES}
    rows = Path(str(families.__file__)).read_text(encoding="utf-8")
    assert [name for name, each in CATALOGUE.items() if not each.one_rank and f'"{name}"' not in rows] == []


def test_the_page_has_a_line_for_each_schedule_and_engine() -> None:
    def row(*pairs: tuple[str, str]) -> dict[str, Any]:
        ratios = enumerate(pairs, 1)
        return {
            "ratios": [
                {"ours": a, "over": b, "ratio": n, "quartiles": (n, n), "predicted": 2 * n} for n, (a, b) in ratios
            ]
        }

    chunks = row(
        ("ours, sppo k = 4", bench.FIRST), ("ours, sppo k = 4", bench.CORE), ("ours, sppo k = 4", "ours, seq1f1b")
    )
    zero_bubble = row(
        ("ours, zbv", "torch ScheduleZBVZeroBubble"), ("ours, torch's ZBV order", "torch ScheduleZBVZeroBubble")
    )
    known = {
        "2k": {"chunks": chunks},
        "long": {"zero-bubble": zero_bubble},
        "wide": {"zero-bubble": row((bench.FIRST, bench.CORE))},
    }
    assert bench.measured_table(known)[2:] == ["| `sppo` k=4 | 2048 | 1.00 | 2.00 | 2.00 |"]
    assert bench.engines_table(known)[2:] == ["| ZBV, torch's order | torch | 2.000 | 2.000–2.000 |"]


@pytest.mark.thorough
def test_steps_with_and_without_a_flush(tmp_path: Path) -> None:
    rows = on_two_ranks(tmp_path, "benchmarks.steps:measure", 2, ["wzb2"], TINY_FLAGS)
    assert [row["name"] for row in rows] == ["wzb2", "wzb2, every step clipped"]
    table = steps.report(rows)
    assert all(len(row["ratios"]) == 2 and f"| {row['name']} |" in table for row in rows)


def test_engines_over_a_link_and_their_report(tmp_path: Path) -> None:
    """Here over loopback; tests of the lab itself are in test_netlab.py."""
    engines = ["1f1b", "gpipe", "weipipe", "fsdp2", "fsdp2-once"]
    cases = [Case(sequence=16, micro=1), Case(sequence=64, micro=2)]
    results = on_two_ranks(tmp_path, "netlab.network_ranks:measure", [case.size for case in cases], engines, 2)
    link = Link(1e6, 1e-3)
    rows = [network.Row(case, "8mbit", link, result) for case, result in zip(cases, results, strict=True)]
    for row in rows:
        assert list(row.engines) == engines
        for name, measured in row.engines.items():
            assert measured["gradient_difference"] < 1e-5
            assert row.predicted(name) > sent_bytes(row.case, name) / link.bytes_per_second
    report = "\n".join(network.report(rows[:1], rows, engines))
    assert "| gpipe over fsdp2" in report and "fsdp2 is as fast as 1f1b at G·S/12H = " in report
    network.draw(rows, rows, engines, str(tmp_path / "network.png"))
    assert (tmp_path / "network.png").read_bytes().startswith(b"\x89PNG")


def test_bytes_over_a_link_are_those_of_the_formulas() -> None:
    case = Case(sequence=288, micro=2, microbatches=8)
    hidden_states = 2 * 288 * 48 * 4
    assert sent_bytes(case, "1f1b") == 8 * hidden_states, "one way activations, the other their gradients"
    layers, ends = (2 * 12 * 48**2 + 4 * 48) * 4, (2 * 128 * 48 + 48) * 4
    assert sent_bytes(case, "weipipe") == layers + ends, "weights and gradients of its layer, gradients of ends"
    weights = layers + ends
    assert sent_bytes(case, "fsdp2") == 3 * 4 * weights / 2
    assert sent_bytes(case, "fsdp2-once") == 2 * weights / 2
    assert case.weight == 1.0
    assert network.crossing([0.5, 1, 2], [0.25, 0.5, 2]) == "1.41" and network.crossing([1, 2], [2, 3]) == "-"


@pytest.mark.thorough
def test_choosing_prints_what_stands_on_its_page(capsys: pytest.CaptureFixture[str]) -> None:
    """One row, the fastest to make; `make bench-choosing` writes all of them."""
    assert run.main(["choosing", "--rows", "3", "--jobs", "1", "--overlap-tp-comm", "auto"]) == 0
    head, _, row = capsys.readouterr().out.splitlines()
    page = (ROOT / "docs/choosing.md").read_text(encoding="utf-8").splitlines()
    assert row.startswith("| 3 |") and {head, row} <= set(page)
