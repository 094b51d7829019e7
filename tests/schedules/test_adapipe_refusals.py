"""AdaPipe: what it refuses, in one sentence, and what it says is needed."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixpipe.common.errors import ScheduleError
from helixpipe.planning.memory.recompute import RecomputeOptions
from schedules import Shape, build
from tests.schedules.test_adapipe import model_costs, most_memory, random_shape, random_times

# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        (
            Shape(4, 8, 3),
            "--num-layers 3 is too few for adapipe on 4 pipeline ranks, which each have at least one whole layer; "
            "valid are 4 and more.",
        ),
        (
            Shape(4, 8, 8, recompute=RecomputeOptions("full")),
            "adapipe chooses itself what each stage recomputes, by --memory-limit or the GPU's memory: leave "
            "--recompute-granularity out.",
        ),
        (
            Shape(4, 8, 8, recompute=RecomputeOptions(recompute_activations=True)),
            "adapipe chooses itself what each stage recomputes, by --memory-limit or the GPU's memory: leave "
            "--recompute-activations out.",
        ),
        (
            Shape(4, 8, 10, memory_limit=1.0),
            "adapipe: no split of 10 layers over 4 ranks fits: with the best choice of what to recompute a rank needs "
            "1.1875 microbatch-layers, but the memory limit is 1 microbatch-layers.",
        ),
    ],
)
def test_what_it_refuses(shape: Shape, sentence: str) -> None:
    with pytest.raises(ScheduleError, match=f"^{re.escape(sentence)}$"):
        build("adapipe", shape)


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32))
def test_what_is_needed_is_enough(seed: int) -> None:
    """With the memory that the refusal names it fits; with a little less it does not."""
    rng = Random(seed)
    shape = replace(random_shape(rng, random_times(rng)), memory_limit=0.0)
    with pytest.raises(ScheduleError) as caught:
        build("adapipe", shape)
    needed = float(re.findall(r"needs ([0-9.]+) microbatch-layers", str(caught.value))[0])
    build("adapipe", replace(shape, memory_limit=needed * (1 + 1e-5)))
    with pytest.raises(ScheduleError):
        build("adapipe", replace(shape, memory_limit=needed * (1 - 1e-5)))


def test_bytes_are_named_in_gibibytes_and_are_those_of_the_sweep() -> None:
    """What a rank needs is more than there is, and enough."""
    shape = Shape(4, 8, 32, costs=model_costs(), memory_limit=10 * 2**30)
    sentence = r"a rank needs ([0-9.]+) GiB, but the memory limit is 10 GiB\.$"
    with pytest.raises(ScheduleError, match=sentence) as caught:
        build("adapipe", shape)
    needed = float(re.findall(sentence, str(caught.value))[0]) * 2**30
    program = build("adapipe", replace(shape, memory_limit=needed * (1 + 1e-3)))
    assert 10 * 2**30 < most_memory(program, model_costs()) == pytest.approx(needed, rel=1e-3)
