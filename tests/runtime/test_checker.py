"""The checker of `happens_before/` finds what is wrong with tiny programs, and nothing where they are right."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.runtime.happens_before import device_programs, gloo, host_programs, threads
from tests.runtime.happens_before.cuda import Simulation
from tests.runtime.happens_before.nccl import Communicators, Nowhere

PROGRAMS = [*device_programs.PROGRAMS, *host_programs.PROGRAMS]

GROUP: Any = SimpleNamespace(send=lambda *_: Nowhere(), recv=lambda *_: Nowhere())


def simulate(program: Callable[..., None], *args: Any) -> list[str]:
    """Return what is wrong with a program."""
    simulation = Simulation()
    communicators = Communicators(simulation, Nowhere())
    with threads.replaced(simulation.world, simulation.kernels), communicators.replaced(), simulation.replaced():
        if program.__code__.co_varnames[:2] == ("right", "network"):
            args += (gloo.Group(simulation, GROUP),)
        program(*args)
        simulation.memories.settle()
    return list(simulation.world.findings)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_that_is_right(program: Callable[..., None]) -> None:
    assert simulate(program, True) == []


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_that_is_wrong(program: Callable[..., None]) -> None:
    """The docstring is what is said."""
    found = simulate(program, False)
    assert any(str(program.__doc__) in re.sub(r" \[\S+:\d+\]", "", each) for each in found), found
