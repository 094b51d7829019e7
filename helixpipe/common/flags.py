"""Command-line flags from dataclass fields, shared by the `helixpipe` command and the training program.

    @dataclass(frozen=True)
    class Options:
        virtual_stages: int = option(2, "Stages a rank.")

    parser = FlagParser(prog="helixpipe")
    add_dataclass_arguments(parser, Options)
    options = dataclass_from_namespace(Options, parser.parse(["--virtual-stages", "4"]))

A field `some_name` becomes `--some-name`. Its metadata may hold:
help (required), flags (option strings instead of the one derived from the name), choices, nargs, const, metavar, range,
heading (in --help, instead of the dataclass's), cli (False: no flag).
Types: bool, int, float, str, Literal[...], each also optional (`X | None`), and list/tuple of them (several values).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import re
import shlex
import sys
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from helixpipe.common.errors import UserError
from helixpipe.common.help import HelpFormatter, add_help
from helixpipe.common.ranges import MOST_SAMPLES, Range

T = TypeVar("T")


def option(
    default: Any,
    help: str,
    *,
    flags: Sequence[str] = (),
    choices: Sequence[Any] = (),
    nargs: str | int | None = None,
    const: str | None = None,
    metavar: str | None = None,
    heading: str | None = None,
    at_least: float | None = None,
    more_than: float | None = None,
    at_most: float | None = None,
    less_than: float | None = None,
    unit: str = "",
    words: Sequence[str] = (),
    whole: bool = True,
) -> Any:
    """Return a dataclass field with the text of its flag; see the module's docstring for the other arguments.

    at_least, more_than, at_most, less_than, unit: the range of its value (`ranges.Range`), or of each of its values.
    const: with nargs "?", the value of the flag alone.
    words: of text, what may stand in place of a number, a whole one unless not `whole`.

    `flags` given for a bool whose default is True name the switches that set it to False (`--disable-bias-linear`).
    """
    metadata: dict[str, Any] = {
        "help": help,
        "flags": tuple(flags),
        "choices": tuple(choices),
        "nargs": nargs,
        "const": const,
        "metavar": metavar,
        "heading": heading,
    }
    limits = Range(at_least, more_than, at_most, less_than, unit, tuple(words), whole)
    if limits != Range(unit=unit):
        metadata["range"] = limits
    return dataclasses.field(default=default, metadata=metadata)


def setting(default: Any, help: str) -> Any:
    """Return a dataclass field that is derived, not given on the command line: it appears in dumps but has no flag."""
    return dataclasses.field(default=default, metadata={"help": help, "cli": False})


class FlagParser(argparse.ArgumentParser):
    """An argument parser that knows no abbreviations and raises UserError instead of printing usage and exiting.

    common: the fields whose flags --help shows, of a parser that has too many for one screen (see `help`).
    """

    def __init__(self, *args: Any, common: Sequence[str] = (), **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", HelpFormatter)
        if common:
            kwargs["add_help"] = False
        super().__init__(*args, **kwargs)
        if common:
            add_help(self, common)
        self.ranges: dict[str, Range] = {}
        """The ranges of fields' values, by field name."""
        self._given: Sequence[str] = ()
        self._negative_number_matcher = _NEGATIVE  # argparse's own takes -1e-8 for a flag

    def error(self, message: str) -> NoReturn:
        raise UserError(self._as_typed(_one_sentence(message)))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise argparse.ArgumentError, which names the nearest of the words that may be chosen, for any other."""
        if action.choices is None or value in action.choices:
            return
        choices = list(map(str, action.choices))
        near = nearest_name(value, choices) if isinstance(value, str) else None
        hint = f", did you mean {near}?" if near else ";"
        raise argparse.ArgumentError(action, f"invalid choice: {value!r}{hint} choose from {', '.join(choices)}")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse as argparse does, and check ranges. Raises UserError, also for an empty text, as of a variable that was
        never set. Only a flag that is empty by default may be empty.
        """
        self._given = sys.argv[1:] if args is None else list(args)
        parsed, rest = super().parse_known_args(args, namespace)
        flags = self.given(self._given)
        for action in self._actions:
            value = getattr(parsed, action.dest, None)
            if action.default != "" and "" in (value if isinstance(value, list) else (value,)):
                name = flags.get(action.dest, action.metavar or action.dest)
                raise UserError(f"{name} is empty; give it a value{'' if action.required else ' or leave it out'}.")
        for name, limits in self.ranges.items():
            limits.check(flags.get(name, "--" + name.replace("_", "-")), getattr(parsed, name, None))
        return parsed, rest

    def _print_message(self, message: str, file: Any = None) -> None:
        """Write --help and --version. Raises OSError if they cannot be written, which argparse does not report."""
        if message:
            (file or sys.stderr).write(message)

    def _as_typed(self, message: str) -> str:
        """Return argparse's message, which names all spellings of a flag (`-L/--layers`), with only the given one."""
        for action in self._actions:
            spellings = "/".join(action.option_strings)
            if len(action.option_strings) > 1 and message.startswith(spellings):
                given = self.given(self._given).get(action.dest, action.option_strings[0])
                return given + message.removeprefix(spellings)
        return message

    def parse(self, argv: Sequence[str] | None = None, *, also_known: Iterable[str] = ()) -> argparse.Namespace:
        """Parse `argv` (default: the process's). Raises UserError that names the nearest known flag for an unknown one.

        also_known: flags handled elsewhere, suggested like the parser's own.
        """
        namespace, unknown = self.parse_known_args(argv)
        if unknown:
            raise UserError(unknown_argument(unknown[0], [*self.option_strings(), *also_known]))
        return namespace

    def given(self, argv: Iterable[str]) -> dict[str, str]:
        """Field -> flag as it is written, of each flag of this parser in `argv`, whatever its value."""
        actions = self._option_string_actions
        flags = []
        for word in argv:
            flag = word.partition("=")[0] if word.startswith("--") or word in actions else word[:2]
            if flag.startswith("-") and flag in actions:
                flags.append(flag)
        return {actions[flag].dest: flag for flag in flags}

    def respelled(self, message: str, others: Mapping[str, str]) -> str:
        """Return a message with each flag in it as it was typed.

        Args:
            message: A sentence on the arguments parsed last.
            others: Flags of other programs, to the fields that say the same here.

        Returns:
            The message; a flag that was not typed is spelled as this parser spells it.
        """
        given = self.given(self._given)

        def spelled(found: re.Match[str]) -> str:
            flag = found[0]
            own = self._option_string_actions.get(flag)
            fields = [own.dest] if own is not None else others.get(flag, "").split()
            typed = [given[field] for field in fields if field in given]
            known = [action.option_strings[0] for action in self._actions if own is None and action.dest in fields]
            return (typed or known or [flag])[0]

        return _FLAG.sub(spelled, message)

    def positionals(self) -> list[argparse.Action]:
        """Return the arguments that are no flags."""
        return self._get_positional_actions()

    def option_strings(self) -> list[str]:
        """Return every `--flag` this parser takes, in the order they were added."""
        return [string for string in self._option_string_actions if string.startswith("--")]


def unknown_argument(argument: str, known: Iterable[str]) -> str:
    """Return the sentence for an argument that no flag takes; names the nearest known flag when there is one."""
    if not argument.startswith("-"):
        return f"unexpected argument {argument!r}: every value must follow its --flag."
    name = argument.split("=")[0]
    spelled = name.replace("_", "-")
    known = list(known)
    near = nearest_name(spelled, known, cutoff=0.6)  # of flags nearly all begin alike
    lists = "--help-all" if "--help-all" in known else "--help"
    hint = f"; did you mean {near}?" if near else f"; {lists} lists the flags."
    return f"unknown flag {name}{hint}"


def nearest_name(name: str, known: Iterable[str], cutoff: float = 0.4) -> str | None:
    """Return the known name that begins with `name`, else the one closest in spelling; None when none is as close as
    `cutoff` (0 to 1: difflib's ratio). Capital letters count as small ones."""
    import difflib  # for mistakes alone

    by_spelling, spelled = {other.lower(): other for other in known}, name.lower()
    longer = [other for other in by_spelling if spelled and other.startswith(spelled)]
    matches = difflib.get_close_matches(spelled, longer or by_spelling, n=1, cutoff=0.0 if longer else cutoff)
    return by_spelling[matches[0]] if matches else None


def add_dataclass_arguments(parser: argparse.ArgumentParser, cls: type, *, title: str | None = None) -> None:
    """Add a flag for every field of dataclass `cls`, under the heading `title`.

    A flag the parser already has is left alone: classes (the options of two schedules, say) may share a field, and then
    must agree on its default. Raises TypeError, a programmer's error, for a field without help, of an unsupported type,
    or that disagrees.
    """
    hints = _hints(cls)
    for field in dataclasses.fields(cls):
        if not field.metadata.get("cli", True):
            continue
        if not field.metadata.get("help"):
            raise TypeError(f"{cls.__name__}.{field.name} has no help text")
        flags, arguments = _argument(cls, field, hints[field.name])
        existing = [parser._option_string_actions[flag] for flag in flags if flag in parser._option_string_actions]
        if existing:
            if any(a.dest != field.name or a.default != arguments["default"] for a in existing):
                raise TypeError(f"{cls.__name__}.{field.name} disagrees with an earlier definition of {flags[0]}")
            continue
        _heading(parser, field.metadata.get("heading") or title).add_argument(*flags, dest=field.name, **arguments)
        whole = arguments.get("type") is whole_number
        if isinstance(parser, FlagParser) and ("range" in field.metadata or whole):
            limits = field.metadata.get("range", Range())
            parser.ranges[field.name] = limits.bounded(MOST_SAMPLES) if whole else limits


def _heading(parser: argparse.ArgumentParser, title: str | None) -> Any:
    """Return the group of flags with that title, created at its first flag; without a title, the parser."""
    if title is None:
        return parser
    there = [group for group in parser._action_groups if group.title == title]
    return there[0] if there else parser.add_argument_group(title)


def dataclass_from_namespace(cls: type[T], namespace: argparse.Namespace | Mapping[str, Any]) -> T:
    """Build dataclass `cls` from parsed flags; fields that the namespace does not have keep their defaults."""
    values = namespace if isinstance(namespace, Mapping) else vars(namespace)
    hints = _hints(typing.cast(type, cls))
    arguments = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]  # any dataclass; TypeVar cannot say so
        if field.name in values:
            value = values[field.name]
            container = typing.get_origin(_required(hints[field.name]))
            arguments[field.name] = container(value) if container in (tuple, list) and value is not None else value
    return cls(**arguments)


def check_ranges(options: Any, error: type[UserError] = UserError) -> None:
    """Raise the error, one sentence, for the first field of a dataclass of options whose value is out of its range.

    For options that no parser made: a parser has looked at its own, and names flags as they were typed.
    """
    for field in dataclasses.fields(options):
        if "range" in field.metadata:
            flag = next(iter(field.metadata.get("flags") or ()), "--" + field.name.replace("_", "-"))
            field.metadata["range"].check(flag, getattr(options, field.name), error)


def words_of(options: Any) -> list[str]:
    """Return the words of a command line that set the fields of a dataclass of options which are not at their defaults.

    Each item is a flag with its value or values, quoted for a shell where that is needed.
    """
    words = []
    for field in dataclasses.fields(options):
        value, default = getattr(options, field.name), _default(field)
        if value == default or not field.metadata.get("cli", True):
            continue
        flag = next(iter(field.metadata.get("flags") or ()), "--" + field.name.replace("_", "-"))
        if isinstance(value, bool):
            words.append(flag if value or field.metadata.get("flags") else flag.replace("--", "--no-", 1))
        else:
            values = value if isinstance(value, (list, tuple)) else (value,)
            words.append(" ".join([flag, *(shlex.quote(str(each)) for each in values)]))
    return words


def fits(cls: type, name: str, value: Any) -> bool:
    """Whether a value that no parser made is of the type of this field of dataclass `cls`."""
    return value is None or _fits(_required(_hints(cls)[name]), value)


def _fits(kind: Any, value: Any) -> bool:
    arguments, outer = typing.get_args(kind), typing.get_origin(kind)
    if outer is typing.Literal:
        return isinstance(value, str | int) and value in arguments
    if outer in (tuple, list):
        return isinstance(value, (tuple, list)) and all(_fits(arguments[0], each) for each in value)
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """Return the types of the fields, which are compiled from text: most of the time of a parser."""
    return typing.get_type_hints(cls)


def _argument(cls: type, field: dataclasses.Field[Any], hint: Any) -> tuple[list[str], dict[str, Any]]:
    """Option strings and keyword arguments of `add_argument` for one field."""
    metadata = field.metadata
    default = _default(field)
    flags = list(metadata.get("flags") or ["--" + field.name.replace("_", "-")])
    arguments: dict[str, Any] = {"default": default, "help": _help(metadata["help"], default)}
    kind = _required(hint)
    if kind is bool:
        arguments["help"] = _help(metadata["help"], None)
        if metadata.get("flags"):
            arguments["action"] = "store_false" if default is True else "store_true"
        elif field.name.startswith(("no_", "disable_")):
            arguments["action"] = "store_true"
        else:
            arguments["action"] = argparse.BooleanOptionalAction
            arguments["help"] = _help(metadata["help"], "on" if default else None)
        return flags, arguments
    if metadata.get("metavar"):
        arguments["metavar"] = metadata["metavar"]
    if typing.get_origin(kind) in (tuple, list):
        arguments["nargs"] = metadata.get("nargs") or "+"
        kind = typing.get_args(kind)[0]
    elif metadata.get("nargs"):
        arguments["nargs"] = metadata["nargs"]
        if metadata.get("const") is not None:
            arguments["const"] = metadata["const"]
    choices = tuple(metadata.get("choices") or ())
    if typing.get_origin(kind) is typing.Literal:
        choices = typing.get_args(kind)
        kind = type(choices[0])
    if kind not in (int, float, str):
        raise TypeError(f"{cls.__name__}.{field.name}: no flag can be made for type {hint!r}")
    arguments["type"] = _CONVERTERS[kind]
    if choices:
        arguments["choices"] = choices
    elif not metadata.get("metavar"):
        arguments["metavar"] = {int: "N", float: "X", str: "TEXT"}[kind]
    return flags, arguments


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else None


def _required(hint: Any) -> Any:
    """Return `X` for `X | None`, any other type unchanged."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        if len(options) == 1:
            return options[0]
    return hint


def _help(text: str, default: Any) -> str:
    text = text.replace("%", "%%")
    if default is None or default == () or default == "" or "default" in text.lower():
        return text
    shown = " ".join(map(str, default)) if isinstance(default, (list, tuple)) else default
    return f"{text} (default: {shown})"


def whole_number(text: str) -> int:
    """Return the integer that a flag's text gives."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _float(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return number


_CONVERTERS: Mapping[type, Any] = types.MappingProxyType({int: whole_number, float: _float, str: str})


_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z](?![\w-])")
_NEGATIVE = re.compile(r"-\.?\d[\d.]*([eE][-+]?\d+)?$")


def _one_sentence(message: str) -> str:
    """Return argparse's message as a sentence: `argument --lr: 'x' is not a number` -> `--lr: 'x' is not a number.`"""
    message = re.sub(r"^argument (?=-)", "", message).strip()
    return message if message.endswith((".", "?")) else message + "."
