"""Zero bubble schedules: the papers' figures, memory, and never worse than 1F1B or torch's programs."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from helixpipe.common.errors import ScheduleError
from helixpipe.costs.by_hand import PieceTimes
from helixpipe.costs.hardware import find_hardware
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import Layout, find_model
from helixpipe.lowering.lower import lower
from helixpipe.planning.memory.early import peak_memory
from helixpipe.planning.order import zero_bubble
from helixpipe.planning.order.list_scheduling import Rules, greedy
from helixpipe.planning.order.problem import problem
from helixpipe.program.costs import Contents, Costs
from helixpipe.program.program import Op, Program
from helixpipe.program.stages import even_stages
from helixpipe.program.text import parse_rows
from helixpipe.program.workload import Slice, Workload, uniform
from helixpipe.simulate.simulator import Simulation, simulate
from schedules import Shape, build
from schedules import command as cli
from schedules.zero_bubble import ZeroBubbleOptions
from tests.lowering.random_programs import random_costs
from tests.selection import graded

EQUAL = PieceTimes({"mlp": 1.0})  # F = I = W = 1 a layer
LONG = PieceTimes({"qkv": 1, "attn": 10, "mlp": 2})  # F = 13, I = 1 + 20 + 2, W = 1 + 0 + 2
SLOW = PieceTimes({"mlp": 1.0}, message=0.2)
NAMES = ("zb1p", "zb2p", "zbv")


def run(name: str, p: int, m: int, costs: PieceTimes | None, limit: int | None = None, layers: int = 2) -> Simulation:
    """`layers` a rank. The schedule is found from the costs; without costs it is simulated with equal ones."""
    program = build(name, Shape(p, m, layers * p, costs=costs), ZeroBubbleOptions(limit) if name in NAMES else None)
    return simulate(lower(program, costs or EQUAL), costs or EQUAL)


def interleaved(name: str, p: int, m: int, costs: PieceTimes, v: int = 2, limit: int | None = None) -> Simulation:
    """One layer a stage."""
    options = ZeroBubbleOptions(limit) if name == "zb-interleaved" else None
    program = build(name, Shape(p, m, p * v, virtual_stages=v, costs=costs), options)
    return simulate(lower(program, costs), costs)


# ----------------------------------------------------------------------------------------------------------- figures


def test_the_figures_of_the_papers() -> None:
    """p = 4, m = 8, F = I = W = 1 a rank."""
    zb1p, zb2p = (run(name, 4, 8, EQUAL, layers=1) for name in ("zb1p", "zb2p"))
    zbv = run("zbv", 4, 8, PieceTimes({"mlp": 0.5}))
    one = run("1f1b", 4, 8, EQUAL, layers=1)
    assert (one.bubble_time, one.shifted_bubble_time) == (9, 9)
    assert (zb1p.bubble_time, zb1p.shifted_bubble_time) == (3, 3)  # (p-1)(F+I-W)
    assert (zb2p.bubble_time, zb2p.shifted_bubble_time) == (3, 0)  # the last rank starts at (p-1)F; none idles later
    assert (zbv.bubble_time, zbv.shifted_bubble_time) == (1.5, 0)
    assert max(zb1p.peak_activation) <= 4 and max(zb2p.peak_activation) <= 8
    assert max(zbv.peak_activation) <= 4 * 2  # microbatches x layers of a rank


@pytest.mark.parametrize("costs", [EQUAL, None], ids=["costs", "none"])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 6])
def test_closed_forms_for_equal_costs(p: int, costs: PieceTimes | None) -> None:
    for m in (p, 2 * p, 3 * p + 1):
        assert run("zb1p", p, m, costs, layers=1).bubble_time == pytest.approx(p - 1)
        assert run("zbv", p, m, costs).bubble_time == pytest.approx(p - 1)  # (p-1)F/2 with F = 2
        if m >= 2 * p:
            assert run("zb2p", p, m, costs).shifted_bubble_time == pytest.approx(0)
            assert run("zbv", p, m, costs).shifted_bubble_time == pytest.approx(0)


@pytest.mark.parametrize("p", graded([2, 4, 8], (2, 4)))
def test_long_sequences(p: int) -> None:
    """Attention has no W: zb1p's bubble is (p-1)(t_pre + 3 t_attn + t_post)L/p, as HelixPipe's analysis has it."""
    for m in (p, 3 * p):
        bubbles = {name: run(name, p, m, LONG).bubble_time for name in ("1f1b", *NAMES)}
        assert bubbles["zb1p"] <= (p - 1) * (1 + 3 * 10 + 2) * 2
        assert bubbles["zbv"] < bubbles["zb2p"] <= bubbles["zb1p"] < bubbles["1f1b"]


# ------------------------------------------------------------------------------------------------- laws for any costs


def check(name: str, p: int, m: int, costs: PieceTimes, limit: int | None) -> None:
    result = run(name, p, m, costs, limit)
    allowed = limit if limit is not None else 2 * p if name == "zb2p" else p
    assert max(result.peak_activation) <= allowed * 2 + 1e-9
    assert {op.kind for ops in result.lowered.program.ranks for op in ops} == set("FIW")
    if allowed >= min(p, m):  # 1F1B's memory
        one = run("1f1b", p, m, costs)
        assert result.makespan <= one.makespan * (1 + 1e-9) + 1e-9
    stages = result.lowered.program.stages
    homes = {op.stage: rank for rank, ops in enumerate(result.lowered.program.ranks) for op in ops}
    placed = tuple(homes[stage] for stage in range(len(stages)))
    makespan, span = problem(name, stages, placed, uniform(m), allowed, costs).lower_bounds()
    assert result.makespan >= makespan * (1 - 1e-9)
    assert result.shifted_bubble_time + result.ideal >= span * (1 - 1e-9)


@settings(max_examples=60)
@given(name=st.sampled_from(NAMES), p=st.integers(1, 5), m=st.integers(1, 11), seed=st.integers(0, 2**32))
def test_never_worse_than_1f1b_and_within_memory(name: str, p: int, m: int, seed: int) -> None:
    rng = Random(seed)
    drawn = random_costs(rng)
    costs = PieceTimes(drawn.forward, max(drawn.backward_ratio, 1.0), drawn.message)
    check(name, p, m, costs, rng.choice((None, None, 1, 2, p, 2 * p)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("costs", [EQUAL, LONG, SLOW, PieceTimes({"mlp": 1.0}, message=50.0)])
def test_few_microbatches_and_small_limits(name: str, costs: PieceTimes) -> None:
    for p, m in ((1, 1), (1, 5), (4, 1), (4, 2), (5, 3)):
        for limit in (None, 1, 2, 100):
            check(name, p, m, costs, limit)


def test_slow_messages_straighten_the_v() -> None:
    def rank_of_last_stage(message: float) -> int:
        ranks = build("zbv", Shape(4, 8, 8, costs=PieceTimes({"mlp": 1.0}, message=message))).ranks
        return next(rank for rank, ops in enumerate(ranks) for op in ops if op.stage == 7)

    assert (rank_of_last_stage(0.2), rank_of_last_stage(50.0)) == (0, 3)


@settings(max_examples=20)
@given(rows=st.lists(st.integers(1, 9), min_size=1, max_size=8), message=st.sampled_from((0.0, 0.2, 50.0)))
def test_steps_of_unlike_microbatches_all_have_the_v(rows: list[int], message: float) -> None:
    """However slow messages are: one step's rows do not decide where the weights are in the next."""
    ragged = Workload(tuple(((Slice(row, 0, tokens),),) for row, tokens in enumerate(rows)))
    costs = PieceTimes({"mlp": 1.0}, message=message)
    program = build("zbv", Shape(4, len(rows), 8, costs=costs, ragged=ragged))
    assert [sorted({op.stage for op in ops}) for ops in program.ranks] == [[0, 7], [1, 6], [2, 5], [3, 4]]


@pytest.mark.parametrize("name", NAMES)
def test_the_unit_of_time_does_not_matter(name: str) -> None:
    plain = run(name, 3, 6, LONG).makespan
    for scale in (1e-6, 1e6):
        scaled = PieceTimes({kind: time * scale for kind, time in LONG.forward.items()})
        assert run(name, 3, 6, scaled).makespan == pytest.approx(plain * scale)


@pytest.mark.parametrize("name", NAMES)
def test_a_search_cut_short_is_still_not_worse(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for budget in (-1, 0, 1000):
        monkeypatch.setattr(zero_bubble, "BUDGET", budget)
        for costs in (EQUAL, LONG, SLOW):
            check(name, 4, 8, costs, None)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_refused(limit: int) -> None:
    for name in (*NAMES, "zb-interleaved"):
        with pytest.raises(ScheduleError, match=f"^--zb-max-inflight {limit} must be at least 1\\.$"):
            build(name, Shape(2, 2, 4), ZeroBubbleOptions(limit))


def test_greedy_scheduling_says_when_a_fixed_order_does_not_fit() -> None:
    given = problem("test", even_stages(1, 1), (0,), uniform(2), 1, EQUAL)
    order = tuple(Op(kind, 0, microbatch) for kind in "FI" for microbatch in range(2))
    assert greedy(given, Rules(order=(order,))) is None
    found = greedy(given, Rules(prefer=(("F", 0), ("I", 0))))
    assert found is not None and [str(op) for op in found.ranks[0]] == ["0F0", "0I0", "0W0", "0F1", "0I1", "0W1"]
    assert (found.makespan, found.span, found.memory) == (6, 6, 1)


# -------------------------------------------------------------------------------------------------------------- memory


@dataclass(frozen=True)
class Deferring(PieceTimes):
    """A unit keeps 1 from F to I and `kept` from I to W."""

    kept: float = 0.5

    def size(self, contents: Contents) -> float:
        return {"saved": 1.0, "deferred": self.kept}.get(contents.kind, 0.0)


@pytest.mark.parametrize(("kept", "peak"), [(0.0, 1.0), (0.5, 1.5), (1.0, 2.0), (3.0, 6.0)])
def test_what_w_needs_counts_until_w(kept: float, peak: float) -> None:
    rows = parse_rows([["0F0", "0I0", "0F1", "0I1", "0W0", "0W1"]])
    costs: Costs = Deferring(kept=kept)
    assert simulate(lower(Program("split", even_stages(1, 1), rows, uniform(2))), costs).peak_activation == [peak]


@pytest.mark.parametrize("kept", [0.0, 0.25, 1.0, 3.0])
def test_the_limit_counts_what_w_needs(kept: float) -> None:
    costs = Deferring({"mlp": 1.0}, kept=kept)
    one = run("1f1b", 4, 8, costs)
    for name, stages in (("zb1p", 1), ("zbv", 2)):
        result = run(name, 4, 8, costs)
        assert max(result.peak_activation) <= 4 * stages * max(1.0, kept)
        assert result.makespan <= one.makespan


# -------------------------------------------------------------------------------------------- against torch's programs


def torch_program(kind: type[Any], p: int, m: int) -> Program:
    """The order of ops of a schedule of torch.distributed.pipelining with two stages a rank."""
    made = object.__new__(kind)
    sizes = {"pp_group_size": p, "_n_microbatches": m, "n_local_stages": 2, "number_of_rounds": max(1, m // p)}
    for name, value in {**sizes, "microbatches_per_round": m // sizes["number_of_rounds"]}.items():
        setattr(made, name, value)
    made._num_stages = 2 * p
    rows = [[str(cell) for cell in made._calculate_single_rank_operations(rank) if cell] for rank in range(p)]
    return Program(kind.__name__, even_stages(2 * p, 2 * p), parse_rows(rows), uniform(m))


@pytest.mark.parametrize("costs", [EQUAL, LONG, SLOW], ids=["equal", "long", "slow"])
@pytest.mark.parametrize("p", [2, 4])
def test_not_worse_than_torch(p: int, costs: PieceTimes, monkeypatch: pytest.MonkeyPatch) -> None:
    for m in (p, 2 * p, 4 * p):
        ours = run("zbv", p, m, costs)
        for kind in (torch_schedules.ScheduleZBVZeroBubble, torch_schedules.ScheduleInterleavedZeroBubble):
            monkeypatch.setattr(kind, "num_stages", 2 * p, raising=False)
            theirs = simulate(lower(torch_program(kind, p, m), costs), costs)
            assert max(ours.peak_activation) <= 2 * p
            assert kind is torch_schedules.ScheduleZBVZeroBubble or max(theirs.peak_activation) == 2 * p
            if kind is torch_schedules.ScheduleInterleavedZeroBubble and costs is LONG:
                continue  # its placement is better there; see the next test
            assert ours.makespan <= theirs.makespan + 1e-9


@pytest.mark.parametrize("p", graded([2, 4, 8], (2, 4)))
def test_no_v_is_faster_for_long_sequences(p: int) -> None:
    """With this memory and this placement nothing can beat what is found."""
    ours = run("zbv", p, 2 * p, LONG)
    homes = (*range(p), *reversed(range(p)))
    bound, _ = problem("zbv", even_stages(2 * p, 2 * p), homes, uniform(2 * p), p, LONG).lower_bounds()
    assert ours.makespan == pytest.approx(bound)


# -------------------------------------------------------------------------------------------------------- interleaved


@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_interleaved_closed_forms(p: int, v: int) -> None:
    """(p-1)(F+I-W)/v: F = I = W = v a rank; for long sequences, where the default memory allows less, F = 13v, I = 23v
    and W = 3v."""
    for m in (p, 2 * p, 3 * p):
        assert interleaved("zb-interleaved", p, m, EQUAL, v).bubble_time == pytest.approx(p - 1)
        assert interleaved("zb-interleaved", p, m, LONG, v).bubble_time <= (p - 1) * (13 + 23 - 3) + 1e-9


@settings(max_examples=40)
@given(p=st.integers(1, 5), groups=st.integers(1, 4), v=st.integers(1, 3), seed=st.integers(0, 2**32))
def test_interleaved_is_never_worse_than_interleaved_1f1b(p: int, groups: int, v: int, seed: int) -> None:
    drawn = random_costs(Random(seed))
    costs = PieceTimes(drawn.forward, max(drawn.backward_ratio, 1.0), drawn.message)
    ours, theirs = (interleaved(name, p, p * groups, costs, v) for name in ("zb-interleaved", "interleaved-1f1b"))
    assert ours.makespan <= theirs.makespan * (1 + 1e-9) + 1e-9
    assert max(ours.peak_activation) <= max(theirs.peak_activation) + 1e-9


@pytest.mark.parametrize("costs", [EQUAL, LONG, SLOW, PieceTimes({"mlp": 1.0}, message=50.0)])
def test_interleaved_with_any_number_of_microbatches_and_small_limits(costs: PieceTimes) -> None:
    for p, m in ((1, 1), (1, 5), (4, 1), (4, 2), (4, 7), (5, 3)):
        for limit, v in ((1, 2), (2, 2), (100, 2), (1, 3)):
            result = interleaved("zb-interleaved", p, m, costs, v, limit)
            assert max(result.peak_activation) <= limit * v + 1e-9
            homes = {(op.stage, rank) for rank, ops in enumerate(result.lowered.program.ranks) for op in ops}
            assert homes == {(stage, stage % p) for stage in range(p * v)}


@pytest.mark.parametrize("costs", [EQUAL, LONG, SLOW], ids=["equal", "long", "slow"])
@pytest.mark.parametrize("p", graded([2, 4, 8], (2, 4)))
def test_interleaved_is_not_worse_than_torch_with_its_memory(p: int, costs: PieceTimes) -> None:
    for m in (p, 2 * p, 4 * p):
        ours = interleaved("zb-interleaved", p, m, costs, limit=p)
        theirs = simulate(lower(torch_program(torch_schedules.ScheduleInterleavedZeroBubble, p, m), costs), costs)
        assert max(ours.peak_activation) <= max(theirs.peak_activation) == 2 * p
        assert ours.makespan <= theirs.makespan + 1e-9


def test_interleaved_beats_the_v_where_attention_is_long() -> None:
    """p = 4, m = 8, two layers a rank."""
    assert run("zbv", 4, 8, LONG).bubble_time == 117
    with_its_memory, by_default = (interleaved("zb-interleaved", 4, 8, LONG, limit=limit) for limit in (4, None))
    assert (with_its_memory.bubble_time, max(with_its_memory.peak_activation)) == (99, 8)
    assert (by_default.bubble_time, max(by_default.peak_activation)) == (90, 11)


# --------------------------------------------------------------------------------------------------------- the command


def test_the_command_finds_schedules_from_its_costs(capsys: pytest.CaptureFixture[str]) -> None:
    size = ["-p", "4", "-m", "8", "-L", "4", "--json", "--order"]
    assert cli.main(["simulate", "zb1p", *size, "--piece-times", "pre=1,attn=10,post=2"]) == 0
    long = json.loads(capsys.readouterr().out)
    assert long["bubble_time"] <= 3 * 33
    assert long["order"] == [[str(op) for op in ops] for ops in build("zb1p", Shape(4, 8, 4, costs=LONG)).ranks]
    assert cli.main(["simulate", "zb1p", *size, "--piece-times", "mlp=1", "--zb-max-inflight", "7"]) == 0
    assert max(json.loads(capsys.readouterr().out)["peak_activation"]) <= 7


@pytest.mark.parametrize(
    "name", graded(["zb1p", "zb2p", "zbv", "zb-interleaved", "seq1f1b-zb"], ["zb1p", "zbv", "seq1f1b-zb"])
)
def test_a_rank_keeps_to_its_memory(name: str) -> None:
    """In bytes W keeps more than I did (gathered inputs with sequence parallelism); F leave room for one I."""
    layout = Layout(8, sequence_parallel=True)
    costs = ModelCosts(find_model("helix-7b"), find_hardware("h20"), layout, 131072)
    chunks = 4 if name == "seq1f1b-zb" else 1
    free = build(name, Shape(4, 8, 16, chunks, costs=costs))
    most = max(peak_memory(free, costs))
    fastest = simulate(lower(free, costs), costs).makespan
    for share in (1.3, 0.8, 0.7):
        limit = share * most
        program = build(name, Shape(4, 8, 16, chunks, costs=costs, memory_limit=limit))
        assert max(peak_memory(program, costs)) <= limit * (1 + 1e-9)
        assert share < 1 or simulate(lower(program, costs), costs).makespan == pytest.approx(fastest)


@pytest.mark.parametrize("name", graded(["zbv", "zb-interleaved", "seq1f1b-zb"], ["zb-interleaved"]))
def test_the_limit_is_kept_to_wherever_one_microbatch_fits(name: str) -> None:
    """Also where messages lie about in larger numbers than the search reckoned with, as between interleaved stages."""
    costs = ModelCosts(find_model("helix-7b"), find_hardware("h20"), Layout(8, sequence_parallel=True), 131072)
    shape = Shape(3, 5, 12, 4 if name == "seq1f1b-zb" else 1, costs=costs)
    free, one = (build(name, each) for each in (shape, replace(shape, memory_limit=1.0)))
    most, least = (max(peak_memory(program, costs)) for program in (free, one))
    fastest, slowest = (simulate(lower(program, costs), costs).makespan for program in (free, one))
    assert least < 0.75 * most
    for share in (0.0, 0.5):
        limit = least + share * (most - least)
        program = build(name, replace(shape, memory_limit=limit))
        assert max(peak_memory(program, costs)) <= limit * (1 + 1e-9)
    assert fastest <= simulate(lower(program, costs), costs).makespan < slowest
