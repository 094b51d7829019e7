"""Flags made from dataclasses: types, defaults, and messages about wrong ones."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from typing import Literal

import pytest

from helixpipe.common.errors import UserError
from helixpipe.common.flags import (
    FlagParser,
    add_dataclass_arguments,
    dataclass_from_namespace,
    nearest_name,
    option,
    setting,
)


@dataclass(frozen=True)
class Options:
    count: int = option(2, "A number.")
    rate: float | None = option(None, "A rate.")
    name: str = option("x", "A name.")
    mode: Literal["fast", "slow"] = option("fast", "A mode.")
    level: Literal[0, 1] = option(0, "A level of 100%.")
    eager: bool = option(True, "On unless switched off.")
    quiet: bool = option(False, "Off unless switched on.")
    add_bias: bool = option(True, "No bias.", flags=["--disable-bias"])
    lengths: tuple[int, ...] | None = option(None, "Several numbers.")
    words: list[str] = field(default_factory=list, metadata={"help": "Several words.", "nargs": "*"})
    derived: int = setting(7, "Not a flag.")


@dataclass(frozen=True)
class Shares:
    count: int = option(2, "The same flag.")


@dataclass(frozen=True)
class Disagrees:
    count: int = option(3, "The same flag with another default.")


@dataclass(frozen=True)
class Undocumented:
    count: int = 1


def parser() -> FlagParser:
    made = FlagParser(prog="test")
    add_dataclass_arguments(made, Options, title="options")
    return made


def parse(*words: str) -> Options:
    return dataclass_from_namespace(Options, parser().parse(words))


def test_defaults_are_the_dataclass_defaults() -> None:
    assert parse() == Options()


def test_given_names_the_flags_as_written_whatever_their_value() -> None:
    words = ["--count", "2", "--rate=1.5", "--no-eager", "--disable-bias", "--other"]
    assert parser().given(words) == {
        "count": "--count",
        "rate": "--rate",
        "eager": "--no-eager",
        "add_bias": "--disable-bias",
    }


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("1f1", "1f1b"), ("1F1B", "1f1b"), ("interl", "interleaved-1f1b"), ("gppie", "gpipe"), ("", None), ("xyz", None)],
)
def test_nearest_name(name: str, nearest: str | None) -> None:
    assert nearest_name(name, ["interleaved-1f1b", "1f1b", "gpipe"]) == nearest


def test_every_type_is_converted() -> None:
    given = (
        "--count 5 --rate 1e-3 --name y --mode slow --level 1 --no-eager --quiet --disable-bias "
        "--lengths 3 4 5 --words a b"
    )
    assert parse(*given.split()) == Options(
        count=5,
        rate=1e-3,
        name="y",
        mode="slow",
        level=1,
        eager=False,
        quiet=True,
        add_bias=False,
        lengths=(3, 4, 5),
        words=["a", "b"],
    )
    assert parse("--eager", "--no-quiet", "--count=9", "--words").count == 9


def test_classes_may_share_a_flag_but_not_disagree_about_it() -> None:
    made = parser()
    add_dataclass_arguments(made, Shares)
    assert dataclass_from_namespace(Shares, made.parse(["--count", "4"])) == Shares(count=4)
    with pytest.raises(TypeError, match="disagrees"):
        add_dataclass_arguments(made, Disagrees)


def test_a_field_without_help_is_refused() -> None:
    with pytest.raises(TypeError, match="no help text"):
        add_dataclass_arguments(FlagParser(), Undocumented)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--count", "two"], "--count: 'two' is not a whole number."),
        (["--rate", "fast"], "--rate: 'fast' is not a number."),
        (["--coutn", "2"], "unknown flag --coutn; did you mean --count?"),
        (["--no_eager"], "unknown flag --no_eager; did you mean --no-eager?"),
        (["--cou", "2"], "unknown flag --cou; did you mean --count?"),
        (["stray"], "unexpected argument 'stray': every value must follow its --flag."),
        (["--zzzzzzzz"], "unknown flag --zzzzzzzz; --help lists the flags."),
        (["--eager=yes"], "--eager: ignored explicit argument 'yes'."),
        (["--count"], "--count: expected one argument."),
    ],
)
def test_wrong_flags_give_one_sentence(words: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(*words)
    assert str(caught.value) == message


def test_a_wrong_choice_names_the_valid_ones() -> None:
    with pytest.raises(UserError, match=r"--mode: invalid choice: 'medium'.*fast.*slow"):
        parse("--mode", "medium")


def test_help_shows_text_and_default() -> None:
    shown = parser().format_help()
    assert "A number. (default: 2)" in shown
    assert "A level of 100%. (default: 0)" in shown
    assert "--no-eager" in shown


def test_neither_flags_nor_the_command_line_import_torch() -> None:
    program = (
        "import sys; from megatron.pretrain.arguments import build_parser, parse_args; build_parser().format_help(); "
        "parse_args('--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 "
        "--micro-batch-size 1 --train-iters 1 --lr 1 --mock-data --tokenizer-type ByteLevelTokenizer'.split()); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
