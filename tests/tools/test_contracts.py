"""Calls are bound against signatures that are read and not run: `tools/contracts.py`."""

from __future__ import annotations

import ast
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tools import contracts
from tools.contracts import Archive, Call, Installed, Unbound, calls_of, check, check_prefix, fields_of, signature_of

LIBRARY = """
if True:
    def attend(query, key, *, scale=None, window=(-1, -1)): ...

class Options:
    width: int
    def __init__(self, high: bool = False): ...
"""
NATIVE = "- func: op(Tensor q, int[2] sizes=[0,0], *, float? scale=None) -> (Tensor, Tensor)\n  dispatch: {}\n"


@pytest.fixture
def library(tmp_path: Path) -> Archive:
    path = tmp_path / "library-1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("library.py", LIBRARY)
        wheel.writestr(contracts.NATIVE, NATIVE)
    return Archive(path)


def call(text: str) -> Call:
    node = ast.parse(text).body[0]
    assert isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    return Call("file.py", "", node.value)


SPREAD: dict[str, Any] = {"rows": 2, "window": ["window"], "wrong": ["windows"]}


@pytest.mark.parametrize(
    ("text", "definition", "why"),
    [
        ("attend(q, k)", "library.py:attend", ""),
        ("attend(*rows, **window)", "library.py:attend", ""),
        ("attend(q, k, scale=1, window=2)", "library.py:attend", ""),
        ("attend(q)", "library.py:attend", "missing a required argument: 'key'"),
        ("attend(q, k, 1)", "library.py:attend", "too many positional arguments"),
        ("attend(q, k, scales=1)", "library.py:attend", "unexpected keyword argument 'scales'"),
        ("attend(*rows, **wrong)", "library.py:attend", "unexpected keyword argument 'windows'"),
        ("attend(*others)", "library.py:attend", "what *others stands for"),
        ("attend(q)", "library.py:attended", "is not there"),
        ("attend(q)", "other.py:attend", "has no other.py"),
        ("Options(high=True)", "library.py:Options", ""),
        ("Options(True, False)", "library.py:Options", "too many positional arguments"),
        ("op(q, s, scale=1)", "aten:op", ""),
        ("op(q)", "aten:op", ""),
        ("op(q, s, 1)", "aten:op", "too many positional arguments"),
        ("op(q)", "aten:o", "no op o"),
    ],
)
def test_a_call_is_bound_or_told(library: Archive, text: str, definition: str, why: str) -> None:
    try:
        call(text).bind(signature_of(library, definition), SPREAD)
    except Unbound as error:
        assert why and why in str(error)
    else:
        assert not why


def test_what_does_not_fit_is_counted_and_named(library: Archive) -> None:
    assert fields_of(library, "library.py:Options") == {"width"} and library.version == "1.2"
    row = {"package": "it", "file": "helixpipe/model/norms.py", "callee": "load_engine().TENorm"}
    table = {
        "packages": {"it": {"what": "a library"}},
        "calls": [{**row, "definition": "library.py:attend"}, {**row, "callee": "absent", "definition": ""}],
        "fields": [{"package": "it", "what": "it", "names": ["width", "height"], "definition": "library.py:Options"}],
        "prefixes": [],
    }
    result = check(table, {"it": library})["it"]
    assert [each.split(": ")[-1] for each in result.wrong] == [
        "got an unexpected keyword argument 'eps'.",
        "helixpipe/model/norms.py has no call of absent.",
        "library.py:Options has no height (it).",
    ]
    assert "| a library | 1.2 | 1 | 1 | 3 |" in contracts.page({"it": result})


def test_every_call_of_the_table_is_there() -> None:
    """And fits, where it is to a package that is installed."""
    table = contracts.read_table()
    assert all(calls_of(row) for row in table["calls"])
    libraries = {**dict.fromkeys(table["packages"]), contracts.INSTALLED: Installed()}
    results = check(table, libraries)
    assert not any(result.wrong for result in results.values())
    assert sum(results[contracts.INSTALLED].bound.values()) == 2


def test_calls_of_torch_fit_the_torch_that_is_installed() -> None:
    """By the same rows as those of its build for CUDA: of functions in Python."""
    table = contracts.read_table()
    result = contracts.Result("torch", "")
    for row in table["prefixes"]:
        check_prefix(row, Installed(), result)
    assert not result.wrong
    assert result.bound["torch/cuda/streams.py:Event"] >= 3 and len(result.bound) > 40
