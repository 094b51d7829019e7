"""The commands that stand in the documents, as they stand there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = ("helixpipe", "make", "python", "torchrun", "pip", "bash", "mkdir", "sbatch", "export")
OTHER_LANGUAGES = ("python", "diff", "toml", "json")
LAUNCHED = "launched"
VARIABLE = re.compile(r"[A-Z_]+=\S*$")


class Command(NamedTuple):
    """words: without what stands before the program: `sudo`, variables. line: as it stands."""

    page: str
    words: list[str]
    line: str


def blocks_of(page: Path) -> Iterator[list[str]]:
    """Blocks of code that are no other language's, fenced, or indented up to an empty line; a line goes on where it
    ends with a backslash."""
    text = page.read_text(encoding="utf-8")
    fenced = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    yield from (
        body.replace("\\\n", " ").splitlines() for name, body in fenced.findall(text) if name not in OTHER_LANGUAGES
    )
    indented = re.compile(r"(?:^ {4}.*\n)+", re.MULTILINE)
    for block in indented.findall(fenced.sub("", text) + "\n"):
        lines = [line[4:] for line in block.splitlines()]
        margin = min(len(line) - len(line.lstrip()) for line in lines)  # of a block in a list
        yield (
            "\n".join(line[margin if lines[0][:1] == " " else 0 :] for line in lines).replace("\\\n", " ").splitlines()
        )


def command_in(line: str, page: str = "") -> Command | None:
    """The command of a line; None where it begins with no program that is known."""
    try:
        words = shlex.split(line.removeprefix("$ "), comments=True)
    except ValueError:  # a quotation mark of prose
        return None
    while words and (words[0] == "sudo" or VARIABLE.match(words[0])):
        del words[0]
    return Command(page, words, line.removeprefix("$ ")) if words and is_program(words[0]) else None


def is_program(word: str) -> bool:
    return (
        word in PROGRAMS or word.startswith(".venv/bin/") or (word.endswith((".sh", ".py")) and (ROOT / word).is_file())
    )


def commands_of(page: Path) -> list[Command]:
    """The commands of a page's blocks, in order: a block is one of commands where its first line is; where lines begin
    with `$ `, these are. Raises ValueError for a line among commands that is none."""
    commands = []
    for lines in blocks_of(page):
        shown = [line for line in lines if line.startswith("$ ")]
        if shown or command_in(lines[0]) is not None:
            for line in shown or [line for line in lines if line.strip() and not line.startswith("#")]:
                command = command_in(line, page.name)
                if command is None:
                    raise ValueError(f"{page.name}: no program is known that {line!r} begins with")
                commands.append(command)
    return commands


def first_lines_of_others(page: Path) -> list[str]:
    """The first lines of the blocks that are not of commands."""
    blocks = [lines for lines in blocks_of(page) if lines and not any(line.startswith("$ ") for line in lines)]
    return [lines[0] for lines in blocks if command_in(lines[0]) is None]


def kind(command: Command) -> str:
    """Who answers for a command: tests/test_commands.py for those of `planning` and `make`,
    tests/integration/test_documented_commands.py for all others, which are launched."""
    if command.words[0] == "helixpipe" and command.words[1] not in ("train", "dry-run"):
        return "planning"
    return "make" if command.words[0] == "make" else LAUNCHED
