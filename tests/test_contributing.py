"""The example of CONTRIBUTING.md does what it says, with the code as printed there."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest

from helixpipe.common.errors import ScheduleError
from helixpipe.costs.by_hand import PieceTimes
from helixpipe.lowering.lower import lower
from helixpipe.planning.catalogue import Catalogue
from helixpipe.program.stages import PLACEMENTS
from helixpipe.simulate.simulator import Simulation, simulate
from schedules import Schedule, Shape, build

TEXT = (Path(__file__).resolve().parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")


def code(name: str) -> str:
    match = re.search(rf"<!-- example: {re.escape(name)} -->\n```python\n(.*?)```", TEXT, re.DOTALL)
    assert match is not None, name
    return match[1]


@pytest.fixture
def example() -> Iterator[Schedule]:
    """The registry line, evaluated where it would stand."""
    module = ModuleType("schedules.eager_one_f_one_b")
    sys.modules[module.__name__] = module  # dataclasses looks its module up
    try:
        exec(code("schedules/eager_one_f_one_b.py"), module.__dict__)
        schedule = eval(code("registry line"), {"Schedule": Schedule, **module.__dict__})
        assert isinstance(schedule, Schedule)
        yield schedule
    finally:
        del sys.modules[module.__name__]


def run(schedule: Schedule | str, shape: Shape, message: float, warmup: int | None = None) -> Simulation:
    costs = PieceTimes({"mlp": 1.0}, message=message)
    if isinstance(schedule, str):
        return simulate(lower(build(schedule, shape), costs), costs)
    options = schedule.options() if warmup is None else schedule.options(eager_warmup=warmup)
    return simulate(lower(schedule.build(shape, options), costs), costs)


def test_the_figures_in_the_text(example: Schedule) -> None:
    shape = Shape(ranks=4, microbatches=16, layers=4)
    plain, eager = run("1f1b", shape, message=1), run(example, shape, message=1)
    assert (plain.makespan, eager.makespan) == (85, 63)
    assert (plain.peak_activation[0], eager.peak_activation[0]) == (4, 7)
    assert run("1f1b", shape, message=0).makespan == run(example, shape, message=0).makespan == 57
    for figure in ("from 85 to 63", "keeps 7 microbatches instead of 4", "both need 57"):
        assert figure in " ".join(TEXT.split())


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 1), (2, 5), (4, 2), (4, 9), (6, 24)])
@pytest.mark.parametrize("warmup", [1, 2, 3])
def test_the_formulas_in_its_docstring(example: Schedule, p: int, m: int, warmup: int) -> None:
    result = run(example, Shape(p, m, layers=p), message=0, warmup=warmup)
    assert result.bubble_time == pytest.approx((p - 1) * 3)
    assert result.peak_activation == [min(warmup * (p - r - 1) + 1, m) for r in range(p)]


@pytest.mark.parametrize("message", [0.25, 1.0, 1.5])
def test_messages_up_to_half_of_f_and_b_are_hidden(example: Schedule, message: float) -> None:
    p = 4
    shape = Shape(p, 16, layers=p)
    without = run(example, shape, message=0).makespan
    assert run(example, shape, message).makespan == pytest.approx(without + 2 * (p - 1) * message)
    assert run("1f1b", shape, message).makespan > without + 2 * (p - 1) * message


def test_the_tables_name_every_field_and_placement() -> None:
    rows = [line.split("|")[1] for line in TEXT.splitlines() if line.startswith("| ")]
    cells = {word for row in rows for word in re.findall(r"\w+", row)}
    assert {field.name for field in fields(Schedule)} | set(PLACEMENTS) <= cells


def test_what_cannot_be_is_refused(example: Schedule) -> None:
    with pytest.raises(ScheduleError, match="--eager-warmup 0 must be at least 1"):
        Catalogue([example]).build(example.name, Shape(2, 2, 2), example.options(eager_warmup=0))
