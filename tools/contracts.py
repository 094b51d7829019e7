"""Binds the calls that only a GPU's machine makes against the signatures of the libraries they are made to.

    make contracts                            downloads them into a temporary folder, and writes docs/contracts.md
    make contracts ARGS="--downloaded DIR"    takes what an earlier run has kept there (`--keep DIR`)

Sources are read and never run: flash-attn's, Transformer Engine's, and those in torch's build for CUDA, whose own ops
are in native_functions.yaml and whose compiled classes are in .pyi files. What is bound stands in contracts.toml.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from helixpipe.common.child import python_command

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tools" / "contracts.toml"
PAGE = ROOT / "docs" / "contracts.md"
FOLDERS = ("helixpipe", "megatron", "schedules")
NATIVE = "torchgen/packaged/ATen/native/native_functions.yaml"
INSTALLED = "installed"


class Unbound(Exception):
    """A call that does not fit, or whose definition is not there; says why."""


# ---------------------------------------------------------------------------------------------------------- sources


class Archive:
    """The files of a wheel or of a source distribution. version: as in its name."""

    def __init__(self, path: Path):
        self.path = path
        self.version = path.name.removesuffix(".tar.gz").split("-")[1]

    def read(self, path: str) -> str:
        """Return a file's text. Raises Unbound if there is none."""
        try:
            if self.path.suffix == ".whl":
                with zipfile.ZipFile(self.path) as wheel:
                    return wheel.read(path).decode()
            with tarfile.open(self.path) as source:
                top = source.getnames()[0].split("/")[0]
                member = source.extractfile(f"{top}/{path}")
                assert member is not None
                return member.read().decode()
        except KeyError:
            raise Unbound(f"{self.path.name} has no {path}") from None


class Installed:
    """The packages of this environment that are not compiled."""

    version = ""

    def read(self, path: str) -> str:
        return _source(path)


def _source(path: str) -> str:
    """Return a file of this project, or of an installed package."""
    own = ROOT / path
    return (own if own.exists() else Path(sysconfig.get_paths()["purelib"]) / path).read_text(encoding="utf-8")


Library = Archive | Installed


def download(package: Mapping[str, Any], folder: Path) -> Archive | None:
    """Download a package without what it depends on; None where the registry does not have it."""
    command = python_command("pip", "download", "--quiet", "--no-deps", "--no-build-isolation", "--no-cache-dir")
    command += ["--dest", str(folder), package["requirement"]]
    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.iterdir()):
        subprocess.run(command, env={**os.environ, **package.get("environment", {})}, check=False)
    files = sorted(folder.iterdir())
    return Archive(files[-1]) if files else None


# ------------------------------------------------------------------------------------------------------- signatures


def signature_of(library: Library, definition: str) -> inspect.Signature:
    """Return the signature of FILE:NAME, of a class that of its constructor, or of aten:NAME."""
    where, name = definition.split(":")
    if where == "aten":
        return _of_schema(library.read(NATIVE), name)
    found = _definition(_tree(library, where), name.split("."))
    if isinstance(found, ast.ClassDef):
        makers = [n for n in found.body if isinstance(n, ast.FunctionDef) and n.name in ("__init__", "__new__")]
        if not makers:
            raise Unbound(f"{definition} has no constructor")
        return _of_function(makers[0], method=True)
    if not isinstance(found, ast.FunctionDef):
        raise Unbound(f"{definition} is not there")
    return _of_function(found, method="." in name)


def fields_of(library: Library, definition: str) -> set[str]:
    """Return the annotated attributes of a class, FILE:NAME."""
    where, name = definition.split(":")
    found = _definition(_tree(library, where), name.split("."))
    if not isinstance(found, ast.ClassDef):
        raise Unbound(f"{definition} is not there")
    return {n.target.id for n in found.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}


@cache
def _tree(library: Library, path: str) -> ast.Module:
    return ast.parse(library.read(path))


def _definition(tree: ast.AST, names: Sequence[str]) -> ast.AST | None:
    """Return the last definition of a name, which stands after its overloads; also of one below an `if`."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    found = [node for node in _within(tree) if isinstance(node, kinds) and node.name == names[0]]
    if not found:
        return None
    return found[-1] if len(names) == 1 else _definition(found[-1], names[1:])


def _within(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements of a module or class, and of its branches."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            yield from _within(node)


def _of_function(function: ast.FunctionDef, method: bool) -> inspect.Signature:
    kind, own = inspect.Parameter, function.args
    positional = [*own.posonlyargs, *own.args]
    required = len(positional) - len(own.defaults)
    parameters = [
        kind(each.arg, kind.POSITIONAL_OR_KEYWORD, default=kind.empty if number < required else None)
        for number, each in enumerate(positional)
    ][int(method) :]
    parameters += [kind(own.vararg.arg, kind.VAR_POSITIONAL)] if own.vararg else []
    parameters += [
        kind(each.arg, kind.KEYWORD_ONLY, default=kind.empty if default is None else None)
        for each, default in zip(own.kwonlyargs, own.kw_defaults, strict=True)
    ]
    parameters += [kind(own.kwarg.arg, kind.VAR_KEYWORD)] if own.kwarg else []
    return inspect.Signature(parameters)


def _of_schema(table: str, name: str) -> inspect.Signature:
    found = re.search(rf"^- func: {name}\((.*)\) -> ", table, re.MULTILINE)
    if found is None:
        raise Unbound(f"torch has no op {name}")
    parameters: list[inspect.Parameter] = []
    kind: Any = inspect.Parameter.POSITIONAL_OR_KEYWORD
    for part in re.split(r", (?![^\[]*\])", found.group(1)):
        if part == "*":
            kind = inspect.Parameter.KEYWORD_ONLY
            continue
        word, _, default = part.partition("=")
        empty = None if default else inspect.Parameter.empty
        parameters.append(inspect.Parameter(word.split()[-1], kind, default=empty))
    return inspect.Signature(parameters)


# ------------------------------------------------------------------------------------------------------------- calls


@dataclass(frozen=True)
class Call:
    """A call in a source. within: the functions and classes it is in, outermost first."""

    file: str
    within: str
    node: ast.Call

    @property
    def callee(self) -> str:
        return ast.unparse(self.node.func)

    def __str__(self) -> str:
        return f"{self.file}:{self.node.lineno} {self.callee}"

    def bind(self, signature: inspect.Signature, spread: Mapping[str, Any]) -> None:
        """Raise Unbound where the call does not fit. spread: see contracts.toml."""
        positional, named = 0, {}
        for argument in self.node.args:
            positional += self._spread(argument.value, spread) if isinstance(argument, ast.Starred) else 1
        for keyword in self.node.keywords:
            names = [keyword.arg] if keyword.arg else self._spread(keyword.value, spread)
            named.update(dict.fromkeys(names))
        try:
            signature.bind(*[None] * positional, **named)
        except TypeError as error:
            raise Unbound(str(error)) from None

    def _spread(self, value: ast.expr, spread: Mapping[str, Any]) -> Any:
        name = ast.unparse(value.func if isinstance(value, ast.Call) else value)
        if name not in spread:
            raise Unbound(f"what *{name} stands for is not in {TABLE.name}")
        return spread[name]


def calls_in(file: str) -> list[Call]:
    """Return all calls in a file of this project or of an installed package."""
    found: list[Call] = []

    def visit(node: ast.AST, within: tuple[str, ...]) -> None:
        if isinstance(node, ast.Call):
            found.append(Call(file, ".".join(within), node))
        inner = within
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            inner = (*within, node.name)
        for child in ast.iter_child_nodes(node):
            visit(child, inner)

    visit(ast.parse(_source(file)), ())
    return found


@cache
def own_calls() -> tuple[Call, ...]:
    """Return all calls of this project, without those of the fake device."""
    files = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
    return tuple(
        call for path in files if "fake_cuda" not in path.parts for call in calls_in(path.relative_to(ROOT).as_posix())
    )


def calls_of(row: Mapping[str, Any]) -> list[Call]:
    """Return the calls of a row of contracts.toml."""
    within = row.get("within", "")
    return [
        call
        for call in calls_in(row["file"])
        if call.callee == row["callee"] and f".{call.within}.".startswith(f".{within}.") | (not within)
    ]


# ------------------------------------------------------------------------------------------------------------ result


@dataclass
class Result:
    """Of one package. bound: calls that fit, by definition; wrong: sentences on those that do not; absent: functions of
    torch.cuda that no module defines, which are compiled."""

    what: str
    version: str
    bound: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    absent: set[str] = field(default_factory=set)

    def check(self, call: Call, library: Library, definition: str, spread: Mapping[str, Any]) -> None:
        try:
            call.bind(signature_of(library, definition), spread)
        except Unbound as error:
            self.wrong.append(f"{call}: {error}.")
        else:
            self.bound[definition] = self.bound.get(definition, 0) + 1


def check(table: Mapping[str, Any], libraries: Mapping[str, Library | None]) -> dict[str, Result]:
    """Bind everything in the table. libraries: by the package's name there; None for one that could not be had."""
    results = {
        name: Result(
            table["packages"].get(name, {"what": "megatron-core"})["what"], "" if library is None else library.version
        )
        for name, library in libraries.items()
    }
    for row in table["calls"]:
        library, result = libraries[row["package"]], results[row["package"]]
        calls = calls_of(row)
        if not calls:
            result.wrong.append(f"{row['file']} has no call of {row['callee']}.")
        for call in calls:
            if library is None:
                continue
            result.check(call, library, row["definition"], row.get("spread", {}))
    for row in table["fields"]:
        library = libraries[row["package"]]
        if library is not None:
            missing = sorted(set(row["names"]) - fields_of(library, row["definition"]))
            results[row["package"]].wrong += [f"{row['definition']} has no {name} ({row['what']})." for name in missing]
            results[row["package"]].bound[row["definition"]] = len(row["names"]) - len(missing)
    for row in table["prefixes"]:
        library = libraries[row["package"]]
        if library is not None:
            check_prefix(row, library, results[row["package"]])
    return results


def check_prefix(row: Mapping[str, Any], library: Library, result: Result) -> None:
    """Bind all calls that are written PREFIX.NAME."""
    trees = {module: _tree(library, module) for module in row["modules"]}
    for call in own_calls():
        prefix, _, name = call.callee.rpartition(".")
        if prefix != row["prefix"] or any(isinstance(each, ast.Starred) for each in call.node.args):
            continue
        module = next((module for module, tree in trees.items() if _definition(tree, [name])), None)
        if module is None:
            result.absent.add(f"{prefix}.{name}")
        else:
            result.check(call, library, f"{module}:{name}", {})


def page(results: Mapping[str, Result]) -> str:
    """Return docs/contracts.md."""
    lines = [
        "# Calls that only a GPU's machine makes",
        "",
        "`make contracts` downloads the libraries below, without running them, and binds every call that this project,",
        "or megatron-core on its behalf, makes to them against their signatures: number and names of arguments, and",
        "fields that are set. Which calls these are stands in `tools/contracts.toml`. It writes this page. What",
        'arguments mean, shapes and numbers are for tests on a GPU (`make pytest ARGS="-m gpu"`).',
        "",
        "| library | version | definitions | calls bound | do not fit |",
        "|---|---|--:|--:|--:|",
    ]
    for name, result in results.items():
        had = result.version or ("this environment's" if name == INSTALLED else "not to be had")
        bound = sum(result.bound.values())
        lines.append(f"| {result.what} | {had} | {len(result.bound)} | {bound} | {len(result.wrong)} |")
    lines += ["", "apex is not in package registries: the project of this name there is another one."]
    wrong = [each for result in results.values() for each in result.wrong]
    lines += ["", "## What does not fit", "", *(f"- {each}" for each in wrong)] if wrong else []
    absent = sorted(name for result in results.values() for name in result.absent)
    if absent:
        lines += ["", f"Compiled or made at import, so not bound: {', '.join(f'`{name}`' for name in absent)}."]
    return "\n".join(lines) + "\n"


def read_table() -> dict[str, Any]:
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--downloaded", "--keep", type=Path, metavar="DIR", help="Keep downloads there, and take those."
    )
    options = parser.parse_args(arguments)
    table = read_table()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.downloaded or Path(temporary)
        libraries: dict[str, Library | None] = {
            name: download(package, folder / name) for name, package in table["packages"].items()
        }
        results = check(table, {**libraries, INSTALLED: Installed()})
        PAGE.write_text(page(results), encoding="utf-8")
    for name, result in results.items():
        print(f"{name} {result.version}: {sum(result.bound.values())} calls bound, {len(result.wrong)} do not fit")
        print("\n".join(result.wrong), end="\n" * bool(result.wrong))
    return int(any(result.wrong for result in results.values()) or not all(libraries.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
