"""Count the words of the documents in docs/, page by page.

    python tools/count_words.py

All words are counted as `wc -w` does; prose is what is left without blocks of code, rows of tables, and what scripts
write between a page's marks. What the site adds from parsers and docstrings is in no file of docs/, and not counted.
"""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
LIMIT = 40_000
"""All words of docs/ together may be so many: a reader's time is finite."""

FENCED = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
WRITTEN = re.compile(r"^<!-- (?!end).*?^<!-- end.*?-->$", re.MULTILINE | re.DOTALL)
TABLE_OR_CODE = re.compile(r"^(\||    ).*$", re.MULTILINE)


def words(text: str) -> int:
    """Return all words of a text."""
    return len(text.split())


def prose_words(text: str) -> int:
    """Return the words of a page's prose."""
    for left_out in (FENCED, WRITTEN, TABLE_OR_CODE):
        text = left_out.sub("", text)
    return words(text)


def count(folder: Path = DOCS) -> dict[str, tuple[int, int]]:
    """Return for each page its words, and those of its prose; the longest page first."""
    counted = {}
    for path in folder.rglob("*.md"):
        text = path.read_text(encoding="utf-8")
        counted[str(path.relative_to(folder))] = words(text), prose_words(text)
    return dict(sorted(counted.items(), key=lambda page: (-page[1][0], page[0])))


def main() -> None:
    pages = count()
    for name, (all_words, prose) in pages.items():
        print(f"{all_words:7} {prose:7}  {name}")
    total, prose = (sum(page[i] for page in pages.values()) for i in (0, 1))
    print(f"{total:7} {prose:7}  all pages; the limit is {LIMIT:,} (first column: all words; second: prose alone)")


if __name__ == "__main__":
    main()
