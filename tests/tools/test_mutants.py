"""The runner of mutants on a toy tree: what is killed, what survives, and a list that no longer fits the code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import mutants

CODE = "def double(value: int) -> int:\n    return 2 * value\n\n\ndef wait() -> None:\n    pass\n"
TESTS = """
import time

import toy


def test_double():
    assert toy.double(3) == 6


def test_wait():
    toy.wait()
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "toy.py").write_text(CODE)
    (tmp_path / "test_toy.py").write_text(TESTS)
    return tmp_path


def entry(name: str, find: str, replace: str, **other: str) -> str:
    texts = {"name": name, "breaks": "toy", "file": "toy.py", "find": find, "replace": replace, **other}
    lines = [f"{key} = {json.dumps(value)}" for key, value in texts.items()]
    return "\n".join(["[[mutant]]", *lines, 'tests = ["test_toy.py"]', ""])


def run(root: Path, entries: list[str], *flags: str) -> int:
    (root / "list.toml").write_text("\n".join(entries))
    return mutants.main(["--root", str(root), "--mutants", str(root / "list.toml"), *flags])


def test_killed_survived_and_unusable(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = [
        entry("wrong factor", "2 * value", "3 * value"),
        entry("same product", "2 * value", "value * 2"),
        entry("not tested", "2 * value", "3 * value", keyword="wait"),
        entry("gone", "4 * value", "3 * value"),
        entry("twice", "value", "0"),
        entry("changes nothing", "2 * value", "2 * value"),
        entry("no tests", "2 * value", "3 * value", keyword="nothing"),
        entry("no import", "    return 2 * value", "    return 2 *"),
    ]
    assert run(root, entries, "--jobs", "2") == 1
    *table, last = capsys.readouterr().out.splitlines()
    lines = {line[:15].strip(): line for line in table}
    assert " killed " in lines["wrong factor"] and "test_toy.py::test_double" in lines["wrong factor"]
    assert "stands 0 times in toy.py" in lines["gone"] and "stands 2 times in toy.py" in lines["twice"]
    found = json.loads(last)
    assert (found["mutants"], found["killed"]) == (8, 1)
    assert found["survived"] == ["not tested", "same product"]
    assert found["unusable"] == ["changes nothing", "gone", "no import", "no tests", "twice"]
    assert (root / "toy.py").read_text() == CODE


def test_one_that_hangs_is_killed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(root, [entry("hangs", "    pass", "    import time; time.sleep(60)")], "--timeout", "3") == 0
    assert re.search(r"killed .* not done after \d+ s$", capsys.readouterr().out.splitlines()[0])


def test_all_killed_after_the_tests_passed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = [entry("wrong factor", "2 * value", "3 * value"), entry("same product", "2 * value", "value * 2")]
    assert run(root, entries, "--check", "--only", "wrong factor") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["killed"] == 1


def test_tests_that_fail_anyway_kill_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "toy.py").write_text(CODE.replace("2 *", "5 *"))
    assert run(root, [entry("wrong factor", "5 * value", "3 * value")], "--check") == 2
    assert "test_toy.py on the tree as it is" in capsys.readouterr().err


def test_lists_that_cannot_be(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = entry("wrong factor", "2 * value", "3 * value")
    assert run(root, [one], "--only", "other") == 2
    assert run(root, [one, one]) == 2
    assert run(root, [entry("wrong factor", "2", "3", lines="4")]) == 2
    first, second, third = capsys.readouterr().err.splitlines()
    assert "no mutant is named other" in first
    assert "several mutants named wrong factor" in second
    assert "mutant wrong factor: lines is unknown" in third


@pytest.mark.thorough
def test_the_cover_is_of_the_quickest_tests(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All tests run, the marked ones as well; what kills several mutants in little time is chosen first."""
    (root / "pytest.ini").write_text("[pytest]\nmarkers = thorough gpu netlab\naddopts = -m 'not thorough'\n")
    slow = "\n\n@pytest.mark.thorough\ndef test_slowly():\n    time.sleep(0.5)\n    assert toy.double(1) == 2\n"
    (root / "test_toy.py").write_text("import pytest\n" + TESTS + slow)
    raising = "    raise KeyError"
    entries = [
        entry("wrong factor", "2 * value", "3 * value"),
        entry("wrong sum", "2 * value", "2 + value"),
        entry("raises", "    pass", raising),
        entry("same product", "2 * value", "value * 2"),
    ]
    assert run(root, entries, "--cover", str(root / "cover.json")) == 1
    found = json.loads((root / "cover.json").read_text())
    assert found["core"] == {
        "test_toy.py::test_double": ["wrong factor", "wrong sum"],
        "test_toy.py::test_wait": ["raises"],
    }
    assert found["no test is known for"] == ["same product"]
    killers = found["mutants"]["wrong factor"]
    assert list(killers) == ["test_toy.py::test_double", "test_toy.py::test_slowly"]
    assert killers["test_toy.py::test_slowly"] > 0.4 > killers["test_toy.py::test_double"]


def test_every_mutant_of_the_list_fits_the_code() -> None:
    """Whoever moves code moves its mutants with it."""
    every = mutants.load(mutants.ROOT / "tools" / "mutants.toml")
    assert len(every) >= 78
    for mutant in every:
        mutant.applied((mutants.ROOT / mutant.file).read_text(encoding="utf-8"))
        assert all((mutants.ROOT / test.split("::")[0]).exists() for test in mutant.tests), mutant.name


def test_every_mutant_names_a_test_that_make_test_runs(request: pytest.FixtureRequest) -> None:
    """One that is not marked `thorough`: so all mutants can be killed by `make test` alone."""
    every = mutants.load(mutants.ROOT / "tools" / "mutants.toml")
    chosen = core_tests(request, sorted({test for mutant in every for test in mutant.tests}))
    nameless = [mutant.name for mutant in every if not any(names(mutant, test) for test in chosen)]
    assert not nameless


def names(mutant: mutants.Mutant, test: str) -> bool:
    """Whether a mutant's paths and keyword choose the test of this id, as pytest would."""
    if not any(test == path or test.startswith((f"{path}/", f"{path}::", f"{path}[")) for path in mutant.tests):
        return False
    words = re.sub(
        r"[^\s()]+",
        lambda word: word[0] if word[0] in ("and", "or", "not") else str(word[0].lower() in test.lower()),
        mutant.keyword or "tests",
    )
    return bool(eval(words))


def core_tests(request: pytest.FixtureRequest, paths: list[str]) -> list[str]:
    """The ids of the tests below these paths that are not marked: those of this session, if it has all of them."""
    options, items = request.config.option, request.session.items
    if not options.keyword and {item.path.parent for item in items} >= {(mutants.ROOT / path).parent for path in paths}:
        return [item.nodeid for item in items if item.get_closest_marker("thorough") is None]
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *paths]
    listed = subprocess.run(command, cwd=mutants.ROOT, capture_output=True, text=True, check=True)
    return [line for line in listed.stdout.splitlines() if "::" in line]
