"""The help of a parser with more flags than a screen has lines: `--help` shows the most used ones, `--help GROUP` those
of a group, `--help-all` all.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Callable, Collection, Sequence
from typing import Any

from helixpipe.common.errors import UserError

WIDTH, COLUMN = 110, 42
"""Characters of a line, and where the texts of flags begin."""


class HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=40, width=WIDTH)


def add_help(parser: argparse.ArgumentParser, common: Collection[str]) -> None:
    """Add --help and --help-all to a parser made without. common: names of the fields whose flags --help shows."""
    parser.add_argument(
        "-h",
        "--help",
        action=_Help,
        nargs="?",
        metavar="GROUP",
        default=argparse.SUPPRESS,
        help="Show the most used flags, or those of a group, and exit.",
        text=lambda group: _short(parser, common) if group is None else _of_group(parser, group),
    )
    parser.add_argument(
        "--help-all",
        action=_Help,
        nargs=0,
        default=argparse.SUPPRESS,
        help="Show all flags and exit.",
        text=lambda _: parser.format_help(),
    )


class _Help(argparse.Action):
    """Print what `text` gives for the value, and exit."""

    def __init__(self, *args: Any, text: Callable[[Any], str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._text = text

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: Any = None) -> None:
        parser.usage = parser.usage or _usage(parser)
        sys.stdout.write(self._text(values))
        parser.exit()


def _usage(parser: argparse.ArgumentParser) -> str:
    """Return `helixpipe draw SCHEDULE|FILE [SCHEDULE|FILE ...] [flags]`: the flags' names would fill a screen."""
    counts: dict[int | str | None, str] = {"*": "[{0} ...]", "+": "{0} [{0} ...]", "?": "[{0}]", None: "{0}"}
    words = [counts[action.nargs].format(action.metavar) for action in parser._get_positional_actions()]
    return " ".join([parser.prog, *words, "[flags]"])


def _short(parser: argparse.ArgumentParser, common: Collection[str]) -> str:
    """Return a line for each flag of these fields, in the order in which they are named, and how to see the others."""
    by_field: dict[str, argparse.Action] = {}
    for action in parser._actions:
        by_field.setdefault(action.dest, action)
    shown = [*parser._get_positional_actions(), *(by_field[name] for name in common)]
    number = sum(bool(action.option_strings) for action in parser._actions)
    groups = f"--help GROUP shows all there is to say of a group of flags: {', '.join(_titles(parser))}."
    about = textwrap.fill(parser.description or "", WIDTH)
    lines = [f"usage: {parser.usage}", "", about, "", *map(_line, shown), "", textwrap.fill(groups, WIDTH)]
    return "\n".join([*lines, f"--help-all shows all {number} flags.", ""])


def _line(action: argparse.Action) -> str:
    """Return a flag, its value and the beginning of its text."""
    spellings = sorted(action.option_strings, key=len)
    short = [each for each in spellings if not each.startswith("--")]
    long = [each for each in action.option_strings if each.startswith("--")][:1]
    name = ", ".join([*short, *long])
    value = "" if action.nargs == 0 else f"{{{','.join(action.choices)}}}" if action.choices else action.metavar
    words = f"  {name} {value or ''}".rstrip() if name else f"  {action.metavar}"
    start = words.ljust(COLUMN - 1)
    text = textwrap.shorten((action.help or "").replace("%%", "%"), WIDTH - len(start) - 1, placeholder=" …")
    return f"{start} {text}"


def _of_group(parser: argparse.ArgumentParser, name: str) -> str:
    """Return the flags of the groups whose title contains the name, or is it. Raises UserError if there is none."""
    titles = _titles(parser)
    asked = [title for title in titles if title.lower() == name.lower()]
    asked = asked or [title for title in titles if name.lower() in title.lower()]
    if not asked:
        raise UserError(f"--help {name}: there is no such group of flags; there are {', '.join(titles)}.")
    groups = [group for group in parser._action_groups if group.title in asked]
    shown = {id(action) for group in groups for action in group._group_actions}
    return _rendered(parser, lambda action: id(action) in shown, "--help-all shows the flags of all groups.")


def _titles(parser: argparse.ArgumentParser) -> list[str]:
    """Return the titles of the groups that have flags, without argparse's own."""
    return [str(group.title) for group in parser._action_groups[2:] if group._group_actions]


def _rendered(parser: argparse.ArgumentParser, shown: Callable[[argparse.Action], bool], more: str) -> str:
    """Return the help of these flags alone. more: its end."""
    formatter = parser._get_formatter()
    formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups)
    formatter.add_text(parser.description)
    for group in parser._action_groups:
        actions: Sequence[argparse.Action] = [action for action in group._group_actions if shown(action)]
        if actions:
            formatter.start_section(group.title)
            formatter.add_arguments(actions)
            formatter.end_section()
    return f"{formatter.format_help()}\n{more}\n"
