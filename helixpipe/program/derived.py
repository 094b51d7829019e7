"""Values that keep what has been derived from them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

Derived = TypeVar("Derived")


class Derives:
    """A value that keeps what has been derived from it, so that nobody derives it twice. That is no part of the value,
    and is not sent to other processes."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "derived"}

    @cached_property
    def derived(self) -> dict[str, tuple[object, Any]]:
        """By name what is kept, after what it was derived with."""
        return {}

    def derive(self, name: str, using: object, make: Callable[[], Derived]) -> Derived:
        """Return what `make` gives, which is kept until it is asked for with another object than `using`.

        What is kept must not refer to this value: a cycle lives until Python's collector comes upon it, which costs
        about as much as a third of lowering.
        """
        kept = self.derived.get(name)
        if kept is None or kept[0] is not using:
            kept = self.derived[name] = using, make()
        value: Derived = kept[1]
        return value
