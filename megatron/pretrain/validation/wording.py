"""Helpers for sentences about wrong flags."""

from __future__ import annotations


def nearest(value: int, unit: int) -> str:
    """The two multiples of `unit` around `value`, without 0."""
    below = value // unit * unit
    return f"{below} and {below + unit}" if below else str(unit)


def listing(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def alternatives(values: list[int]) -> str:
    words = list(map(str, values))
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def checked(value: int | None) -> int:
    """A size that an earlier step has made sure of."""
    if value is None:
        raise ValueError("validation steps ran out of order")
    return value
