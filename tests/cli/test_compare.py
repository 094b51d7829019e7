"""`helixpipe compare`: schedules side by side."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helixpipe.cli.parser import parsers
from helixpipe.cli.programs import make_simulations, plan_of
from helixpipe.planning.order.chunk_options import MOST_BALANCED
from helixpipe.program.timeline import BUBBLE, Timeline
from schedules import CATALOGUE, command


def compared(capsys: pytest.CaptureFixture[str], words: str) -> list[dict[str, Any]]:
    assert command.main(["compare", *words.split(), "--json"]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)  # NaN is no JSON
    return rows


def simulated(capsys: pytest.CaptureFixture[str], words: str) -> dict[str, Any]:
    assert command.main(["simulate", *words.split(), "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_all_schedules_are_compared_at_one_size(capsys: pytest.CaptureFixture[str]) -> None:
    rows = compared(capsys, "-p 2 -m 4 -k 1,2 --helix-folds 2")
    assert {row["schedule"] for row in rows} == {name for name, each in CATALOGUE.items() if not each.one_rank}
    assert {row["chunks"] for row in rows if row["schedule"] == "seq1f1b"} == {1, 2}
    assert {row["chunks"] for row in rows if row["schedule"] == "1f1b"} == {1, 2}
    times = [row["time"] for row in rows if row["time"] is not None]
    assert times == sorted(times)
    by_name = {row["schedule"]: row for row in rows if row["chunks"] == 1}
    for name in ("1f1b", "zbv"):
        alone = simulated(capsys, f"{name} -p 2 -m 4 -L 4")
        assert by_name[name]["time"] == alone["makespan"] and by_name[name]["bubble"] == pytest.approx(
            alone["bubble_ratio"]
        )


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_all_rows_are_of_one_size(capsys: pytest.CaptureFixture[str], tmp_path: Path, data: st.DataObject) -> None:
    """Whatever files and schedules stand side by side, with or without sizes: and of that size alone they are equal."""
    ranks, microbatches = data.draw(st.sampled_from((2, 4))), data.draw(st.integers(1, 9))
    names = data.draw(st.lists(st.sampled_from(("1f1b", "zbv", "hanayo", "gpipe", "none")), unique=True, max_size=3))
    layers = ranks * data.draw(st.sampled_from((2, 3)))
    files = data.draw(st.lists(st.sampled_from(("mine.csv", "mine.json")), unique=True, min_size=not names))
    for file in files:
        words = f"1f1b -p {ranks} -m {microbatches} -L {layers} --save-program {tmp_path / file}"
        simulated(capsys, words)
    given = {"-p": ranks, "-m": microbatches, "-L": layers}
    flags = "".join(f" {flag} {number}" for flag, number in given.items() if data.draw(st.booleans()))
    words = " ".join([*(str(tmp_path / file) for file in files), *names]) + flags
    if command.main(["compare", *words.split(), "--json"]) != 0:
        assert len(capsys.readouterr().err.splitlines()) == 1
        assert "none" in names or any(each in ("zbv", "hanayo") for each in names)
        return
    rows = [row for row in json.loads(capsys.readouterr().out) if not row["refused"]]
    (size,) = {(row["ranks"], row["layers"], row["microbatches"]) for row in rows}
    if files:
        assert (size[0], size[2]) == (ranks, microbatches)
    for row in rows:
        own = "" if row["schedule"].endswith(".json") else f" -L {size[1]}"
        own += "" if row["schedule"] not in names else f" -p {size[0]} -m {size[2]}"
        assert simulated(capsys, row["schedule"] + own)["makespan"] == pytest.approx(row["time"], rel=1e-7)


def test_files_of_two_sizes_are_not_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Nor drawn together, with a model or without."""
    for ranks in (2, 4):
        simulated(capsys, f"1f1b -p {ranks} -m 4 --save-program {tmp_path}/{ranks}.csv")
    files = f"{tmp_path}/2.csv {tmp_path}/4.csv"
    for words in (f"compare {files}", f"draw {files}", f"simulate {files} --model llama2-7b"):
        assert command.main([*words.split()]) == command.USER_ERROR
        assert "has 4 ranks and" in capsys.readouterr().err


def test_named_schedules_of_several_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    rows = compared(capsys, "1f1b interleaved-1f1b -p 2 -m 4,8 -v 2,4")
    sizes = [(row["schedule"], row["microbatches"], row["virtual_stages"]) for row in rows]
    wanted = [("interleaved-1f1b", m, v) for m in (4, 8) for v in (2, 4)]
    assert sorted(sizes) == sorted([("1f1b", 4, 1), ("1f1b", 8, 1), *wanted])


def test_a_model_has_seconds_bytes_and_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    rows = compared(capsys, "1f1b gpipe --model llama2-7b -p 8 -m 32")
    assert [(row["schedule"], row["fits"]) for row in rows] == [("1f1b", True), ("gpipe", False)]
    assert rows[0]["memory"] < 80 < rows[1]["memory"]
    assert command.main(["compare", "1f1b", "gpipe", "--model", "llama2-7b", "-p", "8", "-m", "32"]) == 0
    size, head, first, second = capsys.readouterr().out.splitlines()
    assert size.startswith("8 pipeline ranks, 32 layers;")
    assert "time (s)" in head and "memory (GiB)" in head
    assert first.split()[0] == "1f1b" and first.split()[-1] == "yes" and second.split()[-1] == "no"


def test_what_a_schedule_cannot_do_is_said_below_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["compare", "1f1b", "gpipe", "interleaved-1f1b", "-p", "4", "-m", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and lines[-1].startswith("interleaved-1f1b: ") and "4 and 8" in lines[-1]
    last = compared(capsys, "1f1b gpipe interleaved-1f1b -p 4 -m 5")[-1]
    assert "4 and 8" in last["refused"] and [last[name] for name in ("time", "bubble", "memory")] == [None] * 3


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("1f1b -m 8,x", "-m: 'x' is not a whole number"),
        ("1f1b -m 0", "-m 0 must be at least 1."),
        ("interleaved-1f1b -m 5", "interleaved-1f1b: "),
        ("1f2b", "did you mean"),
    ],
)
def test_one_sentence(capsys: pytest.CaptureFixture[str], words: str, says: str) -> None:
    assert command.main(["compare", *words.split()]) == command.USER_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_simulate_prints_the_same_table(capsys: pytest.CaptureFixture[str]) -> None:
    """Of several schedules, and of one at several sizes; of one at one size the whole report."""
    words = "1f1b seq1f1b -p 2 -m 4 -k 1,2"
    assert command.main(["compare", *words.split()]) == 0
    table = capsys.readouterr().out
    assert command.main(["simulate", *words.split()]) == 0
    assert capsys.readouterr().out == table and len(table.splitlines()) == 7
    assert command.main(["simulate", *["seq1f1b", "-p", "2", "-m", "4", "-k", "1,2"], "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert sorted((row["schedule"], row["chunks"]) for row in rows) == [("seq1f1b", 1), ("seq1f1b", 2)]
    by_chunks = {row["chunks"]: row for row in rows}
    for chunks in (1, 2):
        alone = simulated(capsys, f"seq1f1b -p 2 -m 4 -k {chunks}")
        assert (alone["makespan"], alone["chunks"]) == (pytest.approx(by_chunks[chunks]["time"]), chunks)


@pytest.mark.parametrize("flags", ["-k 1,2", "-k 1,2 --pipe-sp-strategy average", "-k 1,2 --chunk-alignment 4"])
def test_rows_that_are_not_cut_are_kept(capsys: pytest.CaptureFixture[str], flags: str) -> None:
    """Flags that cut sequences are for the rows that have something to cut."""
    rows = compared(capsys, f"1f1b seq1f1b -p 2 -m 4 {flags}")
    assert not any(row["refused"] for row in rows)
    assert {(row["schedule"], row["chunks"]) for row in rows} == {
        (name, k) for name in ("1f1b", "seq1f1b") for k in (1, 2)
    }
    (cut,) = (row for row in rows if row["chunks"] == 2 and row["schedule"] == "seq1f1b")
    alone = simulated(capsys, f"seq1f1b -p 2 -m 4 {flags.replace('1,2', '2')}")
    assert cut["time"] == pytest.approx(alone["makespan"])


@pytest.mark.parametrize(
    "flags", ["-k 3 --pipe-sp-strategy average", "--chunk-lengths 1,1,1", f"-k {MOST_BALANCED + 1}"]
)
def test_a_row_whose_chunks_take_unlike_times_says_so(capsys: pytest.CaptureFixture[str], flags: str) -> None:
    words = f"seq1f1b -p 2 -m 1 -L 2 --piece-times attn=1 {flags}"
    (row,) = compared(capsys, words)
    k = row["chunks"]
    assert row["longest_chunk"] == pytest.approx((2 * k - 1) / k)  # (2 k - 1) / k^2 of the pairs are in the last
    assert command.main(["compare", *words.split()]) == 0
    assert f"seq1f1b, k = {k}: its longest chunk takes {100 * (k - 1) / k:.0f} % longer" in capsys.readouterr().out
    balanced = [*words.replace(flags, "-k 3").split()]
    assert command.main(["compare", *balanced]) == 0
    assert "longer" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("1f1b gpipe -k 1 --pipe-sp-strategy average", "--pipe-sp-strategy needs --pipe-sp-splits of 2 or more"),
        ("1f1b gpipe --order", "--order is for one schedule of one size"),
        ("1f1b -m 4,8 --save-program x.json", "--save-program is for one schedule of one size"),
        ("1f1b gpipe --helix-folds 2", "--helix-folds is an option of helix, not of 1f1b, gpipe."),
        ("1f1b -m 4,", "-m: '' is not a whole number"),
        ("1f1b -m 4,--5", "-m: '--5' is not a whole number"),
        ("1f1b --microbatches 4,0", "--microbatches 0 must be at least 1."),
    ],
)
def test_what_several_cannot_have(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.main(["simulate", *words.split()]) == command.USER_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line and not list(tmp_path.iterdir())


def test_a_model_of_ones_own_is_in_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    """As a named one is; and its layers are not made up."""
    text = "1f1b -p 2 -m 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 256 --seq-length 128"
    words = text.split()
    assert command.main(["compare", *words, "-L", "4"]) == 0
    assert "memory (GiB)" in capsys.readouterr().out
    assert command.main(["compare", *words]) == command.USER_ERROR
    assert "--num-layers must be given for a model by its sizes" in capsys.readouterr().err


@pytest.mark.parametrize("schedule", ["weipipe", "chimera", "seq1f1b"])
def test_a_bubble_is_one_number(capsys: pytest.CaptureFixture[str], tmp_path: Path, schedule: str) -> None:
    """Also where gradients of weights travel, or are summed, after the last op: in the report, the table, the picture
    and a timeline that was saved."""
    words = f"{schedule} --model llama2-7b -p 4 -m 8 -L 8"
    alone = simulated(capsys, words)
    number = f"{100 * alone['bubble_ratio']:.1f} %"
    assert alone["bubble_time"] == pytest.approx(alone["bubble_ratio"] * alone["makespan"])
    assert compared(capsys, words)[0]["bubble"] == pytest.approx(alone["bubble_ratio"])
    assert command.main(["simulate", *words.split()]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("bubble"))
    assert f" {number} of the makespan" in line
    picture = tmp_path / "x.html"
    assert command.main(["draw", *words.split(), "-o", str(picture)]) == 0
    assert f"bubble {number}" in picture.read_text()
    (drawn,) = make_simulations([schedule], _flags(words), plan_of([schedule], _flags(words)))
    drawn.timeline.save(tmp_path / "step.json")
    loaded = Timeline.load(tmp_path / "step.json")
    assert loaded.bubble == pytest.approx(alone["bubble_ratio"]) and loaded.makespan == drawn.makespan


def _flags(words: str) -> argparse.Namespace:
    parsers_of = parsers(CATALOGUE)[1]
    namespace = parsers_of["memory"].parse(words.split())
    namespace.catalogue, namespace.given = CATALOGUE, {}
    return namespace


def test_the_definition_is_printed_and_in_the_documents(capsys: pytest.CaptureFixture[str]) -> None:
    definition = BUBBLE.removeprefix("bubble: ")
    for name in ("simulate", "compare", "draw", "plan", "improve"):
        with pytest.raises(SystemExit):
            command.main([name, "--help"])
        assert definition in " ".join(capsys.readouterr().out.split())
    assert command.main(["list"]) == 0
    assert definition in " ".join(capsys.readouterr().out.split())
    text = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert f"| bubble | {definition}" in text
