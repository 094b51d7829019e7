"""What a report says: of ranks stopped by one lost message of any program, and of every other kind of first cause."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from helixpipe.lowering.lower import lower
from helixpipe.lowering.project import Action, LoweredProgram
from helixpipe.planning.catalogue import Shape
from helixpipe.program.transfer import TRANSFER_KINDS, Transfer
from helixpipe.watch.position import Patience, Peers, RunPart, View, describe
from helixpipe.watch.stall import AwaitedRank, State, report, stalled
from schedules import build
from tests.lowering.random_programs import random_costs, random_program

PART = 7


class Network:
    """Ranks that run their streams until nobody can go on; what was sent has come, but for the messages lost, and a
    collective has ended when all its ranks have started it."""

    def __init__(self, lowered: LoweredProgram, lost: set[int]):
        self._lowered, self._lost = lowered, lost
        self.instructions = [0] * len(lowered.streams)
        self._sent: set[int] = set()
        self._starting = [set(each.ranks) for each in lowered.graph.transfers]
        while [rank for rank in range(len(self.instructions)) if self._step(rank)]:
            pass

    def arrived(self, message: Transfer) -> bool:
        if message.resource != "link":
            return not self._starting[message.number] and message.number not in self._lost
        before = message.follows >= 0 and message.kind == "weights"
        return (
            message.number in self._sent
            and message.number not in self._lost
            and (not before or self.arrived(self._lowered.graph.transfers[message.follows]))
        )

    def _step(self, rank: int) -> bool:
        stream, at = self._lowered.streams[rank], self.instructions[rank]
        if at == len(stream):
            return False
        action, _, message, *_ = stream[at]
        if message is not None and action is Action.WAIT and not self.arrived(message):
            return False
        if message is not None and action is Action.SEND:
            self._sent.add(message.number)
        if message is not None and action is Action.START:
            self._starting[message.number].discard(rank)
        self.instructions[rank] += 1
        return True


def states_in(lowered: LoweredProgram, instructions: list[int], ranks: list[int] | None = None) -> dict[int, State]:
    """The states of ranks that stand at these instructions. ranks: of the job, by pipeline rank."""
    ranks = ranks or list(range(len(instructions)))
    states = {}
    for pp_rank, (rank, instruction) in enumerate(zip(ranks, instructions, strict=True)):
        ended = instruction == len(lowered.streams[pp_rank])
        part = RunPart("after step, iteration 3", PART + 1, Patience.STEP, together=True)
        if not ended:
            part = RunPart("step, iteration 3", PART, Patience.STEP, False, lowered, pp_rank)
        peers = Peers(rank, ranks, (rank,), f"rank {rank}")
        states[rank] = describe(View(part, 0 if ended else instruction), peers, 31.0 + pp_rank, 30.0)
    return states


def causes(states: dict[int, State], world_size: int, ended: dict[int, str] | None = None) -> list[str]:
    lines = report(states, world_size, ended or {}).splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("First cause"))
    return [line.strip() for line in lines[start + 1 : -2]]


@settings(max_examples=100)
@given(st.integers(0, 10**9))
@example(850)  # weights that two ranks wait for, one after the other
def test_a_lost_message_of_any_program_is_found(seed: int) -> None:
    rng = Random(seed)
    lowered = lower(random_program(rng, divided=seed % 3 == 0, turned=True), random_costs(rng))
    if not lowered.messages:
        return
    message = rng.choice(lowered.messages)
    instructions = Network(lowered, {message.number}).instructions
    states = {rank: State.from_json(state.to_json()) for rank, state in states_in(lowered, instructions).items()}
    assert stalled(states.values())
    (cause,) = causes(states, len(states))
    first, last = message.source, message.target
    assert cause.startswith("message lost between rank ")
    if message.kind == "weights":  # what has been passed on is lost on one of its hops
        assert f"rank {first}" in cause and f"rank {last}" in cause
    else:
        assert cause.startswith(f"message lost between rank {first} and rank {last}: ")
        assert message.kind.replace("_", " ") in cause
    line = report(states, len(states), {}).splitlines()[1 + last]
    assert "waits for" in line


@given(st.integers(0, 10**9))
@example(0)  # parts of the head
@example(8)  # turns
def test_a_collective_that_hangs_is_one_cause(seed: int) -> None:
    """All ranks have started it; in each it is another instruction."""
    rng = Random(seed)
    lowered = lower(random_program(rng, divided=seed % 2 == 0, turned=True), random_costs(rng))
    waited = {each.transfer for stream in lowered.streams for each in stream if each.action is Action.WAIT}
    collectives = [each for each in lowered.graph.transfers if each.resource == "collective" and each in waited]
    if not collectives or lowered.program.num_ranks < 2:
        return
    lost = rng.choice(collectives)
    states = states_in(lowered, Network(lowered, {lost.number}).instructions)
    assert stalled(states.values())
    (cause,) = causes(states, len(states))
    assert "until the end of" in cause and cause.endswith(
        "Nobody they wait for is behind, so what they do together hangs."
    )
    assert TRANSFER_KINDS[lost.kind].label in cause


def test_the_whole_text() -> None:
    lowered = lower(build("1f1b", Shape(4, 4, 4)))
    message = next(each for each in lowered.messages if str(each) == "gradient 2B1 -> 1B1 (rank 2 -> rank 1)")
    states = states_in(lowered, Network(lowered, {message.number}).instructions)
    del states[3]
    assert report(states, 5, {4: "with MemoryError"}).splitlines() == [
        "the job has stalled: no rank has got any further for 31 s.",
        "  rank 0, step, iteration 3: waits for the gradient of 1B1 from rank 1, to run 0B1 (instruction 13 of 24); "
        "has waited 31 s; rank 1 has not sent it yet",
        "  rank 1, step, iteration 3: waits for the gradient of 2B1 from rank 2, to run 1B1 (instruction 22 of 36); "
        "has waited 32 s; rank 2 has sent it",
        "  rank 2, after step, iteration 3: in or before a collective; has waited 33 s",
        "  rank 3: silent: stopped, dead, cut off, or in a call that lets no other Python code run",
        "  rank 4: ended with MemoryError",
        "First causes:",
        "  rank 3: silent: stopped, dead, cut off, or in a call that lets no other Python code run.",
        "  rank 4: ended with MemoryError.",
        "  message lost between rank 2 and rank 1: rank 2 has sent the gradient of 2B1, and rank 1 has not got it. The "
        "network between them has failed, or takes longer than the time allowed.",
        "(2F5 is the forward of stage 2 on microbatch 5, 2F5.1 on its chunk 1; B, I, W and R are the backward, its two "
        "halves and the recomputation.)",
        "What to do: docs/troubleshooting.md. How long to wait before this: --stall-timeout-seconds.",
    ]


def test_pipeline_ranks_are_named_as_ranks_of_the_job() -> None:
    lowered = lower(build("1f1b", Shape(2, 2, 2)))
    message = next(each for each in lowered.messages if each.kind == "activation")
    states = states_in(lowered, Network(lowered, {message.number}).instructions, ranks=[1, 3])
    assert "\n  rank 3, step, iteration 3: waits for the activation of 0F0 from rank 1, to run 1F0" in report(
        states, 4, {0: "normally", 2: "normally"}
    )
    cause = causes(states, 4, {0: "normally", 2: "normally"})[-1]
    assert cause.startswith("message lost between rank 1 and rank 3: rank 1 has sent the activation of 0F0, ")


def test_one_that_computes_is_the_cause() -> None:
    lowered = lower(build("1f1b", Shape(3, 2, 3)))
    states = states_in(lowered, [1, 1, 2])  # rank 0 runs 0F0, the others wait
    states[0] = states_in(lowered, [0, 1, 2])[0]
    assert causes(states, 3) == ["rank 0, step, iteration 3: runs 0F0 (instruction 0 of 12). It waits for nobody."]


def at(rank: int, place: tuple[int, int], doing: str = "busy alone", **fields: object) -> State:
    return replace(State(rank, f"rank {rank}", "grads-reduce", place, 31.0, 30.0, doing), **fields)


def test_a_collective_in_which_all_are_hangs_itself() -> None:
    states = {rank: at(rank, (4, 0), "in or before a collective", together=True) for rank in (0, 1, 2, 4)}
    states[3] = at(3, (4, 0), "in or before a collective", together=True)
    assert causes(states, 5) == [
        "ranks 0-4, grads-reduce: in or before a collective. Nobody they wait for is behind, so what they do together "
        "hangs."
    ]


def test_a_collective_waits_for_who_is_not_there() -> None:
    states = {rank: at(rank, (4, 0), "in or before a collective", together=True) for rank in (0, 2)}
    states[1] = at(1, (3, 0))
    assert causes(states, 3) == ["rank 1, grads-reduce: busy alone. It waits for nobody."]
    del states[1]
    (cause,) = causes(states, 3)
    assert cause.startswith("rank 1: silent")


def test_ranks_that_wait_for_each_other() -> None:
    circle = {rank: at(rank, (4, 2), needs=(AwaitedRank((rank + 1) % 3, (4, 3)),)) for rank in range(3)}
    (cause,) = causes(circle, 3)
    assert cause.startswith("a circle: rank 0 waits for rank 1 waits for rank 2 waits for rank 0.")


def test_tensor_parallel_ranks_in_one_op() -> None:
    together = {rank: at(rank, (4, 2), "runs 1F0", needs=(AwaitedRank(1 - rank, (4, 2)),)) for rank in range(2)}
    (cause,) = causes(together, 2)
    assert cause.startswith("ranks 0-1, grads-reduce: runs 1F0. Nobody they wait for is behind")
    behind = {**together, 1: at(1, (4, 1), "runs 1F9")}
    assert causes(behind, 2) == ["rank 1, grads-reduce: runs 1F9. It waits for nobody."]


def test_a_job_hangs_when_somebody_waits_and_nobody_gets_on() -> None:
    waiting = at(0, (4, 0), together=True)
    busy = at(1, (3, 0))
    assert stalled([waiting, busy])
    assert not stalled([waiting, replace(busy, waited=29.0)])  # has just done something
    assert not stalled([waiting, replace(busy, limit=500.0)])  # does what may take long
    assert not stalled([waiting, replace(busy, limit=float("inf"))])
    assert not stalled([busy, replace(busy, rank=2)])  # nobody waits: ops that take long
    assert State.from_json(replace(busy, limit=float("inf")).to_json()).limit == float("inf")
