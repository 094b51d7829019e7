"""Finds when a series of times has changed for good: a cumulative sum over their logarithms, upwards and downwards.

The sum (Page, "Continuous inspection schemes", Biometrika 1954) adds up how far each value is beyond a level that is
known from the first values, less a slack, and starts again at 0 whenever it would be below. Here a value adds no more
than 2/5 of the threshold, so that three in a row are needed however large they are: a pause of a step or two is no
change. Slack and threshold grow with the spread of the values, so that noisier ones need longer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, log
from statistics import median

SKIPPED, FIRST, MOST = 1, 8, 25
"""Values that are not looked at; those from which the level is known first; those from which it is known at last."""

SLACK, THRESHOLD = log(1.15), 0.6
"""The smallest change that is ever found (15 %), and the sum at which it is."""

SLACK_SPREADS, THRESHOLD_SPREADS = 2.0, 8.0
"""The least slack and threshold in spreads (standard deviations)."""

FEW = 6.0
"""Of n values the spread is taken to be larger by this over n: that of few may be far too small."""

IN_A_ROW = 3
"""Values beyond the slack that a change ends with."""


@dataclass
class ChangePoint:
    """One series of positive values. skipped: first values that are not looked at.

    factor: the present level over the first one: above 1 is slower, if values are times.
    """

    skipped: int = SKIPPED
    factor: float = 1.0
    _quiet: list[float] = field(default_factory=list)
    _sums: list[float] = field(default_factory=lambda: [0.0, 0.0])
    _beyond: list[list[float]] = field(default_factory=lambda: [[], []])

    @property
    def known(self) -> bool:
        """Whether there have been values enough to know a level."""
        return len(self._quiet) >= FIRST

    @property
    def level(self) -> float:
        """The present level of the values."""
        return exp(median(self._quiet))

    @property
    def first_level(self) -> float:
        """What the values were like before any change."""
        return self.level / self.factor

    def add(self, value: float) -> bool:
        """Take in the next value. Returns whether the series has changed; `factor` then says to what."""
        if self.skipped > 0:
            self.skipped -= 1
            return False
        x = log(value)
        if not self.known:
            self._quiet.append(x)
            return False
        away = x - median(self._quiet)
        spread = self._spread()
        slack, threshold = max(SLACK, SLACK_SPREADS * spread), max(THRESHOLD, THRESHOLD_SPREADS * spread)
        for side, distance in enumerate((away, -away)):
            self._sums[side] = max(0.0, self._sums[side] + min(distance - slack, 0.4 * threshold))
            self._beyond[side] = [*self._beyond[side], x] if distance > slack else []
            if self._sums[side] > threshold and len(self._beyond[side]) >= IN_A_ROW:
                self._change(median(self._beyond[side]), slack)
                return True
        if len(self._quiet) < MOST and not any(self._sums):
            self._quiet.append(x)
        return False

    def restart(self) -> None:
        """Learn the level anew, at the same factor: the values are of other ops now."""
        self.skipped = SKIPPED
        self._quiet.clear()
        self._forget_sums()

    def _change(self, level: float, slack: float) -> None:
        first, spread = log(self.first_level), self._spread()
        if abs(level - first) < slack:
            level = first
        self.factor = exp(level - first)
        # As many values as were known of the level before, as spread out, since noise comes from elsewhere.
        spread /= 1.4826 * (1 + FEW / MOST)
        self._quiet = [level + spread * (place % 3 - 1) for place in range(MOST)]
        self._forget_sums()

    def _spread(self) -> float:
        """The standard deviation of the values about their level, from their median absolute deviation."""
        middle = median(self._quiet)
        own = 1.4826 * median(abs(each - middle) for each in self._quiet)
        return own * (1 + FEW / len(self._quiet))

    def _forget_sums(self) -> None:
        self._sums, self._beyond = [0.0, 0.0], [[], []]
