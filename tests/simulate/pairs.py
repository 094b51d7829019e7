"""Programs in pairs, for tests of what is said of them on paper."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from helixpipe.program.program import Program


def in_pairs(program: Program) -> Program:
    """Each forward right before another unit's backward runs beside it."""
    following = (each for ops in program.ranks for each in pairwise(ops))
    pairs = (first for first, then in following if (first.kind, then.kind) == ("F", "B") and first.unit != then.unit)
    made = replace(program, pairs=frozenset(pairs))
    assert made.pairs
    return made
