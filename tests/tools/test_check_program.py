"""tools/check_program.py certifies what lowering gives, and nothing that was changed."""

from __future__ import annotations

import ast
import copy
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helixpipe.common.errors import ScheduleError
from helixpipe.costs.by_hand import unit_costs
from helixpipe.lowering.lower import lower
from helixpipe.lowering.project import LoweredProgram
from helixpipe.lowering.streams_text import save_streams, streams_text
from helixpipe.program.files import save_program
from helixpipe.program.json_text import json_text
from helixpipe.program.program import Program
from helixpipe.simulate.simulator import simulate
from schedules import CATALOGUE, Shape, build
from schedules.command import main
from schedules.weipipe import WeipipeOptions
from tests.integration.launching import ROOT
from tests.lowering.offloads import offloading_program
from tests.lowering.random_programs import random_costs, random_program
from tests.lowering.sharing import sharing_program
from tests.selection import graded
from tools.check_program import Check

SCRIPT = ROOT / "tools" / "check_program.py"
Files = tuple[dict[str, Any], dict[str, Any]]


def files(lowered: LoweredProgram) -> Files:
    return json.loads(json_text(lowered.program)), json.loads(streams_text(lowered))


def certify(program: dict[str, Any], streams: dict[str, Any]) -> None:
    Check(program, streams).run()


def test_it_is_short_and_knows_nothing_of_helixpipe() -> None:
    source = SCRIPT.read_text(encoding="utf-8")
    assert sum(bool(line.strip()) for line in source.splitlines()) <= 170
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names


@pytest.mark.parametrize("name", list(CATALOGUE))
def test_every_schedule_is_certified(name: str) -> None:
    certified = 0
    for ranks in (1, 2, 3, 4):
        for chunks in (1, 2):
            try:
                program = build(name, Shape(ranks, 2 * ranks, 4 * ranks, chunks=chunks))
            except ScheduleError:
                continue
            certify(*files(lower(program)))
            certified += 1
    assert certified >= 2


def lowered_at_random(seed: int) -> LoweredProgram:
    """With weights of every placement, offloading, a divided head, weights in parts, and turns."""
    rng = random.Random(seed)
    program = random_program(rng, divided=seed % 3 == 0, turned=True)
    if seed % 2:
        program = sharing_program(offloading_program(program, seed), seed)
    return lower(program, random_costs(rng))


@pytest.mark.parametrize("count", graded([60, 600], [60]))
def test_random_programs_are_certified(count: int) -> None:
    for seed in range(count):
        certify(*files(lowered_at_random(seed)))


def change(streams: dict[str, Any], rank: int, edit: Callable[[list[str]], None]) -> None:
    cells = streams["ranks"][rank].split(", ")
    edit(cells)
    streams["ranks"][rank] = ", ".join(cells)


def places(cells: list[str], *words: str) -> list[int]:
    return [place for place, cell in enumerate(cells) if cell.split()[0] in words]


def swap_ops(program: dict[str, Any], streams: dict[str, Any], rank: int, rng: random.Random) -> None:
    def edit(cells: list[str]) -> None:
        one, other = rng.sample(places(cells, "RUN"), 2)
        cells[one], cells[other] = cells[other], cells[one]

    change(streams, rank, edit)


def swap_ops_in_both(program: dict[str, Any], streams: dict[str, Any], rank: int, rng: random.Random) -> None:
    """An op goes before what it needs on its own rank, in the program and in the streams."""
    cells = program["ranks"][rank].split()
    after = next(place for place, cell in enumerate(cells) if "B" in cell or "I" in cell)
    forward = cells.index(cells[after].replace("B", "F").replace("I", "F"))
    names = cells[forward], cells[after]
    cells[forward], cells[after] = cells[after], cells[forward]
    program["ranks"][rank] = " ".join(cells)

    def edit(cells: list[str]) -> None:
        one, other = (cells.index(f"RUN {name}") for name in names)
        cells[one], cells[other] = cells[other], cells[one]

    change(streams, rank, edit)


def drop(*words: str) -> Callable[..., None]:
    def mutate(program: dict[str, Any], streams: dict[str, Any], rank: int, rng: random.Random) -> None:
        change(streams, rank, lambda cells: cells.pop(rng.choice(places(cells, *words))) and None)

    mutate.__name__ = f"drop {words[0]}"
    return mutate


def drop_message(program: dict[str, Any], streams: dict[str, Any], rank: int, rng: random.Random) -> None:
    """At both ends, with the WAIT."""
    cells = streams["ranks"][rank].split(", ")
    name = cells[rng.choice(places(cells, "SEND", "RECV"))].split()[1]
    for each in range(len(streams["ranks"])):
        change(streams, each, lambda cells: cells.__setitem__(slice(None), [c for c in cells if c.split()[1] != name]))


def wrong_peer(program: dict[str, Any], streams: dict[str, Any], rank: int, rng: random.Random) -> None:
    links = [each for each in streams["transfers"] if rank in each["ranks"] and len(each["ranks"]) == 2]
    each = rng.choice(links)
    each["ranks"] = [each["ranks"][0], (each["ranks"][1] + 1) % len(streams["ranks"])]


def wait_later(program: dict[str, Any], streams: dict[str, Any], rank: int, rng: random.Random) -> None:
    """Behind the op that needs what comes."""

    def transfer(cell: str) -> dict[str, Any]:
        found: dict[str, Any] = streams["transfers"][int(cell.split("#")[1])]
        return found

    def edit(cells: list[str]) -> None:
        needed = [
            place for place in places(cells, "WAIT") if f"RUN {transfer(cells[place])['consumer']}" in cells[place:]
        ]
        place = rng.choice(needed)
        cells.insert(cells.index(f"RUN {transfer(cells[place])['consumer']}"), cells.pop(place))

    change(streams, rank, edit)


def send_before_op(program: dict[str, Any], streams: dict[str, Any], rank: int, rng: random.Random) -> None:
    """Before the op that makes what it carries."""

    def made_by(cell: str) -> str | None:
        each = streams["transfers"][int(cell.split("#")[1])]
        return each["producer"] if each["kind"] != "weights" else None

    def edit(cells: list[str]) -> None:
        place = rng.choice([place for place in places(cells, "SEND") if made_by(cells[place])])
        cells.insert(cells.index(f"RUN {made_by(cells[place])}"), cells.pop(place))

    change(streams, rank, edit)


def cross_messages(program: dict[str, Any], streams: dict[str, Any], rank: int, rng: random.Random) -> None:
    """Two messages between the same ranks change places at one end."""
    by_ends: dict[tuple[int, ...], list[int]] = {}
    for number, each in enumerate(streams["transfers"]):
        by_ends.setdefault(tuple(each["ranks"]), []).append(number)
    one, other = rng.sample(
        next(numbers for ends, numbers in by_ends.items() if rank == ends[1] and len(numbers) > 1), 2
    )

    def edit(cells: list[str]) -> None:
        first, second = cells.index(f"RECV #{one}"), cells.index(f"RECV #{other}")
        cells[first], cells[second] = cells[second], cells[first]

    change(streams, rank, edit)


def state_less_memory(program: dict[str, Any], streams: dict[str, Any], rank: int, rng: random.Random) -> None:
    streams["kept"][rank]["saved"] -= 1


def run_twice(program: dict[str, Any], streams: dict[str, Any], rank: int, rng: random.Random) -> None:
    program["ranks"][rank] += " " + rng.choice(program["ranks"][rank].split())


def leave_out_op(program: dict[str, Any], streams: dict[str, Any], rank: int, rng: random.Random) -> None:
    """From the program and the stream."""
    name = rng.choice(program["ranks"][rank].split())
    program["ranks"][rank] = " ".join(cell for cell in program["ranks"][rank].split() if cell != name)
    change(streams, rank, lambda cells: cells.__setitem__(slice(None), [c for c in cells if c.split()[1] != name]))


def leave_out_turn(program: dict[str, Any], streams: dict[str, Any], rank: int, rng: random.Random) -> None:
    program["turns"].pop(rng.randrange(len(program["turns"])))


def exchange_turns(program: dict[str, Any], streams: dict[str, Any], rank: int, rng: random.Random) -> None:
    at = rng.randrange(len(program["turns"]) - 1)
    program["turns"][at : at + 2] = reversed(program["turns"][at : at + 2])


def end_turn_twice(program: dict[str, Any], streams: dict[str, Any], rank: int, rng: random.Random) -> None:
    program["turns"][-1] += " " + rng.choice(program["turns"][-2].split())


def end_turn_elsewhere(program: dict[str, Any], streams: dict[str, Any], rank: int, rng: random.Random) -> None:
    program["turns"][rng.randrange(len(program["turns"]))] = rng.choice(("", "99F0"))


def end_turn_later(program: dict[str, Any], streams: dict[str, Any], rank: int, rng: random.Random) -> None:
    """The op that begins the next turn on a rank ends this one, so its streams begin that turn too early."""
    at = rng.choice([at for at, ends in enumerate(program["turns"][:-1]) if set(ends.split()) & own(program, rank)])
    (end,) = set(program["turns"][at].split()) & own(program, rank)
    cells = program["ranks"][rank].split()
    program["turns"][at] = program["turns"][at].replace(end, cells[cells.index(end) + 1])


def own(program: dict[str, Any], rank: int) -> set[str]:
    return set(program["ranks"][rank].split())


def start_early(program: dict[str, Any], streams: dict[str, Any], rank: int, rng: random.Random) -> None:
    """A rank begins a turn before it has waited for the others."""

    def edit(cells: list[str]) -> None:
        waits = [
            at for at in places(cells, "WAIT") if streams["transfers"][int(cells[at].split("#")[1])]["kind"] == "turn"
        ]
        at = rng.choice([at for at in waits if places(cells[at:], "RUN")])
        cells.insert(at + places(cells[at:], "RUN")[0], cells.pop(at))

    change(streams, rank, edit)


def leave_out_rank(program: dict[str, Any], streams: dict[str, Any], rank: int, rng: random.Random) -> None:
    """A rank does not take part in a barrier."""
    number = rng.choice([at for at, each in enumerate(streams["transfers"]) if each["kind"] == "turn"])
    streams["transfers"][number]["ranks"].remove(rank)
    change(
        streams, rank, lambda cells: cells.__setitem__(slice(None), [c for c in cells if c.split()[1] != f"#{number}"])
    )


MUTATIONS = [
    swap_ops, swap_ops_in_both, drop("SEND"), drop("RECV"), drop("WAIT"), drop("RUN"), drop("FREE"), drop_message,
    wrong_peer, wait_later, send_before_op, cross_messages, state_less_memory, run_twice, leave_out_op,
]  # fmt: skip

TURNS = [
    leave_out_turn, exchange_turns, end_turn_twice, end_turn_elsewhere, end_turn_later, start_early, leave_out_rank,
]  # fmt: skip


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("name", ["1f1b", "zbv", "helix", "seq1f1b", "chimera", "weipipe"])
def test_every_mutant_of_a_program_is_caught(name: str, mutate: Callable[..., None]) -> None:
    ranks = 4 if name == "chimera" else 3
    program = build(name, Shape(ranks, 2 * ranks, 4 * ranks, chunks=2 if name == "seq1f1b" else 1))
    check_mutants(program, mutate)


@pytest.mark.parametrize("mutate", TURNS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("name", ["weipipe", "wzb1"])
def test_every_mutant_of_turns_is_caught(name: str, mutate: Callable[..., None]) -> None:
    check_mutants(build(name, Shape(3, 6, 12), WeipipeOptions(weipipe_eager=False)), mutate)


def check_mutants(program: Program, mutate: Callable[..., None]) -> None:
    ranks, certified = program.num_ranks, files(lower(program))
    certify(*certified)
    for seed in range(12):
        changed = copy.deepcopy(certified)
        mutate(*changed, seed % ranks, random.Random(seed))
        assert changed != certified
        with pytest.raises((ValueError, LookupError)):
            certify(*changed)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b"])
def test_what_is_kept_is_what_the_simulator_counts(name: str) -> None:
    """Where no backward is split: units of a layer each."""
    program = build(name, Shape(2, 6, 4 if name == "interleaved-1f1b" else 2))
    lowered = lower(program)
    kept = [each["saved"] for each in files(lowered)[1]["kept"]]
    assert kept == pytest.approx(simulate(lowered, unit_costs()).peak_activation)


def test_the_command_writes_what_the_tool_certifies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, streams = tmp_path / "zbv.json", tmp_path / "streams.json"
    save_program(build("zbv", Shape(2, 4, 4)), program)
    assert main(["check", str(program), "--save-streams", str(streams)]) == 0
    command = [sys.executable, str(SCRIPT), str(program), str(streams)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.endswith("zbv.json is certified.\n")
    save_streams(lower(build("1f1b", Shape(2, 4, 4))), streams)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "zbv.json is not certified" in done.stderr


def test_files_that_are_missing_or_exchanged_are_named(tmp_path: Path) -> None:
    program, streams = tmp_path / "program.json", tmp_path / "streams.json"
    lowered = lower(build("1f1b", Shape(2, 2, 2)))
    save_program(lowered.program, program)
    save_streams(lowered, streams)
    for words, fault in (
        ([], "nothing is not certified: ValueError: two files are needed"),
        ([streams], "streams.json is not certified: ValueError: two files are needed"),
        ([streams, program], "streams.json is not certified: ValueError: the first file must be a program, the second"),
        ([program, program], "program.json is not certified: ValueError: the first file must be a program"),
        ([program, tmp_path / "absent"], "absent'"),
    ):
        done = subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True, timeout=60)
        assert done.returncode == 1 and fault in done.stderr and done.stderr.count("\n") == 1 and done.stdout == ""
