"""Tells what pytest was asked to run, for fixtures that launch many cases at once: `-k chimera` launches no others; and
what of a grid of cases `make test` leaves to `make test-all`."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from typing import Any

import pytest


def selected(request: pytest.FixtureRequest, parameter: str, every: Sequence[Any]) -> list[Any]:
    """Return those of `every` that selected tests with the requested fixture have as the value of a parameter; all of
    them where such a test has no such parameter, so looks at all."""
    wanted: set[Any] = set()
    for item in request.session.items:
        if isinstance(item, pytest.Function) and request.fixturename in item.fixturenames:
            values = item.callspec.params if hasattr(item, "callspec") else {}
            if item.module is request.module:
                wanted |= {values[parameter]} if parameter in values else set(every)
    return [each for each in every if each in wanted]


def graded(every: Sequence[Any], core: Container[Any] | Callable[[Any], bool]) -> list[Any]:
    """The values of a parameter, those that are not of the core marked `thorough`. core: what `make test` runs."""
    kept = core if callable(core) else core.__contains__
    return [each if kept(each) else pytest.param(each, marks=pytest.mark.thorough) for each in every]


def first_of_each(every: Sequence[Any], kinds: Callable[[Any], Iterable[Hashable]]) -> list[Any]:
    """The values in order without those of whose kinds all have been seen before: each kind is there once at least."""
    seen: set[Hashable] = set()
    chosen = []
    for each in every:
        new = set(kinds(each)) - seen
        seen |= new
        chosen += [each] if new else []
    return chosen
