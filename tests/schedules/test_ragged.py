"""Steps of microbatches that are unlike each other, under every schedule that takes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from helixpipe.common.errors import ScheduleError
from helixpipe.costs.by_hand import PieceTimes
from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.lower import lower
from helixpipe.lowering.validate import validate
from helixpipe.program.files import load_program, save_program
from helixpipe.program.program import Program, forward_only
from helixpipe.program.workload import uniform
from helixpipe.simulate.simulator import simulate
from schedules import CATALOGUE, Shape, build
from tests.lowering.ragged import equal_chains, random_chains
from tests.lowering.rendezvous import Machine

RAGGED = [name for name, schedule in CATALOGUE.items() if schedule.ragged]
COSTS = PieceTimes({"qkv": 1.0, "attn": 0.5, "mlp": 2.0}, message=0.1)


def check(program: Program, tmp_path: Path, rng: Random) -> None:
    """Valid, forward alone too; finishes without buffered messages; no faster than the work and one microbatch's way
    allow; the same when read back."""
    lowered = lower(program, COSTS)
    validate(forward_only(program))
    assert Machine(lowered, rng, blocking=rng.random() < 0.5).run()
    simulation, bound = simulate(lowered, COSTS), BoundCosts(program, COSTS)
    chain = max(
        sum(bound.op_time(op) for ops in program.ranks for op in ops if op.microbatch == number and op.chunk == 0)
        for number in range(program.num_microbatches)
    )
    assert simulation.makespan >= max(*simulation.busy, 0.0, chain * (1 - 1e-9) if chain_waits(program) else 0.0)
    path = tmp_path / "program.json"
    save_program(program, path)
    assert load_program(path) == program


def chain_waits(program: Program) -> bool:
    """Whether a unit's ops follow each other: W waits only for its I, and so does not count."""
    return not any(op.kind == "W" for ops in program.ranks for op in ops)


@pytest.mark.parametrize("name", RAGGED)
def test_chains_of_unlike_numbers_of_chunks(name: str, tmp_path: Path) -> None:
    """Whole microbatches of unlike lengths among them."""
    rng = Random(name)
    built = 0
    for p, m, most in ((1, 4, 3), (2, 5, 4), (2, 8, 1), (2, 8, 4), (3, 1, 6), (4, 9, 3)):
        workload = random_chains(rng, m, most)
        try:
            program = build(name, Shape(p, m, 4 * p, ragged=workload))
        except ScheduleError:
            assert CATALOGUE[name].one_rank or name in ("chimera", "helix", "interleaved-1f1b")
            continue
        built += 1
        assert program.workload == workload
        check(program, tmp_path, rng)
    assert built >= (1 if CATALOGUE[name].one_rank else 2)


def test_those_found_for_equal_microbatches_refuse_others() -> None:
    assert [name for name, schedule in CATALOGUE.items() if not schedule.ragged] == ["adapipe"]
    with pytest.raises(ScheduleError, match=r"^schedule adapipe is found for equal microbatches; .* need another\.$"):
        build("adapipe", Shape(2, 2, 4, ragged=random_chains(Random(0), 2, 1)))


def test_a_workload_says_itself_how_it_is_cut() -> None:
    workload = equal_chains((3, 1))
    assert Shape(2, 2, 4, ragged=workload).most_chunks == Shape(2, 2, 4, chunks=3, ragged=workload).most_chunks == 3
    for changed, said in (
        ({"chunks": 2}, "into 3 chunks at most; leave the number of chunks and their lengths out"),
        ({"chunks": 3, "chunk_lengths": (1, 2, 3)}, "leave the number of chunks and their lengths out"),
        ({"microbatches": 3}, "a workload of 2 microbatches, of a chunk or more each, does not fit a step of 3"),
    ):
        with pytest.raises(ScheduleError, match=said):
            replace(Shape(2, 2, 4), **{"ragged": workload, **changed})


@pytest.mark.parametrize("name", RAGGED)
def test_a_uniform_workload_is_what_its_numbers_say(name: str) -> None:
    p = 1 if CATALOGUE[name].one_rank else 2
    for lengths in ((5, 4), (3, 3)):
        shape = Shape(p, 4, 4, chunks=2, chunk_lengths=lengths)
        assert build(name, replace(shape, chunk_lengths=None, ragged=uniform(4, 2, lengths))) == build(name, shape)


def test_seq1f1b_warms_up_for_the_longest_microbatch() -> None:
    """Warm-up p-r-1 + N-1, N the chunks of the longest: no fewer would do on the last rank."""
    program = build("seq1f1b", Shape(2, 5, 2, ragged=equal_chains((1, 1, 3, 1, 1))))
    assert [" ".join(map(str, ops)) for ops in program.ranks] == [
        "0F0 0F1 0F2 0F2.1 0B0 0F2.2 0B1 0F3 0B2.2 0F4 0B2.1 0B2 0B3 0B4",
        "1F0 1F1 1F2 1B0 1F2.1 1B1 1F2.2 1B2.2 1F3 1B2.1 1F4 1B2 1B3 1B4",
    ]


def test_zero_bubble_keeps_no_more_than_seq1f1b_and_is_no_slower() -> None:
    rng = Random(3)
    for p in (2, 3):
        shape = Shape(p, 7, p, ragged=random_chains(rng, 7, 4), costs=COSTS)
        plain, split = (simulate(lower(build(name, shape), COSTS), COSTS) for name in ("seq1f1b", "seq1f1b-zb"))
        assert split.makespan <= plain.makespan * (1 + 1e-9)
        workload = shape.workload
        assert workload.mean_tokens is not None
        largest = max(sum(workload.tokens(number)) for number in range(7)) / workload.mean_tokens
        allowed = max(max(plain.peak_activation), largest * (1 + (p - 1) / 4))
        assert max(split.peak_activation) <= allowed * (1 + 1e-9)
