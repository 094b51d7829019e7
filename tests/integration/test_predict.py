"""benchmarks/predict.py: its arguments, what it keeps of earlier runs, which steps count, the table in the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import predict, run
from benchmarks.predict_cases import CASES, WAYS
from benchmarks.predict_ranks import compared, delays, program_of
from helixpipe.costs.profile_costs import ProfileCosts
from helixpipe.lowering.lower import lower
from helixpipe.simulate.simulator import simulate
from schedules import CATALOGUE
from tests.profile.test_profile import make_profile

ROOT = Path(__file__).parents[2]

START, END = "<!-- bench: predict -->", "<!-- end -->"


def row(predicted: float, seconds: list[float], **more: Any) -> dict[str, Any]:
    count = len(seconds)
    times = {"busy": [[1.0, 1.0]] * count, "processor": [[1.0, 1.0]] * count, "predicted_busy": [1.0, 1.0]}
    sizes = {"bytes": [1000.0, 2000.0], "predicted_bytes": [1000.0, 1000.0]}
    made = {"predicted": predicted, "seconds": seconds, "others": [0.0] * count, "pace": [1.0] * count}
    return {**made, **times, **sizes, "ops": {}, **more}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--steps 4", "--steps must be at least 5, or 0 to read the file of --json, not 4"),
        ("--steps 0", "--steps must be at least 5, or 0 to read the file of --json, not 0"),
        ("--cases 128 --schedules sppo", "--schedules: sppo is in none of the cases 128"),
        ("--cases 100", "invalid choice: '100'"),
    ],
)
def test_arguments_that_cannot_be(words: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["predict", *words.split()]) == 2
    assert reason in capsys.readouterr().err


def test_rows_measured_before_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One schedule is measured anew, another stays; --steps 0 measures nothing and prints and writes what there is."""
    figures, page = tmp_path / "out.json", tmp_path / "page.md"
    old = {"512": {"zb1p": row(1.0, [1.1] * 5)}, "128": {"1f1b": row(1.0, [3.0] * 5), "zbv": row(1.0, [1.5] * 5)}}
    figures.write_text(json.dumps(old), encoding="utf-8")
    page.write_text(f"above\n{START}\nold\n{END}\nbelow\n", encoding="utf-8")
    asked = []

    def run_case(name: str, ways: list[str], arguments: Any) -> predict.Rows:
        asked.append((name, ways))
        return {way: row(2.0, [2.5, 2.5, 2.0, 2.0, 2.0]) for way in ways}

    monkeypatch.setattr(predict, "run_case", run_case)
    assert run.main(f"predict --cases 128 512 --schedules 1f1b --json {figures}".split()) == 0
    assert asked == [("128", ["1f1b"]), ("512", ["1f1b"])]
    found = json.loads(figures.read_text(encoding="utf-8"))
    assert list(found["128"]) == ["1f1b", "zbv"] and list(found["512"]) == ["1f1b", "zb1p"]
    assert found["128"]["1f1b"]["seconds"][0] == 2.5 and found["128"]["zbv"] == old["128"]["zbv"]
    assert run.main(f"predict --steps 0 --json {figures} --output {page}".split()) == 0
    assert len(asked) == 2
    printed = capsys.readouterr().out
    assert "zbv" in printed and "1.000 2.000" in printed
    lines = page.read_text(encoding="utf-8").splitlines()
    assert lines[:2] == ["above", START] and lines[-2:] == [END, "below"]
    assert (
        "| `1f1b` | 1.000 (1.000) | 1.000 (1.000) |" in lines
        and "| `zbv` | 1.500 (1.500) | – |" in lines
        and "old" not in lines
    )


def test_steps_in_which_others_computed_do_not_count() -> None:
    """Unless hardly any is left."""
    seconds, pace = [2.0, 2.2, 9.0, 2.4, 9.0], [1.0, 1.1, 1.0, 1.2, 1.2]
    some = row(2.0, seconds, pace=pace, others=[0.0, 0.01, 0.5, 0.05, 0.3])
    assert predict.ratio(some) == pytest.approx(1.1) and predict.paced(some) == pytest.approx(1.0)
    most = row(2.0, seconds, pace=pace, others=[0.0, 0.3, 0.5, 0.3, 0.3])
    assert predict.ratio(most) == pytest.approx(1.2)


def test_every_way_is_a_program_of_its_case() -> None:
    """With as many chunks and as much offloaded as it says, at little cost here."""
    costs = ProfileCosts(make_profile())
    assert {way for case in CASES.values() for way in case.ways} == set(WAYS)
    assert {way.schedule for way in WAYS.values()} <= set(CATALOGUE)
    for name, case in CASES.items():
        assert not {"--num-layers", "--seq-length"} - set(case.flags()), name
        for way in case.ways:
            program = program_of(way, case, costs)
            assert (program.num_chunks, program.num_microbatches) == (WAYS[way].chunks, case.microbatches)
            away = any(each.offload for each in program.activations.values())
            assert away == (WAYS[way].offload != "off")


def test_ops_and_delays_of_two_timelines() -> None:
    costs = ProfileCosts(make_profile())
    simulated = simulate(lower(program_of("1f1b", CASES["128"], costs), costs), costs).timeline
    ops = compared(simulated, [simulated, simulated])
    assert list(ops) == ["0: 0B c0", "0: 0F c0", "1: 1B c0", "1: 1F c0"]
    assert all(each["measured"] == each["predicted"] > 0 and each["count"] == 8 for each in ops.values())
    (activation, gradient) = delays([simulated]).values()
    assert activation["count"] >= 1 and gradient["count"] == 8, "rank 0 waits for each gradient"
    assert gradient["seconds"] == pytest.approx(0.5 + 4.096), "of a message"


def test_the_page_has_a_place_for_the_table() -> None:
    page = (ROOT / "docs/costs.md").read_text(encoding="utf-8")
    assert START in page and END in page.partition(START)[2]
