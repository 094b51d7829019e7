"""Lowering: complete, deadlock-free, the same everywhere. The 2,000 random programs meet the validator here as well."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixpipe.common.errors import ProgramError
from helixpipe.lowering.lower import lower
from helixpipe.lowering.project import Action, LoweredProgram
from helixpipe.lowering.validate import validate
from helixpipe.program.program import forward_only
from helixpipe.program.transfer import Transfer
from schedules import Shape, build
from tests.lowering.offloads import offloading_program
from tests.lowering.random_programs import can_run, mutate, random_costs, random_program
from tests.lowering.rendezvous import Machine, with_crossed_receives
from tests.lowering.sharing import sharing_program
from tests.selection import graded


@pytest.mark.hypothesis
@pytest.mark.parametrize("divided", [False, True], ids=["", "divided head"])
@pytest.mark.parametrize("examples", graded((300, 2000), (300,)))
def test_random_programs(examples: int, divided: bool) -> None:
    """The validator's verdict is brute force's, and all programs that it accepts end on the worst machines."""
    verdicts: Counter[bool] = Counter()

    @settings(max_examples=examples)
    @given(seed=st.integers(0, 2**32), mutations=st.sampled_from((0, 1, 1, 2)))
    def check(seed: int, mutations: int) -> None:
        rng = Random(seed)
        program = random_program(rng, divided=divided)
        assert mutations or can_run(program)
        for _ in range(mutations):
            program = mutate(program, rng)
        expected = can_run(program)
        verdicts[expected] += 1
        if not expected:
            with pytest.raises(ProgramError, match=r"^[^\n]+\.$"):
                validate(program)
            return
        lowered = lower(program)
        assert Machine(lowered, rng, blocking=rng.random() < 0.5).run()
        copying = replace(random_costs(rng), copy=rng.choice((0.0, 0.1, 5.0)))
        lowered = lower(sharing_program(offloading_program(program, seed), seed), copying)
        assert Machine(lowered, rng, blocking=rng.random() < 0.5).run()
        check_opening(lowered)

    check()
    assert sum(verdicts.values()) == examples
    assert min(verdicts[True], verdicts[False]) > examples / 4, verdicts


def check_opening(lowered: LoweredProgram) -> None:
    """No backward is in it, the first one comes next on its rank, and all who take part in a transfer have it in theirs
    or none has."""
    sent, received, next_kinds = set(), set(), set()
    started: Counter[Transfer] = Counter()
    for stream, length in zip(lowered.streams, lowered.openings, strict=True):
        for action, op, message, _ in stream[:length]:
            if action is Action.RUN:
                assert op is not None and op.kind in "FR"
            if action is Action.SEND:
                sent.add(message)
            if action is Action.RECV:
                received.add(message)
            if action is Action.START and message is not None:
                started[message] += 1
        runs = (op.kind for action, op, *_ in stream[length:] if action is Action.RUN and op is not None)
        next_kinds.add(next(runs, ""))
    assert sent == received
    assert all(number == len(each.ranks) for each, number in started.items())
    assert next_kinds & {"B", "I"} or not any(op.kind in "BI" for ops in lowered.program.ranks for op in ops)


def test_the_machine_is_adversarial() -> None:
    """Streams that only buffering could save are stuck on it."""
    lowered = lower(build("gpipe", Shape(2, 2, 2)))
    assert Machine(lowered, Random(0)).run()
    assert not Machine(with_crossed_receives(lowered), Random(0)).run()


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b"])
def test_every_message_is_received_sent_and_awaited_once(name: str) -> None:
    lowered = lower(build(name, Shape(4, 8, 8)))
    counts = Counter((i.action, i.transfer) for stream in lowered.streams for i in stream if i.transfer is not None)
    assert set(counts.values()) == {1}
    assert len(counts) == 3 * len(lowered.messages)
    runs = [tuple(i.op for i in stream if i.action is Action.RUN) for stream in lowered.streams]
    assert tuple(runs) == lowered.program.ranks


def test_every_unit_is_freed_once_after_its_last_op() -> None:
    for seed in range(50):
        program = random_program(Random(seed))
        for rank, stream in enumerate(lower(program).streams):
            freed = [i.op for i in stream if i.action is Action.FREE and i.op is not None]
            assert freed == [op for op in program.ranks[rank] if op.kind in "BW"]


def test_no_buffers_for_evaluation_either() -> None:
    for name in ("gpipe", "1f1b", "interleaved-1f1b"):
        lowered = lower(forward_only(build(name, Shape(4, 8, 8))))
        assert {message.kind for message in lowered.messages} == {"activation"}
        assert Machine(lowered, Random(0), blocking=True).run()


FINGERPRINT = """
import hashlib
from random import Random
from helixpipe.lowering.lower import lower
from schedules import CATALOGUE, Shape, build
from tests.lowering.random_programs import random_program
digest = hashlib.sha256()
programs = [build(n, Shape(1 if n == "none" else 4, 8, 8)) for n in sorted(CATALOGUE)]
programs += [random_program(Random(i)) for i in range(50)]
for program in programs:
    for stream in lower(program).streams:
        digest.update("|".join(map(str, stream)).encode())
print(digest.hexdigest())
"""


def test_every_rank_computes_the_same_streams() -> None:
    """Ranks are separate processes with separate string hashes."""
    outputs = set()
    for seed in ("0", "1", "12345"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", FINGERPRINT]
        outputs.add(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert len(outputs) == 1 and len(outputs.pop().strip()) == 64


def test_an_invalid_program_does_not_lower() -> None:
    program = build("1f1b", Shape(2, 2, 2))
    with pytest.raises(ProgramError, match="0B1 is missing"):
        lower(replace(program, ranks=(program.ranks[0][:-1], program.ranks[1])))
