"""The values a flag may have stand beside it, as data, for every command and for training."""

from __future__ import annotations

import dataclasses

import pytest

from helixpipe.cli.parser import parsers
from helixpipe.common.errors import ScheduleError, UserError
from helixpipe.common.flags import FlagParser, add_dataclass_arguments, check_ranges, option, whole_number
from helixpipe.common.ranges import MOST_SAMPLES, Range
from helixpipe.planning.catalogue import Shape
from megatron.pretrain.arguments import build_parser
from schedules import CATALOGUE

COMMANDS = {**parsers(CATALOGUE)[1], "training": build_parser()}


@pytest.mark.parametrize("name", COMMANDS)
def test_no_whole_number_is_without_a_limit(name: str) -> None:
    parser = COMMANDS[name]
    for action in parser._actions:
        if action.type is whole_number and not action.choices and action.dest != "logging_level":
            limits = parser.ranges[action.dest]
            assert limits.at_most is not None and limits.at_most <= MOST_SAMPLES, action.option_strings


def test_options_of_schedules_have_limits_on_both_sides() -> None:
    """Also where no parser has looked at them: the drop-in, for example."""
    numbers = 0
    for name, schedule in CATALOGUE.items():
        for field in dataclasses.fields(schedule.options):
            if not str(field.type).startswith("int"):
                continue
            numbers += 1
            limits = field.metadata["range"]
            for value in (limits.at_least - 1, limits.at_most + 1):
                flag = f"--{field.name.replace('_', '-')}"
                with pytest.raises(ScheduleError, match=rf"^{flag} {value} must be at (least|most) \d+\.$"):
                    CATALOGUE.build(name, Shape(2, 4, 4), schedule.options(**{field.name: value}))
    assert numbers >= 10


@dataclasses.dataclass(frozen=True)
class Options:
    slices: str = option("auto", "Slices.", at_least=1, at_most=8, words=("auto",))
    share: str | None = option(None, "Share.", at_least=0, at_most=1, words=("auto", "off"), whole=False)
    count: int = option(1, "Count.")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--slices 0", "--slices 0 must be a whole number, at least 1, or auto."),
        ("--slices 9", "--slices 9 must be a whole number, at most 8, or auto."),
        ("--slices 2.5", "--slices 2.5 must be a whole number, at least 1, or auto."),
        ("--slices ٣", "--slices ٣ must be a whole number, at least 1, or auto."),
        ("--slices off", "--slices off must be a whole number, at least 1, or auto."),
        ("--share 1.01", "--share 1.01 must be a number, at least 0 and at most 1, or auto or off."),
        ("--share nan", "--share nan must be a number, at least 0 and at most 1, or auto or off."),
        ("--count 99999999999999", "--count 99999999999999 must be at most 10000000000000."),
    ],
)
def test_words_in_place_of_numbers(words: str, says: str) -> None:
    parser = FlagParser()
    add_dataclass_arguments(parser, Options)
    with pytest.raises(UserError) as caught:
        parser.parse(words.split())
    assert str(caught.value) == says


def test_what_is_in_the_range_is_taken() -> None:
    parser = FlagParser()
    add_dataclass_arguments(parser, Options)
    taken = parser.parse(["--slices", "8", "--share", "0.5"])
    assert (taken.slices, taken.share) == ("8", "0.5")
    for options in (Options("1", "0"), Options("auto", "off")):
        check_ranges(options)
    assert Range(less_than=3).bounded(9) == Range(less_than=3) and Range().bounded(9) == Range(at_most=9)
