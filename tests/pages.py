"""The commands that stand in the documents, as they stand there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = ("helixpipe", "make", "python", "torchrun", "pip")


def commands_of(page: Path) -> list[list[str]]:
    """The words of each command in a page's blocks of code, indented or fenced, in order."""
    text = page.read_text(encoding="utf-8")
    fenced = re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    indented = [
        line[4:] for line in re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S).splitlines() if line[:4] == "    "
    ]
    joined = "\n".join([*fenced, *indented]).replace("\\\n", " ").splitlines()
    commands = []
    for line in joined:
        if line.split(" ", 1)[0] in PROGRAMS:
            commands.append(shlex.split(line, comments=True))
    return commands
