"""The values a flag may have, as data beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from helixpipe.common.errors import UserError

MOST_LAYERS, MOST_RANKS, MOST_MICROBATCHES, MOST_CHUNKS = 100_000, 1_000_000, 100_000, 100_000
"""Sizes beyond which it is a slip of the hand, and planning would not end."""

MOST_TOKENS = 10**9
"""The most tokens of a sequence, and of anything counted in them; also the most entries of a vocabulary."""

MOST_WIDTH = 10**7
"""The largest size of hidden states, and the most heads or channels."""

MOST_EXPERTS = 4096
"""The most experts of a layer."""

MOST_STEPS = 10**9
"""The most steps of a training run: 30 years of a step a second."""

MOST_SAMPLES = 10**13
"""The most samples of a training run, and of anything counted in samples; no flag takes a greater whole number."""

MOST_GIB = 10**6
"""The most memory, a petabyte."""


@dataclass(frozen=True)
class Range:
    """Limits of a number; None where there is none. unit: named behind the limit (` GiB`). words: for a flag that takes
    text, what it may say in place of a number, which is whole where `whole`."""

    at_least: float | None = None
    more_than: float | None = None
    at_most: float | None = None
    less_than: float | None = None
    unit: str = ""
    words: tuple[str, ...] = ()
    whole: bool = True

    def holds(self, value: float) -> bool:
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.more_than is None or value > self.more_than)
            and (self.at_most is None or value <= self.at_most)
            and (self.less_than is None or value < self.less_than)
        )

    def bounded(self, most: float) -> Range:
        """Return the range with an upper limit, if it has none."""
        return self if self.at_most is not None or self.less_than is not None else replace(self, at_most=most)

    def check(self, flag: str, value: Any, error: type[UserError] = UserError) -> None:
        """Raise the error, one sentence, for a number outside; of several all are looked at, and None fits."""
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, str):
                self._check_text(flag, each, error)
            elif each is not None and not self.holds(each):
                raise error(f"{flag} {_shown(each)} must be {self._words(each)}{self.unit}.")

    def _check_text(self, flag: str, text: str, error: type[UserError]) -> None:
        if text in self.words:
            return
        number = _number(text, self.whole)
        if number is None or not self.holds(number):
            what = "a whole number" if self.whole else "a number"
            limits = self._words(-math.inf if number is None else number)
            words = f"or {' or '.join(self.words)}" if self.words else ""
            valid = ", ".join(part for part in (what, f"{limits}{self.unit}" if limits else "", words) if part)
            raise error(f"{flag} {text or repr(text)} must be {valid}.")

    def _words(self, value: float) -> str:
        """Return the limits; if both are far apart, only the one that the value exceeds."""
        low: list[str] = []
        high: list[str] = []
        for words, limit, into in (
            ("at least", self.at_least, low),
            ("more than", self.more_than, low),
            ("at most", self.at_most, high),
            ("less than", self.less_than, high),
        ):
            if limit is not None:
                into.append(f"{words} {_shown(limit)}")
        if low and high and max(self.at_most or 0, self.less_than or 0) > 1:
            above = Range(self.at_least, self.more_than).holds(value)
            return (high if above else low)[0]
        return " and ".join([*low, *high])


def _number(text: str, whole: bool) -> float | None:
    """Return the number in a text; None if it is not one."""
    try:
        number = int(text) if whole else float(text)
    except ValueError:
        return None
    return number if text.isascii() and math.isfinite(number) else None


def _shown(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"
