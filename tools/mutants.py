"""Break the code on purpose, one line at a time, and see whether the tests notice.

    python tools/mutants.py                                    # all of tools/mutants.toml, about 20 s each
    python tools/mutants.py --only kv-edge-dropped --check
    python tools/mutants.py --cover runs/cover.json            # which tests kill each of them, in how many seconds

Each mutant of the list replaces one text that stands in its file exactly once, and names the tests that must fail then,
of those that `make test` runs. It is applied in a copy of the tree, in a temporary folder; the checkout is only read. A
mutant is

    killed      a test failed, or the tests did not end in time
    SURVIVED    all its tests passed: one is missing or too weak
    UNUSABLE    its text is not there exactly once, or its tests cannot be run: the list has to follow the code

A table goes to standard output as the mutants end, then one line of JSON. Exit status 1 unless all are killed.

With --cover all tests of a mutant run, those marked `thorough` as well, which `make test` leaves to `make test-all`.
The file then has, for each mutant, the tests that fail with their seconds, and a core: tests that together kill every
mutant, chosen greedily by how many they kill a second. None of these should be marked.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest needs it, too

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = (".*", "__pycache__", "build", "runs", "shared", "*.egg-info", "_core.*.so")
"""Files that the copies of the tree leave out: of compiled ones those that Python stands in for where they are not."""

SHORTEST = 0.05
"""Seconds that a test is taken for at least: pytest itself needs some."""

KILLED, SURVIVED, UNUSABLE = "killed", "SURVIVED", "UNUSABLE"


@dataclass(frozen=True)
class Mutant:
    """One entry of the list.

    breaks: what goes wrong, in a line. file: below the root. find: a text that stands in it exactly once. replace: what
    takes its place. tests: paths or ids of tests, `keyword`: pytest's -k, that choose those which must fail.
    """

    name: str
    breaks: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]
    keyword: str = ""

    def applied(self, text: str) -> str:
        """Return the mutated text. Raises ValueError if the mutant does not apply."""
        count = text.count(self.find)
        if count != 1:
            raise ValueError(f"its text stands {count} times in {self.file}, not once")
        if self.find == self.replace:
            raise ValueError("it changes nothing")
        return text.replace(self.find, self.replace)


@dataclass(frozen=True)
class Verdict:
    """The result of running a mutant. seconds: of its tests. detail: the test that failed first, or what was wrong.
    killers: seconds of each test that failed, if all were run.
    """

    mutant: Mutant
    outcome: str
    seconds: float
    detail: str
    killers: Mapping[str, float] = field(default_factory=dict)


def load(path: Path) -> list[Mutant]:
    """Load the list in a TOML file of [[mutant]] tables. Raises ValueError, naming the mutant, for an invalid one."""
    mutants: list[Mutant] = []
    known = {field.name for field in fields(Mutant)}
    for entry in tomllib.loads(path.read_text(encoding="utf-8")).get("mutant", []):
        name = entry.get("name", f"number {len(mutants) + 1}")
        if wrong := sorted(set(entry) - known) or sorted(known - set(entry) - {"keyword"}):
            raise ValueError(f"{path}, mutant {name}: {', '.join(wrong)} is unknown or missing.")
        mutants.append(Mutant(**{**entry, "tests": tuple(entry["tests"])}))
    twice = [name for name, count in Counter(mutant.name for mutant in mutants).items() if count > 1]
    if twice:
        raise ValueError(f"{path} has several mutants named {', '.join(twice)}.")
    return mutants


@contextlib.contextmanager
def copied(root: Path) -> Iterator[Path]:
    """Yield a copy of the tree, deleted when the context ends."""
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(root, tree, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
        yield tree


def run_tests(
    tree: Path, tests: Sequence[str], keyword: str, timeout: float, report: Path | None = None
) -> tuple[int | None, str]:
    """Return (pytest's exit status, its output) in a tree; None if it did not end in `timeout` seconds and was killed.

    It ends with the first test that fails, and leaves out what `make test` does. With a report, a file with the outcome
    of each test, it does neither.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", *tests]
    whole = ["-m", "not gpu and not netlab", f"--junitxml={report}", "-o", "junit_family=xunit1"]
    command += ["-x"] if report is None else whole
    command += ["-k", keyword] if keyword else []
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # a mutant of the same second and size would run as the one before
    process = subprocess.Popen(
        command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=timeout)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the ranks of a test end with the process that started them
        process.communicate()


def judge(mutant: Mutant, tree: Path, timeout: float, every: bool = False) -> Verdict:
    """Apply a mutant to the tree, run its tests, and take it back. every: run all of them and say which fail."""
    report = tree.parent / "report.xml" if every else None
    path, start = tree / mutant.file, time.monotonic()
    try:
        original = path.read_text(encoding="utf-8")
        path.write_text(mutant.applied(original), encoding="utf-8")
    except (OSError, ValueError) as error:
        return Verdict(mutant, UNUSABLE, 0.0, str(error))
    try:
        status, output = run_tests(tree, mutant.tests, mutant.keyword, timeout, report)
    finally:
        path.write_text(original, encoding="utf-8")
    outcome = _outcome(status, output, time.monotonic() - start)
    return Verdict(mutant, *outcome, failed_tests(report) if report and outcome[0] == KILLED else {})


def failed_tests(report: Path) -> dict[str, float]:
    """Return the seconds of the tests that failed, by id, in a report, which is removed; none if pytest could not end
    it.
    """
    if not report.exists():
        return {}
    cases = list(ElementTree.parse(report).iter("testcase"))
    report.unlink()
    failed = (case for case in cases if case.find("failure") is not None or case.find("error") is not None)
    return {f"{case.get('file')}::{case.get('name')}": float(case.get("time", 0)) for case in failed}


def _outcome(status: int | None, output: str, seconds: float) -> tuple[str, float, str]:
    lines = output.strip().splitlines() or [""]
    if status is None:
        return KILLED, seconds, f"not done after {seconds:.0f} s"
    if status == 0:
        return SURVIVED, seconds, lines[-1].strip("= ")
    failed = next((line.split(" ", 1)[1] for line in lines if line.startswith(("FAILED ", "ERROR "))), "")
    if status < 0 or (status == 1 and "::" in failed):  # no test is named where a file of tests cannot be imported
        return KILLED, seconds, failed.split(" - ")[0] or f"ended by signal {-status}"
    return UNUSABLE, seconds, f"pytest ended with status {status}: {failed or lines[-1]}"


def judge_all(
    mutants: Sequence[Mutant], root: Path, jobs: int, timeout: float, every: bool = False
) -> Iterator[Verdict]:
    """Yield the verdicts as they arrive; each of the `jobs` has a copy of the tree. every: as in `judge`."""
    trees: queue.Queue[Path] = queue.Queue()

    def one(mutant: Mutant) -> Verdict:
        tree = trees.get()
        try:
            return judge(mutant, tree, timeout, every)
        finally:
            trees.put(tree)

    with contextlib.ExitStack() as stack:
        for _ in range(jobs):
            trees.put(stack.enter_context(copied(root)))
        pool = stack.enter_context(ThreadPoolExecutor(jobs))
        for future in as_completed([pool.submit(one, mutant) for mutant in mutants]):
            yield future.result()


def failures_without(mutants: Sequence[Mutant], root: Path, timeout: float) -> list[str]:
    """Run all tests of the mutants on the tree as it is; what is wrong with those that do not pass."""
    keywords: dict[tuple[str, ...], set[str]] = {}
    plain = [test for mutant in mutants if not mutant.keyword for test in mutant.tests]
    for mutant in mutants:
        if mutant.keyword:
            keywords.setdefault(mutant.tests, set()).add(f"({mutant.keyword})")
    runs = [(tuple(dict.fromkeys(plain)), "")] if plain else []
    runs += [(tests, " or ".join(sorted(words))) for tests, words in keywords.items()]
    wrong = []
    with copied(root) as tree:
        for tests, keyword in runs:
            status, output = run_tests(tree, tests, keyword, timeout)
            if status != 0:
                last = (output.strip().splitlines() or ["no output"])[-1]
                wrong.append(f"{' '.join(tests)} {keyword and f'-k {keyword!r} '}on the tree as it is: {last}")
    return wrong


def greedy_cover(killers: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return tests that together kill all mutants that any test kills, chosen greedily by mutants killed a second.
    killers: by mutant, the seconds of the tests that kill it.
    """
    seconds: dict[str, float] = {}
    kills: dict[str, set[str]] = {}
    for name, tests in killers.items():
        for test, taken in tests.items():
            seconds[test] = max(taken, seconds.get(test, SHORTEST))
            kills.setdefault(test, set()).add(name)
    left = {name for name, tests in killers.items() if tests}
    chosen = []
    while left:
        best = max(kills, key=lambda test: (len(kills[test] & left) / seconds[test], test))
        chosen.append(best)
        left -= kills[best]
    return chosen


def cover(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Return the content of the file that --cover writes."""
    killers = {each.mutant.name: dict(each.killers) for each in sorted(verdicts, key=lambda each: each.mutant.name)}
    core = greedy_cover(killers)
    return {
        "core": {test: [name for name, tests in killers.items() if test in tests] for test in core},
        "no test is known for": [name for name, tests in killers.items() if not tests],
        "mutants": killers,
    }


def summary(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Return counts, names of those that were not killed, and the seconds of all."""
    counts = Counter(verdict.outcome for verdict in verdicts)
    return {
        "mutants": len(verdicts),
        "killed": counts[KILLED],
        "survived": sorted(verdict.mutant.name for verdict in verdicts if verdict.outcome == SURVIVED),
        "unusable": sorted(verdict.mutant.name for verdict in verdicts if verdict.outcome == UNUSABLE),
        "seconds": round(sum(verdict.seconds for verdict in verdicts)),
    }


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=Path, default=ROOT / "tools" / "mutants.toml", help="The list.")
    parser.add_argument("--root", type=Path, default=ROOT, help="The tree to copy (default: this checkout).")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="These mutants alone.")
    parser.add_argument("--list", action="store_true", help="Print names and what each breaks; run nothing.")
    parser.add_argument("--check", action="store_true", help="First see that all tests named pass without a mutant.")
    parser.add_argument(
        "--cover", type=Path, metavar="FILE", help="Run all tests of each; write which of them kill it."
    )
    parser.add_argument("--jobs", type=int, default=1, help="Mutants at a time (default: 1; tests start ranks).")
    parser.add_argument("--timeout", type=float, default=300.0, help="Seconds for one mutant's tests (default: 300).")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _arguments(arguments)
    try:
        mutants = load(options.mutants)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    if options.only:
        unknown = sorted(set(options.only) - {mutant.name for mutant in mutants})
        if unknown:
            print(f"--only: no mutant is named {', '.join(unknown)}; --list shows all.", file=sys.stderr)
            return 2
        mutants = [mutant for mutant in mutants if mutant.name in options.only]
    width = max((len(mutant.name) for mutant in mutants), default=0)
    if options.list:
        for mutant in mutants:
            print(f"{mutant.name:{width}}  {mutant.breaks}")
        return 0
    if options.check and (wrong := failures_without(mutants, options.root, 10 * options.timeout)):
        print("\n".join(wrong), file=sys.stderr)
        return 2
    verdicts = []
    for verdict in judge_all(mutants, options.root, options.jobs, options.timeout, options.cover is not None):
        verdicts.append(verdict)
        print(
            f"{verdict.mutant.name:{width}}  {verdict.outcome:8}  {verdict.seconds:5.0f} s  {verdict.detail}",
            flush=True,
        )
    if options.cover is not None:
        options.cover.write_text(json.dumps(cover(verdicts), indent=1) + "\n", encoding="utf-8")
    print(json.dumps(summary(verdicts)))
    return 0 if all(verdict.outcome == KILLED for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
