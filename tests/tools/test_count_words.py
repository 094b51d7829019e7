"""The documents stay short enough to be read, and their words are counted as wc does."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tools.count_words import DOCS, LIMIT, count, prose_words, words

PAGE = """# A page

Four words of prose.

    helixpipe list

| cell | cell |
|---|---|

```python
code = 1
```

<!-- bench: rows -->
Written by a script.
<!-- end -->

1. Three more words

   ```
   code
   ```
"""


def test_the_documents_stay_short() -> None:
    total = sum(all_words for all_words, _ in count().values())
    assert total <= LIMIT, f"docs/ has {total} words: shorten a page (python tools/count_words.py lists them)"


def test_words_are_those_of_wc() -> None:
    pages = sorted(str(path) for path in DOCS.rglob("*.md"))
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    run = subprocess.run(["wc", "-w", *pages], capture_output=True, text=True, check=True, env=environment)
    lines = run.stdout.splitlines()
    counted = count()
    assert [int(line.split()[0]) for line in lines[:-1]] == [
        counted[str(Path(page).relative_to(DOCS))][0] for page in pages
    ]


def test_prose_is_without_code_tables_and_what_scripts_write(tmp_path: Path) -> None:
    assert prose_words(PAGE) == words("# A page Four words of prose. 1. Three more words")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "page.md").write_text(PAGE)
    (tmp_path / "short.md").write_text("one")
    assert list(count(tmp_path).items()) == [
        ("sub/page.md", (words(PAGE), prose_words(PAGE))),
        ("short.md", (1, 1)),
    ]
