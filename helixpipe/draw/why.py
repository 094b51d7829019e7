"""Explains in a sentence where the difference between two timelines comes from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from helixpipe.draw.style import time_scale
from helixpipe.program.timeline import Timeline
from helixpipe.simulate.simulator import Simulation
from helixpipe.simulate.step_parts import step_parts

DIGITS = 3
"""Significant digits of the largest part."""


def why_longer(shown: Timeline | Simulation, other: Timeline | Simulation) -> str:
    """Return why `shown` takes longer than `other`, or shorter: the parts of a step that differ, the largest first, and
    their sum. The printed numbers add up. Empty if the two have different units, or no part differs.
    """
    timelines = [each.timeline if isinstance(each, Simulation) else each for each in (shown, other)]
    if timelines[0].unit != timelines[1].unit:
        return ""
    own, theirs = step_parts([shown, other])
    parts = {name: own.get(name, 0.0) - theirs.get(name, 0.0) for name in {**own, **theirs}}
    largest, makespan = max(map(abs, parts.values())), max(timeline.makespan for timeline in timelines)
    if largest <= 1e-9 * makespan:
        return ""
    factor, unit = time_scale(largest) if timelines[0].unit == "s" else (1.0, timelines[0].unit)
    digits = DIGITS - 1 - math.floor(math.log10(largest * factor))
    steps = whole_steps({name: part * factor * 10.0**digits for name, part in parts.items()})

    def amount(count: int) -> str:
        value = f"{abs(count) / 10.0**digits:.{max(0, digits)}f}{' ' + unit if unit else ''}"
        return f"{value} {'more' if count > 0 else 'less'}"

    total = sum(steps.values())
    turn = -1 if total < 0 else 1
    named = sorted(((name, count) for name, count in steps.items() if count), key=lambda item: -turn * item[1])
    sides = [[each for each in named if turn * each[1] > 0], [each for each in named if turn * each[1] < 0]]
    said = [_listed([f"{name} takes {amount(count)}" for name, count in side]) for side in sides if side]
    took = amount(total) if total else "as long"
    return f"Why it takes {took}: averaged over the ranks, {'; '.join(said)}."


def whole_steps(parts: Mapping[str, float]) -> dict[str, int]:
    """Round the parts to whole numbers which add up to their rounded sum: those furthest from the next lower number are
    rounded up. None is moved by 1 or more.
    """
    floors = {name: math.floor(part) for name, part in parts.items()}
    missing = round(math.fsum(parts.values())) - sum(floors.values())
    up = sorted(parts, key=lambda name: floors[name] - parts[name])[:missing]
    return {name: floor + (name in up) for name, floor in floors.items()}


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
