"""WeiPipe: the orders, bubbles eager and turn by turn, how much travels, memory."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixpipe.common.errors import ProgramError, ScheduleError
from helixpipe.costs.by_hand import PieceTimes
from helixpipe.costs.hardware import HARDWARE, Efficiency
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import MODELS, Layout
from helixpipe.lowering.lower import lower
from helixpipe.lowering.validate import untrainable, validate
from helixpipe.planning.memory.early import peak_memory
from helixpipe.planning.memory.recompute import RecomputeOptions
from helixpipe.program.program import Op, Program
from helixpipe.program.stages import Piece
from helixpipe.program.text import format_rows, from_csv, to_csv
from helixpipe.simulate.memory import rank_memory
from helixpipe.simulate.simulator import Simulation, simulate
from schedules import Shape, build
from schedules.weipipe import WeipipeOptions
from tests.cli.commands import run as run_command
from tests.cli.commands import run_json
from tests.costs.asking import message_bytes
from tests.lowering.rendezvous import Machine

NAMES = ("weipipe-naive", "weipipe", "wzb1", "wzb2")
PAPER = Shape(8, 32, 8)
"""8 ranks, 32 microbatches, a layer a stage: forward 1, backward 2, a rank works for 96."""


def run(name: str, message: float = 0.0, shape: Shape = PAPER, **options: object) -> Simulation:
    costs = PieceTimes({"mlp": 1.0}, 2.0, message)
    return simulate(lower(build(name, shape, WeipipeOptions(**options)), costs), costs)


def efficiency(simulation: Simulation) -> float:
    return round(1 - simulation.bubble_ratio, 3)


# --------------------------------------------------------------------------------------------------------------- order

ORDERS = {
    "weipipe-naive": "0F0 1F0 2F0 3F0 3B0 2B0 1B0 0B0 0F2 1F2 2F2 3F2 3B2 2B2 1B2 0B2",
    "weipipe": "0F0 1F0 2F0 3F0 3B0 2B0 0F2 1F2 1B0 0B0 2F2 3F2 3B2 2B2 1B2 0B2",
    "wzb1": "0F0 1F0 2F0 3F0 3B0 2I0 0F2 1F2 2W0 2F2 3F2 3B2 1I0 0B0 1W0 2I2 1I2 0B2 2W2 1W2",
    "wzb2": "0F0 1F0 2F0 3F0 3B0 2I0 1I0 0B0 1W0 2W0 0F2 1F2 2F2 3F2 3B2 2I2 1I2 0B2 1W2 2W2",
}


@pytest.mark.parametrize("name", NAMES)
def test_the_order(name: str) -> None:
    """p = 2, two microbatches a rank: embedding 0, ring stages 1 and 2, head 3."""
    program = build(name, Shape(2, 4, 2))
    assert " ".join(format_rows(program)[0]) == ORDERS[name]
    other = [op._replace(microbatch=op.microbatch + 1) for op in program.ranks[0]]
    assert list(program.ranks[1]) == other


@pytest.mark.parametrize("name", NAMES)
def test_any_number_of_microbatches_and_layers(name: str) -> None:
    for p in (1, 2, 3, 4, 5):
        for m in (1, p - 1 or 1, p, p + 1, 2 * p + 1):
            program = build(name, Shape(p, m, p + m % 3))
            validate(program)
            assert {op.microbatch % p for op in program.ranks[0]} == {0}
            assert Machine(lower(program), Random(m), blocking=m % 2 == 1).run()
            sizes = [len(stage.pieces) // 5 for stage in program.stages[1:-1]]
            assert sum(sizes) == p + m % 3 and max(sizes) - min(sizes) <= 1
    with pytest.raises(ScheduleError, match=re.escape("--num-layers 3 cannot be divided over 4 pipeline ranks")):
        build(name, Shape(4, 4, 3))


@pytest.mark.parametrize("name", NAMES)
def test_recomputation(name: str) -> None:
    """All of it is inside the backwards, whose gradients never come from another rank; R ops run as well."""
    program = build(name, replace(Shape(3, 7, 4), recompute=RecomputeOptions("full")))
    assert all(stage.recompute for stage in program.stages[1:-1])
    assert not [op for ops in program.ranks for op in ops if op.kind == "R"]
    again = tuple(
        tuple(each for op in ops for each in ([op._replace(kind="R"), op] if inside(program, op) else [op]))
        for ops in program.ranks
    )
    for each in (program, replace(program, ranks=again)):
        assert Machine(lower(each), Random(0)).run()


def inside(program: Program, op: Op) -> bool:
    """Whether it is a backward that recomputes."""
    return op.kind in "BI" and bool(program.stages[op.stage].recompute)


def test_slots_are_at_least_one() -> None:
    with pytest.raises(ScheduleError, match=r"^--weipipe-slots 0 must be at least 1\.$"):
        build("weipipe", PAPER, WeipipeOptions(weipipe_slots=0))


@pytest.mark.parametrize("p", [2, 3, 4])
def test_what_a_rank_holds_does_not_depend_on_the_microbatches(p: int) -> None:
    """So the batch may grow from one microbatch on: ranks that run none hold embedding and head as the others do."""
    for name in NAMES:
        full = build(name, Shape(p, 2 * p, 2 * p + 1))
        assert untrainable(full) is None
        for m in range(1, 2 * p):
            program = build(name, Shape(p, m, 2 * p + 1))
            for rank in range(p):
                assert program.pieces_of_rank(rank) == full.pieces_of_rank(rank)
                assert program.copies(rank) == full.copies(rank) == {Piece("embed"): rank, Piece("head"): rank}


# ------------------------------------------------------------------------------------------------------------- bubbles


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("slots", [2, 3, 6])
def test_eager_ranks_lag_by_a_message(name: str, slots: int) -> None:
    """The last rank starts p-1 messages late and its last gradients take one, but in wzb2, whose last are its own:
    0.992 and 0.960 of 96 / (96 + 8t)."""
    messages = 7 if name == "wzb2" else 8
    for message in (0.0, 0.1, 0.5):
        result = run(name, message, weipipe_slots=slots)
        assert result.busy == [96] * 8
        assert result.bubble_time == pytest.approx(messages * message)
    assert efficiency(run(name, 0.1, weipipe_slots=slots)) == (0.993 if name == "wzb2" else 0.992)
    assert efficiency(run(name, 0.5, weipipe_slots=slots)) == (0.965 if name == "wzb2" else 0.960)


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_wzb2s_gradients_are_home_when_their_owner_ends(p: int) -> None:
    """So it can change the weights and go on: the next step needs stage 0's first, which are those of rank 0."""
    program = build("wzb2", Shape(p, 2 * p, p))
    for message in (0.0, 0.1, 0.5):
        timeline = run("wzb2", message, shape=Shape(p, 2 * p, p)).timeline
        ends = [max(event.end for event in timeline.ops if event.rank == rank) for rank in range(p)]
        home = {
            program.stages[event.producer.stage].owner: event.end
            for event in sorted(timeline.messages, key=lambda event: event.end)
            if event.kind == "weight_gradients" and event.target == program.stages[event.producer.stage].owner
        }
        assert ends == sorted(ends)
        assert all(end <= ends[owner or 0] + 1e-9 for owner, end in home.items())


def test_as_many_slots_as_help_and_fit() -> None:
    """Llama 7B over one GPU a node and 1.25 GB/s: 3 slots send a stage's weights for nearly every op."""
    hardware = replace(HARDWARE["a800"], gpus_per_node=1, efficiency=Efficiency(network=0.1))
    costs = ModelCosts(MODELS["llama2-7b"], hardware, Layout(), 4096)
    # What is recomputed early would take memory that is left, after slots were chosen.
    shape = Shape(8, 32, 32, costs=costs, recompute=RecomputeOptions("full", recompute_early=False))
    enough = max(peak_memory(build("weipipe", shape, WeipipeOptions(weipipe_slots=7)), costs))
    for limit, slots in ((None, 3), (1.0, 3), (enough * 0.99, 6), (enough, 7)):
        assert build("weipipe", replace(shape, memory_limit=limit)).ring.slots == slots
    alike = replace(shape, costs=PieceTimes({"mlp": 1.0}), memory_limit=1e9)
    assert build("weipipe", alike).ring.slots == 3, "more do not help where messages take no time"
    one = WeipipeOptions(weipipe_slots=1)
    assert build("weipipe", replace(shape, memory_limit=enough), one).ring.slots == 1
    assert build("weipipe", replace(shape, ranks=1, memory_limit=enough)).ring.slots == 3


def test_one_f_one_b_beside_it() -> None:
    assert [efficiency(run_1f1b(message)) for message in (0.0, 0.1, 0.5)] == [0.821, 0.775, 0.636]


def run_1f1b(message: float) -> Simulation:
    costs = PieceTimes({"mlp": 1.0}, 2.0, message)
    return simulate(lower(build("1f1b", PAPER), costs), costs)


def bubble(name: str, p: int, m: int, ratio: float, **options: object) -> float:
    """The bubble with a layer a stage, F = 1, B = ratio and messages that take no time."""
    costs = PieceTimes({"mlp": 1.0}, ratio, 0.0)
    program = build(name, Shape(p, m, p), WeipipeOptions(**options))
    assert validate(program).program.turns == program.turns
    return simulate(lower(program, costs), costs).bubble_time


@pytest.mark.parametrize(
    ("p", "m"),
    [(2, 5), (3, 7), (4, 32), (4, 33), (8, 32), (8, 61)]
    + [pytest.param(p, m, marks=pytest.mark.thorough) for p in (4, 8) for m in (9, 48, 64, 128, 255, 256)],
)
def test_turn_by_turn_weipipe_idles_as_1f1b_does(p: int, m: int) -> None:
    """(p-1)(F+B), however many microbatches there are beyond p: the paper's closed form."""
    for ratio in (1.0, 2.0, 3.0):
        assert bubble("weipipe", p, m, ratio, weipipe_eager=False) == (p - 1) * (1 + ratio)


@pytest.mark.parametrize("p", [2, 3, 5, 8])
def test_closed_forms(p: int) -> None:
    """No bubble with messages that take no time; turn by turn what the schedules' docstrings say."""
    for ratio, rounds in ((1.0, 1), (2.0, 3), (3.0, 2)):
        assert [bubble(name, p, rounds * p, ratio) for name in NAMES] == [0, 0, 0, 0]
        naive = bubble("weipipe-naive", p, rounds * p, ratio, weipipe_eager=False)
        assert naive == (p - 1) * (1 + rounds * (ratio - 1))
    assert bubble("weipipe", p, p, 2.0, weipipe_eager=False) == (p - 1) * 2
    assert bubble("wzb2", p, 3 * p, 2.0, weipipe_eager=False) == p - 1
    if p % 4 == 0:
        assert bubble("wzb1", p, 3 * p, 2.0, weipipe_eager=False) == 2 * (p - 1)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32))
def test_no_rank_begins_a_turn_before_all_have_ended_the_one_before(seed: int) -> None:
    """The machine checks it. Whatever pieces and messages take, with chunks and few slots."""
    rng = Random(seed)
    p, chunks = rng.randint(2, 5), rng.randint(1, 3)
    shape = Shape(p, rng.randint(1, 3 * p), p + rng.randint(0, 3), chunks=chunks)
    options = WeipipeOptions(weipipe_eager=False, weipipe_slots=rng.randint(1, 4))
    program = build(rng.choice(NAMES), shape, options)
    assert {ops[-1] for ops in program.ranks if ops} <= {op for ends in program.turns for op in ends}
    for costs in (None, PieceTimes({"mlp": rng.random(), "attn": rng.random()}, 1 + rng.random(), rng.random())):
        assert Machine(lower(program, costs), rng, blocking=rng.random() < 0.5).run()


def test_turns_that_are_none_are_refused() -> None:
    program = build("weipipe", Shape(2, 4, 2), WeipipeOptions(weipipe_eager=False))
    first, second, *others = program.turns
    on_one_rank = tuple(op for ends in (first, second) for op in ends if op in program.ranks[0])
    for turns, fault in (
        ([(Op("F", 7, 0),)], r"turn 0 ends with 7F0, which no rank runs\."),
        ([second, first], r"turn 1 ends with .*, which rank 0 runs before the end of a turn before\."),
        ([first, (), second], r"turn 1 has no ops; it must name the last op of each rank that runs any in it\."),
        ([on_one_rank, *others], r"turn 0 must name one op of rank 0, the last that it runs in the turn\."),
        ([first, second], r"rank 0 runs 2B0 after the last turn; turns must hold all ops\."),
        ([first], r"rank 0 runs 2F0 after the last turn; turns must hold all ops\."),
    ):
        with pytest.raises(ProgramError, match=f"^{fault}$"):
            validate(replace(program, turns=tuple(turns)))


# ------------------------------------------------------------------------------------------------------------- volumes


@pytest.mark.parametrize(
    ("name", "slots", "weights"),
    [
        ("weipipe-naive", 3, 1.09),
        ("weipipe", 1, 1.54),
        ("weipipe", 3, 1.17),
        ("wzb1", 3, 1.44),
        ("wzb2", 3, 1.09),
        ("weipipe-naive", 6, 0.44),
        ("weipipe", 6, 0.60),
    ],
)
def test_volumes(name: str, slots: int, weights: float) -> None:
    """Stages of weights and of gradients that travel for one stage of a microbatch, forward and backward: 2 and 1 in
    the paper. A rank needs no message for its own, and finds some where they still are."""
    for eager in (True, False):
        result = run(name, weipipe_eager=eager, weipipe_slots=slots)
        counts = Counter(message.kind for message in result.lowered.messages)
        assert round(counts["weights"] / (32 * 8), 2) == weights < 2
        assert counts["weight_gradients"] == 32 * 7


def test_with_room_for_all_they_travel_once() -> None:
    counts = Counter(message.kind for message in run("weipipe", weipipe_slots=7).lowered.messages)
    assert counts == {"weights": 8 * 7, "weight_gradients": 8 * 7}


@pytest.mark.parametrize("name", NAMES)
def test_messages_go_to_the_next_rank_but_at_the_ends(name: str) -> None:
    """Rank 0 gets its copies from their owners, a few from the last rank, which sends its sums to them."""
    for message in run(name, 0.1).lowered.messages:
        owner = build(name, PAPER).stages[message.producer.stage].owner
        if message.kind == "weights":
            assert message.source in ({owner, 7} if message.target == 0 else {message.target - 1})
        else:
            assert message.target in ({owner} if message.source == 7 else {message.source + 1})


def test_half_the_bytes() -> None:
    costs = ModelCosts(MODELS["llama2-7b"], HARDWARE["a800"], Layout(), 4096)
    sizes = []
    for dtype in ("fp32", "bf16"):
        program = build("weipipe", Shape(8, 8, 32), WeipipeOptions(weipipe_grad_dtype=dtype))
        messages = lower(program).messages
        sizes.append({message.kind: message_bytes(costs, program, message) for message in messages})
    assert sizes[0]["weight_gradients"] == 2 * sizes[1]["weight_gradients"] == 2 * sizes[0]["weights"]


# -------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(("name", "peak"), [("weipipe-naive", 8), ("weipipe", 8), ("wzb1", 12), ("wzb2", 8)])
def test_every_rank_keeps_as_much(name: str, peak: float) -> None:
    """A microbatch of all layers; wzb1 half of one more."""
    assert run(name).peak_activation == [peak] * 8


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("recompute", [None, "full"])
def test_memory_is_balanced(name: str, recompute: str | None) -> None:
    costs = ModelCosts(MODELS["llama2-7b"], HARDWARE["a800"], Layout(), 32768)
    options = RecomputeOptions(recompute)
    lowered = lower(build(name, Shape(8, 32, 32, costs=costs, recompute=options)), costs)
    totals = [rank_memory(lowered, costs, rank).total for rank in range(8)]
    sums = [rank_memory(lowered, costs, rank).messages for rank in range(8)]  # their buffers from the RECV on
    assert max(totals) < 1.21 * min(totals)
    assert max(total - on_way for total, on_way in zip(totals, sums, strict=True)) < 1.05 * min(totals)


# ----------------------------------------------------------------------------------------------------- command, files


@pytest.mark.parametrize("name", NAMES)
def test_commands(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, size = tmp_path / "ring.json", "-p 3 -m 7 -L 5"
    options = "--no-weipipe-eager --weipipe-grad-dtype bf16 --weipipe-slots 2"
    made = run_json(capsys, f"simulate {name} {size} {options} --save-program {file}")
    assert made["schedule"] == name and made["layers"] == 5
    checked = run_json(capsys, f"check {file}")
    assert (checked["stages"], checked["ranks"], checked["trainable"]) == (5, 3, True)
    assert name in run_command(capsys, "list")
    run_command(capsys, f"draw {name} {size} --output {tmp_path / 'ring.png'}")
    memory = run_json(capsys, f"memory {name} --model llama2-7b -p 8 --hardware a800")
    assert len(memory["memory"]) == 8


def test_a_file_is_a_ring_where_microbatches_stay(tmp_path: Path) -> None:
    path = tmp_path / "ring.csv"
    ours = build("wzb1", Shape(3, 6, 6))
    to_csv(ours, path)
    loaded = from_csv(path, 6)
    assert (loaded.ranks, loaded.stages) == (ours.ranks, ours.stages)
    to_csv(build("1f1b", Shape(2, 4, 2)), path)
    assert [stage.placement for stage in from_csv(path).stages] == ["resident"] * 2
