"""The documents as they stand: links lead somewhere, nothing stands twice, and every sentence is whole."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(([^()\s]+)\)")
PLACE = re.compile(r"`((?:helixpipe|schedules|megatron|tests|tools|benchmarks|netlab|docs|examples)/[\w./-]*)`")
ABSENT = {"schedules/eager_one_f_one_b.py", "tests/schedules/test_eager_one_f_one_b.py", "megatron/__init__.py"}
"""Those that a reader is to write, and that must not be."""
RUN = 14
"""Words: prose that has as many twice in a row was pasted."""


@cache
def text_of(path: Path) -> str:
    """Without what stands in fences."""
    return re.sub(r"^( *)```.*?^\1```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    found: Counter[str] = Counter()
    names = set()
    for heading in re.findall(r"^#+ (.+)$", text_of(path), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        names.add(f"{slug}-{found[slug]}" if found[slug] else slug)
        found[slug] += 1
    return names


def paragraphs(path: Path) -> Iterator[tuple[str, bool]]:
    """Prose: what is no table, heading, code, quote or comment; each item of a list is one. And whether it may stop in
    the middle: what is no prose goes on with the sentence."""
    own: list[str] = []
    lines = text_of(path).splitlines()
    for number, line in enumerate([*lines, ""]):
        begins = re.match(r" *([-*]|1\.) ", line) or (re.match(r" *\d+\. ", line) and not own)
        skipped = not line.strip() or re.match(r" *(\||#|<|>)", line) or (line.startswith("    ") and not own)
        if own and (begins or skipped):
            after = next((each for each in lines[number:] if each.strip()), "# the end")
            yield " ".join(own), re.match(r"    | *([-*]|\d+\.|\||>) ", after) is not None
            own = []
        if not skipped:
            own.append(line.strip())


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target in LINK.findall(text_of(path)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        there = (path.parent / name).resolve() if name else path
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_stands_twice(path: Path) -> None:
    seen: dict[tuple[str, ...], int] = {}
    for number, (paragraph, _) in enumerate(paragraphs(path)):
        words = paragraph.split()
        for run in zip(*(words[first:] for first in range(RUN)), strict=False):
            assert seen.setdefault(run, number) == number, " ".join(run)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_sentences_are_whole(path: Path) -> None:
    """What two sides of a merge have left is mostly the half of one."""
    assert not re.search(r"^(<{7}|={7}|>{7})", text_of(path), re.MULTILINE)
    for paragraph, goes_on in paragraphs(path):
        words = re.sub(r"`[^`]*`", "x", paragraph)
        assert words.count("(") == words.count(")"), paragraph
        assert goes_on or re.match(r"[-*] ", words) or re.search(r"[.:!?)]\**$", words), paragraph


@pytest.mark.parametrize(
    "path", [path for path in DOCUMENTS if path.name != "CHANGELOG.md"], ids=lambda path: path.name
)
def test_files_that_are_named_are_there(path: Path) -> None:
    for name in PLACE.findall(text_of(path)):
        assert (ROOT / name).exists() != (name in ABSENT), name
