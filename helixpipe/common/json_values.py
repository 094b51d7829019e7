"""Parses JSON that may come from anyone: invalid or too deeply nested text is a ValueError."""

from __future__ import annotations

import json
from typing import Any

MOST_NESTED = 100
"""Lists and objects within each other; what takes a value apart may call itself for each."""


def parse_json(text: str | bytes, **hooks: Any) -> Any:
    """Parse a JSON text. hooks: those of `json.loads`. Raises ValueError, which says why, for what is not JSON or is
    nested more than `MOST_NESTED` deep.
    """
    try:
        value = json.loads(text, **hooks)
    except RecursionError:
        deep = True
    else:
        deep = _is_deep(value)
    if deep:
        raise ValueError(f"lists and objects are nested more than {MOST_NESTED} deep")
    return value


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MOST_NESTED + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return bool(level)
