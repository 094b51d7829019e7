"""Ranges that stand beside flags, and flags named as they were typed."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from helixpipe.common.errors import UserError
from helixpipe.common.flags import (
    FlagParser,
    add_dataclass_arguments,
    check_ranges,
    dataclass_from_namespace,
    option,
)
from helixpipe.common.ranges import Range


@dataclass(frozen=True)
class Options:
    layers: int | None = option(None, "Layers.", flags=("--layers", "-L"), at_least=1, at_most=100)
    share: float = option(0.5, "Share.", at_least=0, at_most=1)
    beta: float = option(0.9, "Beta.", at_least=0, less_than=1)
    memory: float | None = option(None, "Memory.", more_than=0, unit=" GiB")
    ranks: tuple[int, ...] = option((0,), "Ranks.", at_least=0)
    name: str | None = option(None, "Name.")
    names: tuple[str, ...] = option(("x",), "Names.")
    optional: str = option("", "May be empty.")


def parse(words: str) -> Options:
    parser = FlagParser(prog="test")
    add_dataclass_arguments(parser, Options)
    return dataclass_from_namespace(Options, parser.parse(words.split()))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--layers 0", "--layers 0 must be at least 1."),
        ("-L 0", "-L 0 must be at least 1."),
        ("-L0", "-L 0 must be at least 1."),
        ("--layers=-1", "--layers -1 must be at least 1."),
        ("-L 101", "-L 101 must be at most 100."),
        ("-L x", "-L: 'x' is not a whole number."),
        ("--layers x", "--layers: 'x' is not a whole number."),
        ("--share 1.5", "--share 1.5 must be at least 0 and at most 1."),
        ("--beta 1", "--beta 1 must be at least 0 and less than 1."),
        ("--beta -0.1", "--beta -0.1 must be at least 0 and less than 1."),
        ("--memory 0", "--memory 0 must be more than 0 GiB."),
        ("--ranks 0 -2", "--ranks -2 must be at least 0."),
        ("--name=", "--name is empty; give it a value or leave it out."),
        ("--names=", "--names is empty; give it a value or leave it out."),
        ("--optional= -L 0", "-L 0 must be at least 1."),
    ],
)
def test_a_value_out_of_range(words: str, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(words)
    assert str(caught.value) == sentence


def test_values_at_the_limits() -> None:
    for words in ("-L 1", "-L 100", "--share 0", "--share 1", "--beta 0", "--memory 0.1", "--ranks 0 1", ""):
        check_ranges(parse(words))


def test_options_from_elsewhere_than_a_command_line() -> None:
    with pytest.raises(UserError, match=r"^--beta 2 must be at least 0 and less than 1\.$"):
        check_ranges(Options(beta=2))


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("words", [(), ("auto",), ("auto", "off")])
@pytest.mark.parametrize(
    "limits", [{}, {"at_least": 1}, {"at_most": 0.5}, {"at_least": 1, "at_most": 9}, {"more_than": 0, "less_than": 1}]
)
@pytest.mark.parametrize("text", ["", "x", "nan"])
def test_a_sentence_ends_where_its_choices_do(
    text: str, limits: dict[str, float], words: tuple[str, ...], whole: bool
) -> None:
    """Whatever a range says, and does not."""
    with pytest.raises(UserError) as caught:
        Range(**limits, unit=" GiB", words=words, whole=whole).check("--size", text)
    limit = r"(at least|at most|more than|less than) [0-9.]+"
    valid = rf"a (whole )?number(, {limit}( and {limit})? GiB)?(, or auto( or off)?)?"
    said = str(caught.value)
    assert re.fullmatch(rf"--size {re.escape(text or repr(text))} must be {valid}\.", said)
    assert (" GiB" in said) == bool(limits) and ("auto" in said) == bool(words)
