"""What a search finds: as good as all orders where these can be tried, never worse than what was given, never over the
limit, the same for the same seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import inf
from random import Random

import pytest

from helixpipe.common.errors import ProgramError
from helixpipe.costs.by_hand import PieceTimes
from helixpipe.lowering.validate import validate
from helixpipe.planning.reorder import improve as module
from helixpipe.planning.reorder.anneal import anneal
from helixpipe.planning.reorder.evaluate import Evaluator
from helixpipe.planning.reorder.improve import Budget, Improved, improve
from helixpipe.planning.reorder.starts import cut, joined, relatives, split
from helixpipe.planning.vocabulary.spread import spread_heads
from helixpipe.program.program import Op, Program, forward_only
from helixpipe.program.stages import Piece
from schedules import Shape, build
from tests.planning.reorder.instances import COSTS, instance, simulated, small


def _interleavings(chains: Sequence[Sequence[Op]]) -> Iterator[tuple[Op, ...]]:
    """All orders that keep each chain's."""
    if not any(chains):
        yield ()
    for number, chain in enumerate(chains):
        if chain:
            rest = [*chains[:number], chain[1:], *chains[number + 1 :]]
            for order in _interleavings(rest):
                yield (chain[0], *order)


@pytest.mark.parametrize("room", [1.0, 1.3, inf])
def test_as_good_as_the_best_of_all_orders(room: float) -> None:
    """Two ranks, two microbatches, split backwards: all orders of a rank that keep to each unit's F, I, W."""
    program = split(small("1f1b", ranks=2, microbatches=2))
    most = room * max(simulated(small("1f1b", ranks=2, microbatches=2)).device_needs)
    ranks = [list(_interleavings([[Op(kind, rank, m) for kind in "FIW"] for m in range(2)])) for rank in range(2)]
    best = inf
    given = instance(program, [most, most])
    number = {op: task for task, op in enumerate(given.ops)}
    judge = Evaluator(given)
    for orders in product(*ranks):
        best = min(best, judge.makespan([[number[op] for op in order] for order in orders], inf))
    found = improve(program, COSTS, Budget(1500, orders_only=True), most)
    assert found.after.time == pytest.approx(best, rel=1e-9)
    assert found.after.fullest <= most * (1 + 1e-9)


def _held(found: Improved, program: Program, limit: float | None) -> None:
    """What holds of any result: it is as it is simulated anew, within the limit, not slower, of the same units."""
    after = found.after.program
    validate(after)
    again = simulated(after)
    assert again.makespan == found.after.time <= found.before.time
    assert max(again.device_needs) <= max(max(simulated(program).device_needs), limit or 0.0) * (1 + 1e-9)
    assert {piece for stage in after.stages for piece in stage.pieces} == {
        piece for stage in program.stages for piece in stage.pieces
    }
    assert after.num_microbatches == program.num_microbatches and after.num_ranks == program.num_ranks


@pytest.mark.parametrize(
    "program",
    [
        small("1f1b", microbatches=2),
        small("seq1f1b", chunks=2),
        small("interleaved-1f1b", ranks=2, virtual_stages=2),
        small("helix", ranks=2),
        small("weipipe", ranks=2),
        forward_only(small("1f1b")),
    ],
    ids=lambda program: program.schedule + "-forward" * program.forward_only,
)
def test_never_slower_and_never_over_the_limit(program: Program) -> None:
    _held(improve(program, COSTS, Budget(600)), program, None)


def test_a_limit_makes_the_difference() -> None:
    """Fewer microbatches than ranks: a lot to gain, and more with more memory."""
    program = small("1f1b", microbatches=2)
    own = max(simulated(program).device_needs)
    tight, roomy = (improve(program, COSTS, Budget(800), limit) for limit in (own, 2 * own))
    for found, limit in ((tight, own), (roomy, 2 * own)):
        _held(found, program, limit)
        assert found.gain > 0.1 and found.after is found.tried[0]
    assert roomy.after.time <= tight.after.time
    below = improve(program, COSTS, Budget(300), own / 2)  # over it from the start: no more than that
    assert below.after.fullest <= own * (1 + 1e-9)


def test_only_the_order_changes_where_only_it_may() -> None:
    program = split(small("1f1b", microbatches=3))
    found = improve(program, COSTS, Budget(600, orders_only=True)).after.program
    assert found.ranks != program.ranks and found.stages == program.stages
    assert [Counter(ops) for ops in split(found).ranks] == [Counter(ops) for ops in program.ranks]


def test_times_of_one_step_leave_a_hint_where_to_go_on() -> None:
    """Most orders next to one of F = I = W and free messages take as long as it; 32 is the least there is (the linear
    program of `helixpipe.certify`), and v-min's own order takes 33."""
    costs = PieceTimes({"mlp": 1.0})
    program = build("v-min", Shape(4, 4, 8, costs=costs))
    found = improve(program, costs, Budget(20_000, orders_only=True))
    assert (found.before.time, found.after.time) == (33.0, 32.0)


def test_a_seed_gives_one_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled or not; and another seed other draws."""
    program = small("seq1f1b", microbatches=3, chunks=2)
    first, other = (improve(program, COSTS, Budget(500, seed)) for seed in (3, 4))
    monkeypatch.setenv("HELIXPIPE_COMPILED", "0")
    assert improve(program, COSTS, Budget(500, 3)).after.program == first.after.program
    assert other.after.program != first.after.program


def test_an_interrupt_keeps_the_best_so_far() -> None:
    program = small("1f1b", microbatches=2)

    def interrupt(done: float, time: float) -> None:
        if done > 0.5:
            raise KeyboardInterrupt

    found = improve(program, COSTS, Budget(6000), say=interrupt)
    assert found.interrupted and found.evaluations < 6000 and found.gain > 0
    _held(found, program, None)


def test_what_is_given_must_be_valid() -> None:
    program = small("1f1b")
    with pytest.raises(ProgramError):
        improve(replace(program, ranks=(program.ranks[0][:-1], *program.ranks[1:])), COSTS, Budget(10))


def test_a_proposal_that_is_not_better_in_truth_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the annealing says: the simulator has the last word."""
    program = small("1f1b", microbatches=3)

    def worse(*arguments: object) -> object:
        given = arguments[0]
        found = anneal(given, Evaluator(given), 1, Random(0))
        ahead = [sorted(order, key=lambda task: given.ops[task].kind != "F") for order in given.orders]  # type: ignore[attr-defined]
        return replace(found, orders=ahead, makespan=0.0)

    monkeypatch.setattr(module, "anneal", worse)
    found = improve(program, COSTS, Budget(10, orders_only=True))
    assert found.after is found.before and found.tried[0].program == program


def test_a_proposal_that_needs_too_much_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the annealing says that it fits."""
    program = split(small("1f1b", microbatches=6))
    own = max(simulated(program).device_needs)
    roomy = improve(program, COSTS, Budget(600, orders_only=True), 3 * own).after
    assert roomy.fullest > own and roomy.time < simulated(program).makespan

    def proposed(*arguments: object) -> object:
        given = arguments[0]
        number = {op: task for task, op in enumerate(given.ops)}  # type: ignore[attr-defined]
        orders = [[number[op] for op in ops] for ops in split(roomy.program).ranks]
        return replace(anneal(given, Evaluator(given), 1, Random(0)), orders=orders, makespan=0.0)

    monkeypatch.setattr(module, "anneal", proposed)
    found = improve(program, COSTS, Budget(10, orders_only=True))
    assert found.after.fullest <= own * (1 + 1e-9)


# ------------------------------------------------------------------------------------------------------------- starts


@pytest.mark.parametrize("name", ["1f1b", "helix", "seq1f1b", "weipipe"])
def test_relatives_are_programs(name: str) -> None:
    """Each one that can be made is valid and has every unit of the same workload, in whatever stages."""
    program = small(name, ranks=2, chunks=2 if name == "seq1f1b" else 1)
    made = [make() for _, make in relatives(program, COSTS, inf)]
    for each in made:
        validate(each)
        assert each.num_microbatches == program.num_microbatches
    assert len(made) == {"1f1b": 8, "seq1f1b": 4, "helix": 5, "weipipe": 5}[name]


def test_split_and_joined() -> None:
    program = small("helix", ranks=2)
    halves = split(program)
    of_attention = [op for ops in halves.ranks for op in ops if not program.stages[op.stage].has_weights]
    assert {op.kind for op in of_attention} <= {"F", "B"}
    assert all(op.kind != "B" for ops in halves.ranks for op in ops if program.stages[op.stage].has_weights)
    assert joined(halves) == program
    apart = replace(halves, ranks=tuple(tuple(sorted(ops, key=lambda op: op.kind == "W")) for ops in halves.ranks))
    assert joined(apart).ranks[0].count(halves.ranks[0][-1]) == 1


def test_cut_sequences_go_forward_in_order_and_back_in_reverse() -> None:
    program = cut(small("1f1b", ranks=2, microbatches=2), 3)
    validate(program)
    own = [op for op in program.ranks[0] if op.microbatch == 1]
    assert [op.chunk for op in own if op.kind == "F"] == [0, 1, 2]
    assert [op.chunk for op in own if op.kind == "B"] == [2, 1, 0]
    head = next(op for op in cut(small("helix", ranks=2), 2).ranks[0] if op.kind == "B")
    assert head.chunk == 1  # of the head F and B alternate


def test_a_head_on_every_rank() -> None:
    program = small("1f1b", ranks=3, microbatches=6)
    spread = spread_heads(program, COSTS)
    validate(spread)
    assert spread.stages[-1].pieces == (Piece("head"),) and spread.stages[-1].placement == "replicated"
    for ops in spread.ranks:
        assert [op.kind for op in ops if op.stage == 3] == ["F", "B"] * 2
    assert max(simulated(spread).busy) < max(simulated(program).busy)
