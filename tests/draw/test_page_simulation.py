"""The page's simulator beside Python's: every schedule, its own times and others."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from helixpipe.costs.by_hand import PieceTimes
from helixpipe.costs.hardware import find_hardware
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import Chunk, Layout, find_model
from helixpipe.draw.page import scripts
from helixpipe.draw.page_data import knobs, panel_data
from helixpipe.planning.memory.sharding import shared_out
from helixpipe.program.costs import Load
from helixpipe.program.program import Program
from helixpipe.simulate.simulator import Simulation, simulate
from schedules import CATALOGUE, Shape, build
from schedules.sppo import SppoOptions
from tests.draw.chromium import browser, installed
from tests.draw.pages import COSTS, HAS_NODE, node, of
from tests.simulate.pairs import in_pairs
from tests.simulate.test_copying import leaving

OTHERS = PieceTimes({"qkv": 0.3, "attn": 1.7, "mlp": 2.1, "proj": 0.9, "embed": 0.4, "head": 1.3}, 1.4, 0.7, 2.5, 0.2)

RUN = """input.map(({data, knobs, values}) => {
  const program = makeProgram(data);
  const times = timesOf(data, program, values && durationsOf(data, knobs, values));
  return {start: [...times.start], end: [...times.end], makespan: times.makespan, slack: [...slackOf(program, times)],
    path: criticalPath(program, times),
    memory: data.memory.ranks.map((_, rank) => memorySteps(data, times, rank).most)};
})"""


def in_the_page(cases: Sequence[tuple[Simulation, dict[str, float] | None]]) -> list[dict[str, Any]]:
    """Return what the page makes of simulations with the values of knobs; None leaves the times as they are."""
    value = [
        {"data": panel_data(each), "knobs": knobs([each]), "values": values and values_of(each, values)}
        for each, values in cases
    ]
    if HAS_NODE:
        found: list[dict[str, Any]] = node(RUN, value)
        return found
    if installed() is None:
        pytest.skip("there is neither node nor a Chromium to run the page's programs in; tools/browser.sh installs one")
    with browser() as page:
        page.evaluate(scripts(["words.js", "simulate.js"]) + f"\nglobalThis.input = {json.dumps(value)}; 0")
        result: list[dict[str, Any]] = page.evaluate(RUN)
        return result


def values_of(simulation: Simulation, values: dict[str, float]) -> dict[str, float]:
    """Of every knob; those not named as they were."""
    return {knob["name"]: knob["value"] for knob in knobs([simulation])} | values


def times_of(simulation: Simulation) -> dict[int, tuple[float, float]]:
    """Start and end of every task that the timeline has, by its number."""
    graph, timeline = simulation.lowered.graph, simulation.timeline
    transfers = [each for each in graph.transfers if each.kind != "replica_sum"]
    numbers = [*range(graph.num_ops), *map(graph.task, transfers)]
    events: list[Any] = [*timeline.ops, *timeline.messages, *timeline.sharing, *timeline.copies]
    return {task: (event.start, event.end) for task, event in zip(numbers, events, strict=True)}


def programs() -> Iterator[Program]:
    """Every schedule of the catalogue, in chunks where it takes them; copies; weights in parts; keys, values sent;
    pairs."""
    for name, schedule in CATALOGUE.items():
        yield build(name, Shape(1 if schedule.one_rank else 4, 8, 24, chunks=2 if schedule.chunks else 1))
    yield leaving(build("1f1b", Shape(4, 8, 8)), ahead=1, ranks=3)
    yield shared_out(build("zb1p", Shape(4, 8, 8)), 4)
    yield build("sppo", Shape(4, 1, 4, chunks=8), SppoOptions(sppo_multiplex="both"))
    yield in_pairs(build("1f1b", Shape(4, 8, 8)))


@pytest.fixture(scope="module")
def simulations() -> list[Simulation]:
    return [of(program, replace(COSTS, copy=1.5)) for program in programs()]


def test_every_schedule(simulations: list[Simulation]) -> None:
    """The very same times; and the path of ops and transfers to the end has no gap."""
    assert {each.lowered.program.schedule for each in simulations} == set(CATALOGUE)
    for simulation, found in zip(simulations, in_the_page([(each, None) for each in simulations]), strict=True):
        expected = times_of(simulation)
        assert {task: (found["start"][task], found["end"][task]) for task in expected} == expected
        assert found["makespan"] == simulation.makespan
        path, slack = found["path"], found["slack"]
        assert found["start"][path[0]] == 0 and found["end"][path[-1]] == simulation.makespan
        assert all(found["end"][a] == found["start"][b] for a, b in itertools.pairwise(path))
        assert all(abs(slack[task]) < 1e-9 for task in path) and min(slack) > -1e-9
        assert [most[0] for most in found["memory"]] == pytest.approx(simulation.device_needs)
        assert [most[1] for most in found["memory"]] == pytest.approx(simulation.host_needs)


def test_other_times_by_hand(simulations: list[Simulation]) -> None:
    """As Python simulates the same lowered program."""
    values = {**OTHERS.forward, "norm": 0.0, "ratio": 1.4, "message": 0.7, "overhead": 0.2}
    cases = [(each, {**values, **({"copy": 2.5} if each.copies else {})}) for each in simulations]
    for simulation, found in zip(simulations, in_the_page(cases), strict=True):
        again = simulate(simulation.lowered, OTHERS)
        assert found["makespan"] == pytest.approx(again.makespan, rel=1e-12) != simulation.makespan
        expected = times_of(again)
        assert [found["start"][task] for task in expected] == pytest.approx([start for start, _ in expected.values()])


FACTORS = {"attn": 0.5, "message": 3.0}


@dataclass(frozen=True)
class Faster(ModelCosts):
    """Attention takes half as long, messages three times."""

    def piece_time(self, piece: str, op: str, chunk: Chunk, alone: bool = False, shares: int = 1) -> float:
        return super().piece_time(piece, op, chunk, alone, shares) * (0.5 if piece == "attn" else 1.0)

    def transfer_time(self, load: Load) -> float:
        return 3 * super().transfer_time(load)


def test_factors_of_a_model() -> None:
    """Of times that are not given by hand; what recomputes inside its backward among them."""
    arguments = (find_model("llama2-7b"), find_hardware("h20"), Layout(tensor_parallel=4), 16384)
    shapes = {"helix": Shape(4, 8, 8), "zbv": Shape(4, 8, 8), "seq1f1b": Shape(4, 8, 8, chunks=4)}
    made = [of(build(name, shape), ModelCosts(*arguments), "s") for name, shape in shapes.items()]
    found = in_the_page([(each, {"attn": 1.0}) for each in made] + [(each, FACTORS) for each in made])
    assert [each["makespan"] for each in found[:3]] == [each.makespan for each in made]
    again = [simulate(each.lowered, Faster(*arguments)).makespan for each in made]
    assert [each["makespan"] for each in found[3:]] == pytest.approx(again, rel=1e-9)


def test_amounts_add_up_to_the_time() -> None:
    made = of(build("helix", Shape(4, 8, 8)), ModelCosts(find_model("llama2-7b"), find_hardware("h20"), Layout(), 8192))
    classes = panel_data(made)["classes"]
    assert len(classes) > 8
    assert [sum(each["amounts"].values()) for each in classes] == pytest.approx([each["time"] for each in classes])
