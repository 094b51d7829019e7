"""Under a memory limit schedules that search take the better of fewer microbatches in flight and recomputing."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from helixpipe.costs.hardware import GIB, HARDWARE
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import MODELS, Chunk, Layout
from helixpipe.lowering.lower import lower
from helixpipe.planning.memory.early import peak_memory, recomputes
from helixpipe.planning.memory.recompute import RecomputeOptions
from helixpipe.program.program import Program
from helixpipe.simulate.simulator import simulate
from megatron.pretrain.plan.programs import make_program
from schedules import Shape, build
from schedules.command import main
from schedules.zero_bubble import ZeroBubbleOptions
from tests.selection import graded
from tests.training.helpers import config

COSTS = ModelCosts(MODELS["llama2-7b"], HARDWARE["a100-80"], Layout(), seq_length=16384)

SEARCHED: dict[str, dict[str, Any]] = {
    "zb1p": {},
    "zb2p": {},
    "zbv": {},
    "v-half": {},
    "v-min": {},
    "zb-interleaved": {"virtual_stages": 2},
    "seq1f1b-zb": {"chunks": 3, "chunk_lengths": (6144, 5120, 5120)},
}

ORDER_ALONE = ZeroBubbleOptions(zb_recompute=False)

GRANULARITIES = [RecomputeOptions("selective"), RecomputeOptions("without-attention"), RecomputeOptions("full")]


def time_within(program: Program, limit: float) -> float | None:
    """Of the simulated step; None where it does not fit."""
    simulation = simulate(lower(program, COSTS), COSTS)
    return simulation.makespan if max(simulation.device_needs) <= limit * (1 + 1e-9) else None


@pytest.mark.parametrize("name", graded(list(SEARCHED), ("zb1p", "zb2p")))
def test_no_slower_than_either_alone_and_within_the_limit(name: str) -> None:
    """On a grid of limits, from what the order needs without one down to where little fits."""
    shape = Shape(4, 6, 8, costs=COSTS, **SEARCHED[name])
    free, fitting = build(name, shape), 0
    most = max(peak_memory(free, COSTS))
    assert build(name, replace(shape, memory_limit=most)) == free
    for part in (0.85, 0.75, 0.65, 0.45):
        limited = replace(shape, memory_limit=part * most)
        own = time_within(build(name, limited), part * most)
        order = time_within(build(name, limited, ORDER_ALONE), part * most)
        flags = [
            time
            for options in GRANULARITIES
            if (time := time_within(build(name, replace(limited, recompute=options)), part * most)) is not None
        ]
        others = [*flags, *([] if order is None else [order])]
        assert not others or (own is not None and own <= min(others) * (1 + 1e-9)), part
        fitting += bool(others)
    assert fitting >= 2


def test_faster_than_either_alone_by_recomputing_part_of_the_layers() -> None:
    """With one layer of two on each rank made again, but for its attention, a rank makes one layer less again for each
    of 6 microbatches than where both are, the best that flags give. Fewer in flight cost some of these 6; at least
    two of them are left. (5.5 are, 6 % of the step.)"""
    shape = Shape(4, 6, 8, costs=COSTS)
    limit = 0.68 * max(peak_memory(build("zb1p", shape), COSTS))
    limited = replace(shape, memory_limit=limit)
    order = time_within(build("zb1p", limited, ORDER_ALONE), limit)
    flags = [time_within(build("zb1p", replace(limited, recompute=options)), limit) for options in GRANULARITIES]
    own = time_within(build("zb1p", limited), limit)
    again = sum(COSTS.piece_time(piece, "F", Chunk(COSTS.seq_length)) for piece in ("norm", "qkv", "proj", "mlp"))
    assert own is not None and own < min(time for time in (order, *flags) if time is not None) - 2 * again


def test_where_nothing_fits_it_needs_the_least() -> None:
    shape = Shape(4, 8, 8, costs=COSTS, memory_limit=1.0)
    needs = [
        max(peak_memory(build("zb1p", *given), COSTS))
        for given in ((shape,), (shape, ORDER_ALONE), *((replace(shape, recompute=each),) for each in GRANULARITIES))
    ]
    assert needs[0] <= min(needs) * (1 + 1e-9) < needs[1]


def test_the_flags_decide_where_they_say_what_to_recompute() -> None:
    shape = Shape(4, 5, 8, costs=COSTS)
    limit = 0.5 * max(peak_memory(build("zbv", shape), COSTS))
    limited = replace(shape, memory_limit=limit)
    assert recomputes(build("zbv", limited)) and not recomputes(build("zbv", limited, ORDER_ALONE))
    late = replace(limited, recompute=RecomputeOptions(recompute_early=False))
    assert not any(op.kind == "R" for ops in build("zbv", late).ranks for op in ops)
    asked = build("zbv", replace(limited, recompute=RecomputeOptions("selective")))
    assert {piece.kind for stage in asked.stages for run in stage.recompute for piece in run} == {"attn"}
    assert not asked.activations


MODEL = "--model llama2-7b --hardware a100-80 --seq-length 8192"


def printed(capsys: pytest.CaptureFixture[str], words: str) -> Any:
    assert main([*words.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_command_and_training_plan_with_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    size = f"zbv -p 4 -m 8 -L 8 {MODEL} --gpus-per-node 4"
    for command in ("memory", "simulate"):
        limited, whole, roomy = (
            printed(capsys, f"{command} {size} {flags}") for flags in ("--memory-limit 18", "", "--memory-limit 500")
        )
        assert limited != whole == roomy
    figures = printed(capsys, f"memory {size} --memory-limit 18")
    assert figures["fits"] and figures["memory_limit"] == 18 * GIB
    ignored = printed(capsys, f"simulate {size} --memory-limit 18 --ignore-memory-limit")
    assert not ignored["step"]["fits"] and ignored["makespan"] == roomy["makespan"]


def test_training_plans_the_same() -> None:
    sizes = "--num-layers 8 --hidden-size 4096 --num-attention-heads 32"
    length = "--seq-length 8192 --max-position-embeddings 8192"
    batch = "--micro-batch-size 1 --global-batch-size 8"
    flags = f"{sizes} {length} {batch} --pipeline-model-parallel-size 4 --hardware a100-80"
    asked = config(f"{flags} --pipeline-schedule zbv --memory-limit 16", world=4)
    program = make_program(asked, 8)
    assert recomputes(program)
    asked = config(f"{flags} --pipeline-schedule zbv --memory-limit 16 --no-zb-recompute", world=4)
    assert not recomputes(make_program(asked, 8))
