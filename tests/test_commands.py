"""The documents' commands that launch no ranks are run as printed, page by page in an empty folder, or are listed here
with the reason why not, and parsed; so are the flags of make's targets. tests/integration/test_documented_commands.py
has all others."""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
from pathlib import Path

import pytest

from benchmarks.run import BENCHMARKS
from helixpipe.cli import command_improve, side_by_side
from helixpipe.cli.parser import parsed, parsers
from helixpipe.common.flags import FlagParser, add_dataclass_arguments
from helixpipe.planning.search.explore import Search
from schedules import CATALOGUE
from schedules import command as cli
from tests.pages import LAUNCHED, PAGES, ROOT, commands_of, first_lines_of_others, kind
from tests.selection import graded

LONG = {
    "plan": (Search, "run", "a search of up to minutes"),
    "improve": (command_improve, "improve", "a search of a minute"),
    "compare": (side_by_side, "_row", "all schedules for a large model take a minute"),
}
"""Subcommands that are run until they call this function, and why no further."""

PARSED = {
    "profile": "measures this machine, for minutes",
    "playground": "serves until it is ended; tests/playground tries it",
}
"""Subcommands whose flags are parsed, and why they are not run."""

NOT_HERE = {
    "eager-1f1b": "the schedule that the page's reader writes",
    "--efficiency-from h100.json": "measured on a GPU that is not here",
    "--measured timeline.json": "recorded in training; tests/cli/test_draw.py draws one",
    "--lengths commoncrawl": "a minute of planning; tests/cli/test_documents.py has shorter ones",
    "--lengths github": "a minute of planning; tests/cli/test_documents.py has shorter ones",
    "--pipe-sp-splits auto": "tries many numbers of chunks, for minutes",
    "-k 64": "a million tokens take a minute",
    "watch RUN_DIR": "the folder of a run that is there",
    "--certify": "linear programs of minutes; tests/certify has them",
}
"""Parts of commands that are not run, and why."""

NO_COMMANDS = ("saving checkpoint", "pp: {", "host 0 ", "iteration 28:", "corrupt bits", "helixpipe: the world size")
"""What blocks begin with that look like commands and are what programs print, or files."""

WITH_COMMANDS = [page for page in PAGES if any(kind(command) != LAUNCHED for command in commands_of(page))]


class Began(Exception):
    """The long part of a command has begun: its flags are complete and fit each other."""


def begin(*arguments: object, **named: object) -> None:
    raise Began


def core(page: Path) -> bool:
    return page.parent.name == "learn"


@pytest.mark.parametrize("page", graded(WITH_COMMANDS, core), ids=lambda page: page.name)
def test_commands_run_as_printed(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copyfile(ROOT / "tests" / "pins" / "profile.json", tmp_path / "profile.json")  # as `profile` writes
    parser, subcommands = parsers(CATALOGUE)
    for command in commands_of(page):
        rest = command.words[1:]
        if kind(command) == "make":
            made(rest)
        elif kind(command) == "planning":
            if rest[0] in PARSED or any(part in command.line for part in NOT_HERE):
                parsed(parser, subcommands, CATALOGUE, rest)
            elif rest[0] in LONG:
                owner, name, _ = LONG[rest[0]]
                with monkeypatch.context() as patched, pytest.raises(Began):
                    patched.setattr(owner, name, begin)
                    print(command.line, cli.main(rest), capsys.readouterr().err)
            else:
                assert cli.main(rest) == 0, (command.line, capsys.readouterr().err)


def made(words: list[str]) -> None:
    """The targets are there, and of a benchmark the flags in ARGS, by its own parser."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    variables = dict(word.split("=", 1) for word in words if "=" in word)
    for target in (word for word in words if "=" not in word):
        assert re.search(rf"^{target}:", text, re.MULTILINE) or target.startswith("bench-"), target
        name = {"bench": "engines", "reproduce": "reproduce"}.get(target, target.removeprefix("bench-"))
        if target.startswith("bench-") or name in BENCHMARKS:
            options = FlagParser()
            add_dataclass_arguments(options, importlib.import_module(BENCHMARKS[name].module).Options)
            flags = shlex.split(variables.get("ARGS", ""))
            if "--help" not in flags:
                options.parse(flags)


def test_what_looks_like_a_command_is_one_or_is_known() -> None:
    first = [line for page in PAGES for line in first_lines_of_others(page) if re.match(r"[a-z./]", line)]
    for line in first:
        assert line.startswith(NO_COMMANDS), f"no program is known that {line!r} begins with"
    for part in NO_COMMANDS:
        assert any(line.startswith(part) for line in first), part


def test_an_unknown_program_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Text\n\n    helixpipe list\n    helixpip list\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"no program is known that 'helixpip list'"):
        commands_of(page)
    page.write_text("```\nhelixpip list\n```\n\n    $ sudo make lint\n    printed\n", encoding="utf-8")
    assert [command.words for command in commands_of(page)] == [["make", "lint"]]
    assert first_lines_of_others(page) == ["helixpip list"]


def test_what_is_not_run_is_there() -> None:
    every = [command for page in PAGES for command in commands_of(page) if kind(command) == "planning"]
    assert len(every) >= 50
    for part in NOT_HERE:
        assert any(part in command.line for command in every if command.words[1] not in PARSED), part
    for name in PARSED:
        assert any(command.words[1] == name for command in every), name
