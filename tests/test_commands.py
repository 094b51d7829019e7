"""Every command in the documents is run as printed, page by page in an empty folder, or is listed here with the reason
why it is not; its flags are then parsed, or its target or file is there."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from helixpipe.cli.parser import parsed, parsers
from schedules import CATALOGUE, command
from tests.pages import PAGES, ROOT, commands_of
from tests.selection import graded

PARSED = {
    "plan": "a search of up to minutes",
    "improve": "a search of a minute",
    "compare": "all schedules for a large model take a minute",
    "profile": "measures this machine, for minutes",
    "playground": "serves until it is ended; tests/playground tries it",
}
"""Subcommands whose flags are parsed, and why they are not run."""

LAUNCHED = {
    "train": "tests/integration/test_documented_commands.py trains",
    "dry-run": "starts ranks; tests/integration/test_dry_runs.py",
}
"""Subcommands whose flags are the training program's; those of README are tried in tests/test_readme.py."""

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

WITH_COMMANDS = [page for page in PAGES if commands_of(page)]


def core(page: Path) -> bool:
    return page.parent.name == "learn"


@pytest.mark.parametrize("page", graded(WITH_COMMANDS, core), ids=lambda page: page.name)
def test_commands_run_as_printed(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copyfile(ROOT / "tests" / "pins" / "profile.json", tmp_path / "profile.json")  # as `profile` writes
    parser, subcommands = parsers(CATALOGUE)
    for words in commands_of(page):
        program, *rest = words
        if program == "make":
            text = (ROOT / "Makefile").read_text(encoding="utf-8")
            targets = [word for word in rest if "=" not in word]
            assert all(re.search(rf"^{each}:|^bench-%:", text, re.MULTILINE) for each in targets), words
        elif program == "python" and rest[0] not in ("-m", "-c"):
            assert (ROOT / rest[0]).is_file(), words
        elif program == "helixpipe" and rest[0] not in LAUNCHED:
            if rest[0] in PARSED or any(part in " ".join(rest) for part in NOT_HERE):
                parsed(parser, subcommands, CATALOGUE, rest)
            else:
                assert command.main(rest) == 0, (words, capsys.readouterr().err)


def test_what_is_not_run_is_there() -> None:
    every = [" ".join(words) for page in PAGES for words in commands_of(page)]
    assert len(every) >= 100
    for part in NOT_HERE:
        assert any(part in line for line in every), part
    for name in (*PARSED, *LAUNCHED):
        assert any(line.startswith(f"helixpipe {name}") for line in every), name
