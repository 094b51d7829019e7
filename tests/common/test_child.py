"""Processes that are started for a module import from where this one does, and from nowhere else."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helixpipe.common import child
from helixpipe.common.child import python_command

ROOT = Path(__file__).resolve().parents[2]

SPAWNS = """
import json, multiprocessing, sys

def path():
    return sys.path

if __name__ == "__main__":
    anew = "spawn" if sys.version_info >= (3, 11) else "fork"  # before, a spawned one looks into the current folder
    with multiprocessing.get_context(anew).Pool(1) as pool:
        print(json.dumps([sys.argv[1:], sys.path, pool.apply(path), __spec__.name]))
"""


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """One with a program, and one whose every module ends what imports it."""
    chosen, current = tmp_path / "chosen", tmp_path / "current"
    for folder in (chosen, current):
        folder.mkdir()
    (chosen / "program.py").write_text(SPAWNS)
    for name in ("runpy", "multiprocessing", "random", "json", "helixpipe", "program"):
        (current / f"{name}.py").write_text("raise SystemExit(f'the current folder has {__name__}')")
    return chosen, current


def run(command: list[str], current: Path, **environment: str) -> tuple[list[str], list[str], list[str], str]:
    done = subprocess.run(
        command, cwd=current, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and done.stderr == "", done.stdout + done.stderr
    arguments, own, spawned, name = json.loads(done.stdout)
    return arguments, own, spawned, name


def test_what_was_put_on_the_path_is_found_and_the_current_folder_is_not(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, current = folders
    monkeypatch.setattr(sys, "path", ["", *sys.path, str(chosen)])
    arguments, own, spawned, name = run(python_command("program", "-x", "a b"), current)
    assert (arguments, name) == (["-x", "a b"], "program")
    assert own[: len(sys.path) - 1] == list(dict.fromkeys(sys.path[1:]))[: len(sys.path) - 1]
    for path in (own, spawned):
        assert str(current) not in path and "" not in path and str(chosen) in path


def test_a_folder_of_pythonpath_is_found(folders: tuple[Path, Path]) -> None:
    chosen, current = folders
    run(python_command("program"), current, PYTHONPATH=str(chosen))


def test_a_checkout_that_is_not_installed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path and Path(path) != ROOT])
    paths = subprocess.run(
        [*python_command("timeit", "-n1", "import sys; print(sys.path)")], capture_output=True, text=True, check=True
    ).stdout
    assert repr(str(ROOT)) in paths and Path(child.__file__).is_relative_to(ROOT)


STARTS_A_TREE_OF_ITS_OWN = {
    "benchmarks/gpu.py": "commands of the checkout, which is the current folder",
    "benchmarks/fake_jobs.py": "jobs on the fake device, whose current folder is the checkout",
}


def test_no_module_is_started_in_another_way() -> None:
    """`python -m` and `python -c` put the current folder first on the path."""
    found = set()
    for folder in ("helixpipe", "schedules", "megatron", "tools", "benchmarks", "netlab"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.List | ast.Tuple):
                    words = [ast.unparse(each) for each in node.elts]
                    if words[:1] == ["sys.executable"] and words[1:2] and words[1] in ("'-m'", "'-c'"):
                        found.add(str(path.relative_to(ROOT)))
    assert found == set(STARTS_A_TREE_OF_ITS_OWN)
