"""A pytest plugin that draws the examples of property tests at random, and prints a ready test for each failure.

    python -m tests.hunt [--seed N] [--times N] [files and other words for pytest]

Without it every run draws the same examples (tests/conftest.py). It runs all property tests, thorough ones as well.
A test belongs to them if it is decorated with `given`, or marked `hypothesis` because a function inside it is.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from random import SystemRandom
from typing import Any

import pytest
from hypothesis import is_hypothesis_test, settings

SEED = int(os.environ.get("HUNT_SEED", 0))
"""The seed for tests that draw in the processes of several ranks, where all have to draw the same."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", type=int, default=1, help="draw this many times the examples of each property test")


def pytest_report_header() -> str:
    return f"hunt with seed {SEED}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Multiply the examples of each test, whose number its decorator has fixed."""
    for test in {getattr(item, "obj", None) for item in items}:
        if is_hypothesis_test(test):
            own: settings = test._hypothesis_internal_use_settings
            more = settings(own, max_examples=own.max_examples * config.option.times)
            test._hypothesis_internal_use_settings = more


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Function, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and call.excinfo is not None:
        lines = [ready_test(example, item.funcargs) for example in failing_examples(call.excinfo.value)]
        again = f"make hunt ARGS='--seed {SEED} --times {item.config.option.times} {item.nodeid}'"
        report.sections.append(("Ready test", "\n".join([f"# {item.nodeid}", *lines, f"# Repeat it: {again}"])))
    return report


def failing_examples(error: BaseException) -> list[str]:
    """Return the calls that failed, from the notes that hypothesis adds to their errors."""
    if nested := getattr(error, "exceptions", ()):  # it found several errors
        return [call for each in nested for call in failing_examples(each)]
    notes = [note.partition(":") for note in getattr(error, "__notes__", ())]
    return [call.strip() for title, _, call in notes if title == "Failing test case"]


def ready_test(example: str, given_by_pytest: Mapping[str, Any]) -> str:
    """Return a failing call, as hypothesis prints it, as the decorator that repeats it.

    Args:
        example: the call, with all arguments by name.
        given_by_pytest: the arguments that fixtures and parameters give, which the decorator leaves out.
    """
    try:
        call = ast.parse(example, mode="eval").body
        assert isinstance(call, ast.Call)
        drawn = [each for each in call.keywords if each.arg not in given_by_pytest]
        if any(isinstance(node, ast.Constant) and node.value is ... for each in drawn for node in ast.walk(each)):
            raise SyntaxError  # what a test draws by `data` is no value
    except SyntaxError:  # a value has no source text
        return f"# No @example can say this, so add the @reproduce_failure(...) above: {' '.join(example.split())}"
    return f"@example({', '.join(map(ast.unparse, drawn))})\ndef {ast.unparse(call.func)}(...): ..."


def main(words: Sequence[str]) -> int:
    """Run pytest with a seed, a random one unless given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=SystemRandom().randrange(1 << 32), help="repeat a hunt")
    known, more = parser.parse_known_args(words)
    options = [f"--hypothesis-seed={known.seed}", "--hypothesis-profile=hunt", "-p", "tests.hunt"]
    chosen = ["-m", "hypothesis and not gpu and not netlab", "--no-header", *options, *more]
    seeds = {"HUNT_SEED": str(known.seed), "PYTHONHASHSEED": str(known.seed % (1 << 32))}
    print(f"hunt with seed {known.seed}", flush=True)
    return subprocess.call([sys.executable, "-m", "pytest", *chosen], env={**os.environ, **seeds})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
