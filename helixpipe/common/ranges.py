"""The values a flag may have, as data beside it. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from helixpipe.common.errors import UserError

MOST_LAYERS, MOST_RANKS, MOST_MICROBATCHES, MOST_CHUNKS = 100_000, 1_000_000, 100_000, 100_000
"""Sizes beyond which it is a slip of the hand, and planning would not end."""

MOST_STEPS = 10**9
"""Of a training run: 30 years of a step a second."""

MOST_SAMPLES = 10**13
"""Of a training run, and of anything that is counted in samples."""


@dataclass(frozen=True)
class Range:
    """Limits of a number; None where there is none. unit: named behind the limit (` GiB`)."""

    at_least: float | None = None
    more_than: float | None = None
    at_most: float | None = None
    less_than: float | None = None
    unit: str = ""

    def holds(self, value: float) -> bool:
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.more_than is None or value > self.more_than)
            and (self.at_most is None or value <= self.at_most)
            and (self.less_than is None or value < self.less_than)
        )

    def check(self, flag: str, value: Any) -> None:
        """Raise UserError, one sentence, for a number outside; of several all are looked at, and None fits."""
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if each is not None and not self.holds(each):
                raise UserError(f"{flag} {_shown(each)} must be {self._words(each)}{self.unit}.")

    def _words(self, value: float) -> str:
        """The limits; where both are far apart, the one that the value is beyond."""
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


def _shown(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"
