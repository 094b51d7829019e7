"""One reader for all files in JSON: what is nested too deeply is told like anything else that is wrong."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from helixpipe.common.json_values import MOST_NESTED, parse_json

ROOT = Path(__file__).resolve().parents[2]

OWN_WORDS = (
    *("helixpipe/watch/watchdog.py", "helixpipe/watch/stall.py", "helixpipe/adapt/reports.py"),
    *("helixpipe/profile/subject.py", "megatron/pretrain/process/groups.py"),
    *("netlab/hosts.py", "tools/links.py", "tools/preflight.py"),
)
"""What processes of one job tell each other."""

STANDING_ALONE = ("tools/check_certificate.py", "tools/check_program.py")
"""Programs that import nothing of helixpipe, on purpose."""


@pytest.mark.parametrize("shape", ["[{}]", '{{"a": {}}}'])
def test_as_deep_as_any_file_needs_and_no_deeper(shape: str) -> None:
    text = "1"
    for _ in range(MOST_NESTED):
        text = shape.format(text)
    assert str(parse_json(text)).count("1") == 1
    for deeper in (shape.format(text), "[" * 3000 + "]" * 3000, "[" * 100_000, '{"a":' * 100_000):
        with pytest.raises(ValueError, match="nested more than 100 deep"):
            parse_json(deeper)


def test_values_and_errors_are_those_of_json() -> None:
    assert parse_json(b'{"a": [1, "x"]}') == {"a": [1, "x"]}
    assert parse_json('{"a": 1}', object_pairs_hook=list) == [("a", 1)]
    with pytest.raises(ValueError, match="Expecting value: line 1 column 2"):
        parse_json("[")


def test_all_files_are_read_by_it() -> None:
    found = set()
    for folder in ("helixpipe", "schedules", "megatron", "tools", "benchmarks", "netlab"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in ("json.loads", "json.load"):
                    found.add(str(path.relative_to(ROOT)))
    assert found == {"helixpipe/common/json_values.py", *OWN_WORDS, *STANDING_ALONE}
