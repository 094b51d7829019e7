"""All schedules of three ranks and microbatches end, whatever shares a queue; and the model finds what does not."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from helixpipe.common.errors import ScheduleError
from helixpipe.lowering.lower import lower
from helixpipe.torch_pipelining import relower
from schedules import CATALOGUE, Shape, build
from tests.lowering.queue_model import MODELS, QueueModel, System, explore, of_lowered, of_torch
from tests.lowering.random_programs import random_costs, random_program
from tests.lowering.rendezvous import with_crossed_receives
from tests.selection import graded
from tests.torch_pipelining.test_torch_pipelining import TORCH, cells, made_by_torch

SIZES = [(p, m) for p in (1, 2, 3) for m in (1, 2, 3)]
TINY = [(name, local, p, m) for name, local in TORCH for p in (2, 3) for m in (p,)]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", list(CATALOGUE))
def test_every_schedule_ends_in_every_state(name: str, model: QueueModel) -> None:
    sizes, states = set(), 0
    for (ranks, microbatches), chunks, options in product(SIZES, (1, 2), (None, *CATALOGUE[name].variants)):
        layers = 2 * ranks * (2 if name == "hanayo" else 1)
        try:
            program = build(name, Shape(ranks, microbatches, layers, chunks=chunks), options)
        except ScheduleError:
            continue
        verdict = explore(of_lowered(lower(program)), model)
        assert verdict.stopped is None
        sizes.add((ranks, microbatches))
        states += verdict.states
    assert len(sizes) >= {"chimera": 1, "none": 3}.get(name, 4)
    assert states > 3


@pytest.mark.parametrize("count", graded([30, 300], [30]))
def test_random_programs_end_in_every_state(count: int) -> None:
    for seed in range(count):
        rng = Random(seed)
        program = random_program(rng)
        if sum(map(len, program.ranks)) <= 40:
            lowered = lower(program, random_costs(rng))
            assert all(explore(of_lowered(lowered), model).stopped is None for model in MODELS)


@pytest.mark.parametrize("case", TINY, ids=lambda case: "-".join(map(str, case)))
def test_torch_s_deferred_order_stops_and_ours_does_not(case: tuple[str, int, int, int]) -> None:
    name, local, p, m = case
    m = 2 * p if name == "ScheduleDualPipeV" else m
    deferred = made_by_torch(name, local, p, m, defer=True)
    stops = explore(of_torch(cells(deferred)), "pair").stopped
    assert (stops is None) == (name == "ScheduleLoopedBFS" and p == 3)
    relower(deferred)
    assert all(explore(of_torch(cells(deferred)), model).stopped is None for model in MODELS)


def test_crossed_receives_stop_where_a_queue_is_shared() -> None:
    crossed = of_lowered(with_crossed_receives(lower(build("gpipe", Shape(2, 2, 2)))))
    assert all(explore(crossed, model).stopped is not None for model in MODELS)


def two_ranks(first: str, second: str) -> System:
    """Steps as words: `>0` posts the send of transfer 0, `<0` its receive, `.0` waits for it."""

    def steps(words: str, other: int) -> tuple[object, ...]:
        return tuple(
            ("wait" if word[0] == "." else "post", int(word[1]), ((other,), word[0] == ">")) for word in words.split()
        )

    return System((steps(first, 1), steps(second, 0)), {0: (0, 1), 1: (0, 1)})


@pytest.mark.parametrize(
    ("first", "second", "stops"),
    [
        (">0 <1 .1", "<0 .0 >1", ()),
        (">0 <1", ">1 <0", ("pair", "rank")),  # each sends first: a queue for each direction lets both pass
        ("<1 .1 >0", "<0 .0 >1", ("pair", "direction", "rank")),
        (">0 .0", ">1", ("pair", "direction", "rank")),
    ],
)
def test_the_model_knows_what_stops(first: str, second: str, stops: tuple[str, ...]) -> None:
    verdicts = {model: explore(two_ranks(first, second), model) for model in MODELS}
    assert tuple(model for model in MODELS if verdicts[model].stopped is not None) == stops


def test_all_that_can_end_next_is_tried() -> None:
    """Two transfers that nothing orders make four states, two in turn three."""
    apart = System(
        (
            (("post", 0, ((1,), True)), ("post", 1, ((2,), True))),
            (("post", 0, ((0,), False)),),
            (("post", 1, ((0,), False)),),
        ),
        {0: (0, 1), 1: (0, 2)},
    )
    assert explore(apart, "pair").states == 4
    assert explore(apart, "rank").states == 3
