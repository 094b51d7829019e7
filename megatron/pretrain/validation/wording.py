"""Helpers for sentences about wrong flags."""

from __future__ import annotations


def nearest(value: int, unit: int) -> str:
    """Return the two multiples of `unit` around `value`, without 0."""
    below = value // unit * unit
    return f"{below} and {below + unit}" if below else str(unit)


def listing(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def alternatives(values: list[int]) -> str:
    words = list(map(str, values))
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def checked(value: int | None) -> int:
    """Return a size that an earlier validation step has filled in."""
    if value is None:
        raise ValueError("validation steps ran out of order")
    return value
