"""A dictionary for results that are asked for again and again, in a run whose questions never end."""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")

MOST = 1 << 16
"""Entries: steps of documents ask for lengths that no step before had."""

FEW = 1 << 10
"""The same of large ones, such as a chunk's times of all pieces."""


class BoundedDict(dict[Key, Value]):
    """Forgets all it has when an entry more would be more than `most`; where it is sent to another process as well."""

    def __init__(self, most: int = MOST):
        super().__init__()
        self._most = most

    def __reduce__(self) -> tuple[type[BoundedDict[Key, Value]], tuple[int]]:
        return type(self), (self._most,)

    def __setitem__(self, key: Key, value: Value) -> None:
        if len(self) >= self._most:
            self.clear()
        super().__setitem__(key, value)
