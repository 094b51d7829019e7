"""Help of a parser with more flags than a screen has lines."""

from __future__ import annotations

import re

import pytest

from helixpipe.cli.parser import parsers
from helixpipe.common.errors import UserError
from helixpipe.common.flags import FlagParser
from megatron.pretrain.arguments import build_parser
from schedules import CATALOGUE

SCREEN = 40
NAMES = ("simulate", "memory", "draw", "plan", "improve", "compare", "export", "profile", "pretrain_gpt.py")


def parser(name: str) -> FlagParser:
    of_commands = parsers(CATALOGUE)[1]
    return build_parser() if name == "pretrain_gpt.py" else of_commands[name]


def shown(capsys: pytest.CaptureFixture[str], name: str, *words: str) -> str:
    with pytest.raises(SystemExit) as stop:
        parser(name).parse(words)
    assert stop.value.code == 0
    return capsys.readouterr().out


def flags_in(text: str) -> set[str]:
    """Return the flags that begin a line, with their other spellings."""
    lines = re.findall(r"^  (-.*?)(?:  .*)?$", text, re.MULTILINE)
    return {flag for line in lines for flag in re.findall(r"(?<![\w-])--?[\w-]+", line)}


@pytest.mark.parametrize("name", NAMES)
def test_help_is_a_screen(capsys: pytest.CaptureFixture[str], name: str) -> None:
    """A line a flag; what is missing is a flag away."""
    text = shown(capsys, name, "--help")
    lines = text.splitlines()
    assert len(lines) <= SCREEN and max(map(len, lines)) <= 110 and lines[0].startswith("usage: ")
    assert "--help GROUP shows all there is to say" in text and "--help-all shows all " in lines[-1]
    assert {"--seq-length", "--recompute-granularity"} & flags_in(text) and len(flags_in(text)) >= 12
    assert shown(capsys, name, "-h") == text
    assert flags_in(text) <= set(parser(name)._option_string_actions)


@pytest.mark.parametrize("name", NAMES)
def test_every_flag_has_its_text_somewhere(capsys: pytest.CaptureFixture[str], name: str) -> None:
    """With --help-all, and in the help of its group."""
    made = parser(name)
    every = set(made._option_string_actions)
    text = shown(capsys, name, "--help-all")
    assert flags_in(text) == every
    groups = [str(group.title) for group in made._action_groups[2:] if group._group_actions]
    of_groups = [flags_in(shown(capsys, name, "--help", title)) for title in groups]
    own = {flag for action in made._action_groups[1]._group_actions for flag in action.option_strings}
    assert set.union(*of_groups) | own == every
    assert all(0 < len(one) < len(every) for one in of_groups)
    for title in groups:
        assert title in " ".join(shown(capsys, name, "--help").split())


def test_a_group_by_part_of_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "simulate", "--help", "HELIX") == shown(capsys, "simulate", "--help", "options of helix")
    assert flags_in(shown(capsys, "simulate", "--help", "output")) == {"--json"}  # which another title has in it


def test_no_such_group() -> None:
    with pytest.raises(
        UserError,
        match=r"^--help 2f2b: there is no such group of flags; there are size, layers of pipeline stages, .*\.$",
    ):
        parser("simulate").parse(["--help", "2f2b"])
