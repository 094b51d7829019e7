"""A slip of the finger in any flag, or in any value that is a word, is answered with the one that was meant."""

from __future__ import annotations

import argparse

import pytest

from helixpipe.cli.parser import parsers
from helixpipe.common.errors import UserError
from helixpipe.common.flags import FlagParser, unknown_argument
from megatron.pretrain.arguments import build_parser
from schedules import CATALOGUE

PARSERS = {**parsers(CATALOGUE)[1], "pretrain_gpt.py": build_parser()}


def slips(word: str) -> list[str]:
    """The word without a letter, with two exchanged, with one more: in its middle."""
    middle = len(word) // 2
    return [
        word[:middle] + word[middle + 1 :],
        word[: middle - 1] + word[middle] + word[middle - 1] + word[middle + 1 :],
        word[:middle] + "x" + word[middle:],
    ]


@pytest.mark.parametrize("name", PARSERS)
def test_mistyped_flags(name: str) -> None:
    """Where another flag is as near, that one may be named. Of many flags every eighth is tried."""
    known = PARSERS[name].option_strings()
    for flag in [flag for flag in known if "_" not in flag][:: 1 + len(known) // 70]:
        for slip in slips(flag):
            if slip in known or slip[:2] != "--":
                continue
            said = unknown_argument(slip, known)
            assert "did you mean" in said and near(said.split("did you mean ")[1], flag, slip), (slip, said)


def near(named: str, word: str, slip: str) -> bool:
    """Whether it is the word that was meant, or another that the same one slip makes of it, or one that it begins."""
    named = named.rstrip("?")
    return named == word or one_slip_apart(named.lower(), slip.lower()) or named.lower().startswith(slip.lower())


def one_slip_apart(one: str, other: str) -> bool:
    """Whether the words differ by one letter more, one less, another one or two exchanged."""
    start = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    a, b = one[start:], other[start:]
    return a[1:] == b or b[1:] == a or a[1:] == b[1:] or (a[1::-1] == b[:2] and a[2:] == b[2:])


@pytest.mark.parametrize("name", PARSERS)
def test_mistyped_values(name: str) -> None:
    actions = [action for action in PARSERS[name]._actions if action.choices is not None]
    for action in actions:
        words = [str(choice) for choice in action.choices or ()]
        for word in words:
            if len(word) < 4 or not isinstance(action.type("1") if callable(action.type) else "", str):
                continue
            for slip in slips(word):
                if slip not in words:
                    with pytest.raises(argparse.ArgumentError, match="did you mean ") as refused:
                        PARSERS[name]._check_value(action, slip)
                    named = str(refused.value).split("did you mean ")[1].split("?")[0]
                    assert near(named, word, slip), (action.dest, slip, named)


def test_the_sentence_names_the_flag_and_what_may_be_chosen() -> None:
    parser = FlagParser()
    parser.add_argument("--speed", choices=("fast", "slow"))
    with pytest.raises(
        UserError, match=r"^--speed: invalid choice: 'fats', did you mean fast\? choose from fast, slow\.$"
    ):
        parser.parse(["--speed", "fats"])
    with pytest.raises(UserError, match=r"^--speed: invalid choice: '17'; choose from fast, slow\.$"):
        parser.parse(["--speed", "17"])
