"""The runner of benchmarks: what it lists and refuses, the files of setups it reads, where results are written."""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import data, run
from benchmarks.report import Figures, Outcome, Page, markdown, read_figures, written_into
from benchmarks.rounds import in_turn, median_ratio
from benchmarks.run import BENCHMARKS
from helixpipe.common.errors import UserError
from helixpipe.common.flags import FlagParser, add_dataclass_arguments

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_flags_and_says_how_it_is_run(name: str) -> None:
    module = importlib.import_module(BENCHMARKS[name].module)
    add_dataclass_arguments(FlagParser(), module.Options)
    assert callable(module.run)
    assert re.search(
        rf"make (bench-{name}|bench|reproduce|{name})\b|python -m benchmarks {name}\b", module.__doc__ or ""
    )


def test_benchmarks_that_documents_name_are_there() -> None:
    pages = [path.read_text(encoding="utf-8") for path in [ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]]
    named = {name for page in pages for name in re.findall(r"make bench-([a-z-]*[a-z])", page)}
    assert len(named) > 3 and named <= set(BENCHMARKS)


def test_the_list_names_targets_of_make(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--targets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [f"bench-{name}" for name in BENCHMARKS]
    assert run.main([]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(BENCHMARKS)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("chosing", "benchmark 'chosing' is unknown: did you mean 'choosing'?"),
        ("steps --round 4", "unknown flag --round; did you mean --rounds?"),
        ("steps --rounds 2", "--rounds 2 must be at least 3."),
        ("choosing --rows 99", "--rows 99 must be at most 13."),
        ("predict --json README.md --steps 0", "--json README.md is no JSON"),
        ("plans --output README.md", "--output must be a page with `<!-- bench: plan -->`"),
    ],
)
def test_what_is_refused(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(words.split()) == 2
    printed = capsys.readouterr().err
    assert said in printed and printed.count("\n") == 1


@dataclass(frozen=True)
class Both(Figures, Page):
    """Options with both files."""


def test_results_are_written_where_the_options_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures, page = tmp_path / "figures.json", tmp_path / "page.md"
    options = Both(json=str(figures), output=str(page))
    assert Outcome("told", figures={"a": [1.5]}, status=1).deliver(options) == 1
    assert page.read_text(encoding="utf-8") == capsys.readouterr().out == "told\n"
    assert read_figures(figures) == json.loads(figures.read_text(encoding="utf-8")) == {"a": [1.5]}
    page.write_text("above\n<!-- bench: t -->\nold\n<!-- end -->\nbelow\n", encoding="utf-8")
    assert Outcome("told", {"t": ["| new |"]}).deliver(options) == 0
    assert page.read_text(encoding="utf-8") == "above\n<!-- bench: t -->\n| new |\n<!-- end -->\nbelow\n"
    with pytest.raises(UserError, match=r"--output .* has no place for the table other"):
        Outcome("told", {"other": []}).deliver(options)
    assert Outcome("told", figures=[]).deliver(object()) == 0, "of a benchmark that writes nothing"
    figures.write_text("[]", encoding="utf-8")
    with pytest.raises(UserError, match="must hold an object"):
        read_figures(figures)
    assert read_figures(None) == read_figures(tmp_path / "none.json") == {}


def test_a_table() -> None:
    assert markdown(["", "a"], [["x", ""]], "lr") == ["| | a |", "|---|--:|", "| x |  |"]


@dataclass(frozen=True)
class Row:
    """A row of the files below."""

    name: str
    ranks: int
    lengths: tuple[int, ...] = (1,)


def rows_of(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Row, ...]:
    (folder / "rows.toml").write_text(text, encoding="utf-8")
    monkeypatch.setattr(data, "FOLDER", folder)
    return data.rows("rows.toml", "row", Row)


def test_rows_have_what_is_common(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'row = [{ name = "a" }, { name = "b", ranks = 4, lengths = [2, 3] }]\n[common]\nranks = 2\n'
    assert rows_of(tmp_path, text, monkeypatch) == (Row("a", 2), Row("b", 4, (2, 3)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("row = 1\n[", "rows.toml cannot be read: "),
        ("other = []", "rows.toml has no table [[row]]; it has other."),
        ('row = [{ name = "a" }]', "rows.toml, row 1: 'ranks' is missing."),
        ('row = [{ name = "a", ranks = "2" }]', "rows.toml, row 1: ranks cannot be '2'."),
        ('row = [{ name = "a", ranks = 2, rank = 2 }]', "rows.toml, row 1: 'rank' is no field; did you mean 'ranks'?"),
        ("row = 1", "rows.toml has no table [[row]]; it has row."),
        ("row = [1]", "rows.toml, row 1 must be an object, not int."),
    ],
)
def test_rows_that_cannot_be(text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError) as raised:
        rows_of(tmp_path, text, monkeypatch)
    assert said in str(raised.value)


@given(st.lists(st.integers(), min_size=1, max_size=4, unique=True), st.integers(1, 4), st.integers(0, 2))
def test_turns(names: list[int], rounds: int, warm_up: int) -> None:
    """Every name is measured once a round, the first and the last by turns; rounds of warming up do not count."""
    order: list[int] = []

    def measure(name: int) -> int:
        order.append(name)
        return len(order)

    found = in_turn(names, rounds, measure, warm_up)
    each = [order[start : start + len(names)] for start in range(0, len(order), len(names))]
    assert each == [names[:: 1 if number % 2 == 0 else -1] for number in range(warm_up + rounds)]
    counted = sorted(number for numbers in found.values() for number in numbers)
    assert counted == list(range(warm_up * len(names) + 1, len(order) + 1)) and list(found) == names


def test_a_ratio_is_the_median_of_the_rounds() -> None:
    assert median_ratio([2.0, 30.0, 3.0], [1.0, 10.0, 2.0]) == 2.0


def test_a_page_needs_the_end_of_a_place() -> None:
    with pytest.raises(ValueError, match="no place for the table t"):
        written_into("<!-- bench: t -->\nold\n", {"t": []})
