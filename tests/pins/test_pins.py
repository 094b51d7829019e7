"""Schedules keep their figures: what `simulate` and `memory` print is what figures.json recorded (see record.py)."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.pins.record import Result, commands, load, printed, result
from tests.selection import first_of_each, graded

RELATIVE = 1e-9
ABSOLUTE = 2e-9
"""The command rounds to the ninth decimal, and a sum in another order may round the other way."""

ALL = load()


def flags_of(case: dict[str, Any]) -> set[tuple[str, str]]:
    """The command and each flag it gives, for its schedule: what `make test` has a case of at least."""
    command = case["command"]
    name = " ".join(command[1:2])  # `list` has none
    return {(name, word) for word in command if word.startswith("-") or word == command[0]}


CORE = [" ".join(case["command"]) for case in first_of_each(ALL, flags_of)]


def differences(recorded: Any, now: Any, name: str = "") -> list[str]:
    """A line for each number, text or key that differs, with its place, such as `busy[2]`."""
    if isinstance(recorded, dict) and isinstance(now, dict):
        keys = [*recorded, *(key for key in now if key not in recorded)]
        return [
            line
            for key in keys
            for line in differences(recorded.get(key), now.get(key), f"{name}.{key}" if name else key)
        ]
    if isinstance(recorded, list) and isinstance(now, list) and len(recorded) == len(now):
        return [
            line
            for at, (old, new) in enumerate(zip(recorded, now, strict=True))
            for line in differences(old, new, f"{name}[{at}]")
        ]
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (recorded, now))
    same = math.isclose(recorded, now, rel_tol=RELATIVE, abs_tol=ABSOLUTE) if numbers else recorded == now
    return [] if same else [f"{name}: recorded {recorded}, now {now}"]


@pytest.mark.parametrize(
    "case",
    graded(ALL, lambda case: " ".join(case["command"]) in CORE),
    ids=[" ".join(case["command"]) for case in ALL],
)
def test_figures_are_those_recorded(case: dict[str, Any]) -> None:
    recorded: Result = case["result"]
    differing = differences(recorded, result(case["command"]))
    assert not differing, "\n".join([f"helixpipe {' '.join(case['command'])}", *differing])


def test_every_case_is_recorded_once() -> None:
    """Otherwise: python -m tests.pins.record."""
    assert [case["command"] for case in ALL] == commands()
    assert len({tuple(command) for command in commands()}) == len(ALL)


def test_every_schedule_and_each_of_its_options_has_a_case() -> None:
    given = {(command[1], word.replace("--no-", "--")) for command in commands() for word in command[1:]}
    cut = {name for name, word in given if word in ("-k", "--pipe-sp-splits", "--chunk-lengths")}
    for schedule in printed(["list"]):
        name, options = schedule["name"], schedule["options"]
        assert (name, name) in given, f"no case of {name}"
        missing = [option for option in options if (name, option) not in given and not (option == "-k" and name in cut)]
        assert not missing, f"no case of {name} with {', '.join(missing)}"


@pytest.mark.parametrize(
    ("recorded", "now", "places"),
    [
        ({"a": 1.0}, {"a": 1.0 + 1e-8}, ["a"]),
        ({"a": 1.0}, {"a": 1 + 1e-10}, []),
        ({"a": [1, 2, 3]}, {"a": [1, 0, 3]}, ["a[1]"]),
        ({"a": [1]}, {"a": [1, 1]}, ["a"]),
        ({"a": [{"b": True}]}, {"a": [{"b": 1.5}]}, ["a[0].b"]),
        ({"a": 1}, {}, ["a"]),
        ({}, {"order": "x"}, ["order"]),
    ],
)
def test_differences_name_their_place(recorded: Result, now: Result, places: list[str]) -> None:
    assert [line.split(":")[0] for line in differences(recorded, now)] == places
