"""Adam's state in host memory: bytes of device and host, what is left there for activations, the time of an update."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helixpipe.costs.hardware import HARDWARE
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import MODELS, Layout
from helixpipe.lowering.lower import lower
from helixpipe.planning.memory.offload_choice import MemoryLimits, OffloadedProgram
from helixpipe.program.program import forward_only
from helixpipe.simulate.memory import rank_memory
from schedules import Shape, build

COSTS = ModelCosts(MODELS["llama2-7b"], HARDWARE["a100-80"], Layout(), seq_length=4096)


def test_a_share_of_the_state_is_on_the_host() -> None:
    """A share of the 12 bytes a weight leaves the device; beside it the host holds float32 gradients. Updating takes
    copies of these out and of weights back, and a pass over host memory that all GPUs of the node share."""
    costs = replace(COSTS, data_parallel=4)
    moved = replace(costs, adam_on_host=0.25)
    lowered = lower(build("1f1b", Shape(2, 4, 32)), costs)
    there, here = (rank_memory(lowered, each, 0) for each in (moved, costs))
    assert there.optimizer == pytest.approx(0.75 * here.optimizer) and here.host == 0
    assert there.host == pytest.approx(0.25 * here.optimizer * 16 / 12)
    assert there.total == pytest.approx(here.total - 0.25 * here.optimizer)
    static = [each.static_memory(lowered.program.pieces_of_rank(0)) for each in (costs, moved)]
    assert static[0] - static[1] == pytest.approx(0.25 * here.optimizer)
    forward = lower(forward_only(lowered.program), costs)
    assert rank_memory(forward, moved, 0).host == 0
    (same, device), (reduction, mixed) = costs.after_time(lowered.program), moved.after_time(lowered.program)
    weights = max(costs.bytes.parameters(lowered.program.pieces_of_rank(rank)) for rank in range(2)) / 4
    host = weights * (6 / 12.8e9 + 30 * 8 / (409.6e9 * 0.75))
    assert same == reduction and device == pytest.approx(weights * 30 / (2039e9 * 0.85))
    assert mixed == pytest.approx(0.75 * device + 0.25 * host)


def test_activations_have_what_the_optimizer_leaves() -> None:
    program = build("1f1b", Shape(2, 2, 32))
    costs = replace(COSTS, adam_on_host=0.5)
    needs = [costs.static_host_memory(program.pieces_of_rank(rank)) for rank in range(2)]
    assert needs[1] == pytest.approx(costs.bytes.parameters(program.pieces_of_rank(1)) * 0.5 * 16)
    for room, fits in ((max(needs), True), (0.9 * max(needs), False)):
        choice = OffloadedProgram(program, costs, MemoryLimits(1e15, room), {})
        assert choice.host_needs == needs and choice.fits is fits
        assert choice.fits_rank(needs.index(max(needs))) is fits
