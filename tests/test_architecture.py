"""The house's rules: who may import whom, where torch may be, how long a file may be (see docs/architecture.md)."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from schedules import CATALOGUE

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("helixpipe", "schedules", "megatron/pretrain")
MAX_LINES = 500
"""A file is for one sitting: beyond this it holds two things."""

MAX_FUNCTION_LINES = {"lowering": 60, "simulate": 60, "program": 60, "planning": 60}
"""Of the folders everything goes through; of the others 80."""

FLOORS = (
    "common",
    "compiled",
    "program",
    "costs",
    "lowering",
    "simulate",
    "certify",
    "planning",
    "adapt",
    "draw",
    "fake_cuda",
    "model",
    "watch",
    "runtime",
    "profile",
    "drop_in",
    "playground",
    "cli",
)
"""The folders of helixpipe, from the lowest: a folder imports from itself and from lower ones."""

PRETRAIN_FLOORS = (
    "config",
    "process",
    "data",
    "huggingface",
    "checkpoint",
    "log",
    "plan",
    "step",
    "feed",
    "validation",
    "inference",
    "resilience",
)
"""The folders of megatron/pretrain, likewise; the files beside them may import all of them."""

PLANNING_FLOORS = ("memory", "vocabulary", "overlap", "catalogue", "order", "reorder", "documents", "search")
"""The folders of helixpipe/planning and one of its files, likewise; the files beside them may import all of them."""

HOUSES = (("helixpipe", FLOORS), ("helixpipe.planning", PLANNING_FLOORS), ("megatron.pretrain", PRETRAIN_FLOORS))

TORCH_FREE_FLOORS = (
    "common",
    "compiled",
    "program",
    "costs",
    "lowering",
    "simulate",
    "certify",
    "planning",
    "adapt",
    "draw",
    "playground",
    "cli",
)


TOP_LEVEL = """
.ci .dockerignore .editorconfig .github .gitignore .pre-commit-config.yaml CHANGELOG.md CITATION.cff CONTRIBUTING.md
Dockerfile LICENSE Makefile README.md SECURITY.md benchmarks docs examples helixpipe megatron mkdocs.yml netlab
pretrain_gpt.py pyproject.toml requirements.lock schedules setup.py tests tools
"""
"""The files and folders of the repository's top level."""


def test_nothing_else_stands_at_the_top_level() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert sorted({path.split("/")[0] for path in listed.splitlines()}) == TOP_LEVEL.split()


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}


def under(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


WITH_TORCH = ("schedules.drop_in",)
"""The only one of schedules: the catalogue for a training loop of one's own."""

TORCH_FREE = sorted(
    name
    for name in MODULES
    if name.split(".")[0] == "schedules"
    or ([*name.split("."), ""][1] in TORCH_FREE_FLOORS and name.startswith("helixpipe."))
    if name not in WITH_TORCH
)


def imports(source: str, module: str, *, is_package: bool, at_import: bool = False) -> set[str]:
    """Dotted names that `module` imports: modules, and `from` names, which may be modules too.

    at_import: only what happens when the module is imported; not inside functions, not under `if TYPE_CHECKING`.
    """
    found: set[str] = set()

    def visit(nodes: Iterator[ast.AST]) -> None:
        for node in nodes:
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parents = module.split(".") if is_package else module.split(".")[:-1]
                    parents = parents[: len(parents) - node.level + 1]
                    base = ".".join([*parents, base] if base else parents)
                found.update({base, *(f"{base}.{alias.name}" for alias in node.names)})
            elif at_import and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            elif at_import and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                visit(iter(node.orelse))
            else:
                visit(ast.iter_child_nodes(node))

    visit(ast.iter_child_nodes(ast.parse(source)))
    return found


@cache
def imports_of(module: str, *, at_import: bool = False) -> set[str]:
    path = MODULES[module]
    source = path.read_text(encoding="utf-8")
    return imports(source, module, is_package=path.name == "__init__.py", at_import=at_import)


def path_to_torch(module: str) -> list[str]:
    """A chain of imports from `module` to torch or megatron, or an empty list."""
    seen: set[str] = set()
    chains = [[module]]
    while chains:
        chain = chains.pop()
        if chain[-1] in seen:
            continue
        seen.add(chain[-1])
        for name in sorted(imports_of(chain[-1], at_import=True)):
            if under(name, "torch") or under(name, "megatron"):
                return [*chain, name]
            # importing a.b.c runs a, a.b and a.b.c
            parts = name.split(".")
            ancestors = (".".join(parts[: i + 1]) for i in range(len(parts)))
            chains += [[*chain, ancestor] for ancestor in ancestors if ancestor in MODULES]
    return []


def test_scanner_sees_every_way_to_import() -> None:
    source = (
        "import torch.nn as nn\n"
        "from . import near\n"
        "from ..far import thing\n"
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import only_types\n"
        "try:\n    import tried\nexcept ImportError:\n    pass\n"
        "class C:\n    import in_class\n"
        "def f():\n    from later import g\n"
    )
    everything = imports(source, "a.b.c", is_package=False)
    assert {
        "torch.nn",
        "a.b",
        "a.b.near",
        "a.far",
        "a.far.thing",
        "only_types",
        "tried",
        "in_class",
        "later",
    } <= everything
    at_import = imports(source, "a.b.c", is_package=False, at_import=True)
    assert {"torch.nn", "tried", "in_class"} <= at_import
    assert not {"only_types", "later", "later.g"} & at_import
    assert "a.b.near" in imports("from . import near", "a.b", is_package=True)


def floor(name: str, package: str, floors: tuple[str, ...]) -> int | None:
    """The place of a module's folder among the floors of a package; None for one outside them."""
    parts = name.removeprefix(package + ".").split(".")
    return floors.index(parts[0]) if under(name, package) and parts[0] in floors else None


@pytest.mark.parametrize(("package", "floors"), HOUSES)
def test_every_folder_has_its_floor(package: str, floors: tuple[str, ...]) -> None:
    inside = ROOT.joinpath(*package.split("."))
    folders = {path.parent.name for path in inside.glob("*/*.py")}
    assert folders <= set(floors)
    assert {floor for floor in floors if f"{package}.{floor}" not in MODULES} == set()
    for folder in folders:  # says what it is in one line
        assert ast.get_docstring(ast.parse((inside / folder / "__init__.py").read_text(encoding="utf-8")))


@pytest.mark.parametrize(("package", "floors"), HOUSES)
def test_imports_go_down(package: str, floors: tuple[str, ...]) -> None:
    upward = []
    for module in MODULES:
        own = floor(module, package, floors)
        for name in imports_of(module) if own is not None else ():
            other = floor(name, package, floors)
            if other is not None and own is not None and other > own:
                upward.append(f"{module} imports {name}")
    assert upward == []


def test_no_module_imports_itself_in_a_circle() -> None:
    """Also inside a folder, and also where an import waits for a function to be called."""
    remaining = {module: _needed(module) for module in MODULES}
    while remaining:
        leaves = [module for module, needed in remaining.items() if not needed & set(remaining)]
        assert leaves, sorted(remaining)
        for module in leaves:
            del remaining[module]


@pytest.mark.parametrize("module", TORCH_FREE)
def test_torch_free_modules_reach_no_torch(module: str) -> None:
    chain = path_to_torch(module)
    assert not chain, " imports ".join(chain)


def test_importing_torch_free_modules_loads_no_torch() -> None:
    """The same seen from outside, so that third-party packages count as well."""
    code = (
        "import importlib, sys\n"
        f"for name in {TORCH_FREE!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, f'{name} loads torch'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def _needed(module: str) -> set[str]:
    """The modules it imports: of `from package import module` the module alone."""
    names = {name for name in imports_of(module) if name in MODULES and name != module}
    return {name for name in names if not any(other.startswith(name + ".") for other in names)}


def test_nothing_knows_what_follows_a_run() -> None:
    """The training loop, the executor and the step call extensions by their interface alone."""
    following, readers = ("megatron.pretrain.resilience", "helixpipe.adapt"), ("helixpipe.cli.command_watch",)
    offenders = [
        (module, name)
        for module in MODULES
        if not any(under(module, each) for each in (*following, *readers))
        for name in imports_of(module)
        if any(under(name, each) for each in following)
    ]
    assert offenders == []


DOORS = ("helixpipe.torch_pipelining", "helixpipe.megatron")
"""Modules beside the floors by which others' trainers come in, where machinery and catalogue meet; nobody imports
them."""


def test_doors_are_ends() -> None:
    assert {door for door in DOORS if door not in MODULES} == set()
    users = [module for module in MODULES for name in imports_of(module) if any(under(name, door) for door in DOORS)]
    assert users == []


def test_the_machinery_does_not_know_the_catalogue() -> None:
    """It is handed in, by `schedules.command` and `schedules.drop_in`, and by the doors to others' trainers."""
    offenders = [
        (module, name)
        for module in MODULES
        if under(module, "helixpipe") and module not in DOORS
        for name in imports_of(module)
        if under(name, "schedules")
    ]
    assert not offenders


@pytest.mark.parametrize("package", ["helixpipe", "schedules"])
def test_machinery_and_catalogue_do_not_know_the_training_program(package: str) -> None:
    above = ("megatron.pretrain", "pretrain_gpt", "tools", "tests", "examples", "benchmarks", "netlab")
    offenders = [
        (module, name)
        for module in MODULES
        if under(module, package)
        for name in imports_of(module)
        if any(under(name, user) for user in above)
    ]
    assert not offenders


VALUES_OF_OTHER_FLAGS = {"none": ("helixpipe", "megatron.pretrain"), "infinipipe": ("helixpipe.cli.documents",)}
"""Words that are also values of other flags than `--pipeline-schedule`, and where."""


def literals(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every string that is not a docstring."""
    tree = ast.parse(source)
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.lineno, node.value


def test_literals_are_found_wherever_they_stand() -> None:
    source = '"""1f1b"""\ndef f(x="zbv"):\n    """helix"""\n    return {"sppo": Literal["hanayo"], 1: x == "gpipe"}\n'
    assert sorted(literals(source)) == [(2, "zbv"), (4, "gpipe"), (4, "hanayo"), (4, "sppo")]


def test_schedules_are_named_in_the_catalogue_alone() -> None:
    """What others need to know of a schedule, its entry of the catalogue declares."""
    offenders = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for module, path in MODULES.items()
        if not under(module, "schedules")
        for line, text in literals(path.read_text(encoding="utf-8"))
        if text in CATALOGUE and not any(under(module, user) for user in VALUES_OF_OTHER_FLAGS.get(text, ()))
    ]
    assert offenders == []


def test_megatron_is_shared_with_the_wheel() -> None:
    """`megatron.pretrain` is ours, `megatron.core` the wheel's: an __init__.py in megatron/ would hide one of them."""
    assert not (ROOT / "megatron" / "__init__.py").exists()
    pretrain, core = importlib.util.find_spec("megatron.pretrain"), importlib.util.find_spec("megatron.core")
    assert pretrain is not None and pretrain.origin == str(ROOT / "megatron" / "pretrain" / "__init__.py")
    assert core is not None and core.origin is not None and ROOT / "megatron" not in Path(core.origin).parents


def test_files_can_be_read_in_one_sitting() -> None:
    folders = [*PACKAGES, "tools", "tests", "benchmarks", "netlab", "examples"]
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


@cache
def definitions() -> list[tuple[str, str, int]]:
    """Of every class and function: module, name, and lines, 0 for a class."""
    found = []
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.append((module, node.name, (node.end_lineno or 0) - node.lineno + 1))
            elif isinstance(node, ast.ClassDef):
                found.append((module, node.name, 0))
    return found


def test_functions_can_be_read_at_once() -> None:
    limits = {module: MAX_FUNCTION_LINES.get([*module.split("."), ""][1], 80) for module in MODULES}
    too_long = {f"{module}.{name}": lines for module, name, lines in definitions() if lines > limits[module]}
    assert too_long == {}


def test_a_class_name_stands_for_one_class() -> None:
    """Also where one of two is private: a reader meets both in searches and in tracebacks."""
    places = defaultdict(list)
    for module, name, lines in definitions():
        if not lines:
            places[name.lstrip("_")].append(module)
    assert len(places) > 100
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}
