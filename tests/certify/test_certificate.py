"""Certificates: `simulate --certify`, and `tools/check_certificate.py`, which accepts what holds and nothing else."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from helixpipe.certify.certificate import certify
from helixpipe.costs.by_hand import PieceTimes
from helixpipe.lowering.lower import lower
from helixpipe.planning.setup import Setup
from helixpipe.planning.vocabulary.choice import VocabularyOptions
from helixpipe.program.program import Op, Program
from helixpipe.program.stages import even_stages
from helixpipe.program.workload import Slice, Workload, uniform
from helixpipe.simulate.simulator import simulate
from schedules import CATALOGUE, Shape, command
from schedules.weipipe import WeipipeOptions
from tests.cli.commands import run, run_json
from tools import check_certificate
from tools.check_certificate import check

CHECKER = Path(check_certificate.__file__)
START, END = 7, 8  # of a task: kind, stage, microbatch, chunk, kind of resource, ranks, time, start, end


SETTINGS: dict[str, tuple[str, float, int, Any]] = {
    "steps": ("v-min", 0.0, 1, "ends"),
    "work": ("1f1b", 1.0, 1, "ends"),
    "head": ("1f1b", 1.0, 1, "split"),
    "chunks": ("seq1f1b", 1.0, 2, "ends"),
}
"""Schedule, message time, chunks and place of the head."""


@cache
def of(name: str) -> str:
    """A certificate's text: `steps` and `work` by what its bound rests on, `head` with parts of the head, `chunks` with
    keys and values."""
    schedule, message, chunks, vocabulary = SETTINGS[name]
    costs = PieceTimes({"mlp": 1.0, "head": 3.0 * (name != "steps")}, message=message)
    setup = replace(Setup(3, 6, costs), vocabulary=VocabularyOptions(vocabulary))
    program = CATALOGUE.build(schedule, setup.shape(microbatches=4, chunks=chunks), None)
    return json.dumps(certify(simulate(lower(program, costs), costs)).to_json())


@pytest.mark.parametrize("name", ["steps", "work", "head", "chunks"])
def test_what_holds_is_accepted(name: str) -> None:
    text = json.loads(of(name))
    assert check(text).startswith(f"valid: it takes {text['makespan']:.6g}")
    kinds = {task[0] for task in text["tasks"]}
    assert ("head_sums" in kinds) == (name == "head") and bool(text["rows"]) == (name == "chunks")


@pytest.mark.parametrize("name", ["weipipe", "weipipe-naive", "wzb1", "wzb2"])
def test_turns_are_left_out_of_the_bound(name: str) -> None:
    """An order without turns is one of those that the bound holds for."""
    texts = []
    for eager in (True, False):
        program = CATALOGUE.build(name, Shape(4, 8, 4), WeipipeOptions(weipipe_eager=eager))
        texts.append(certify(simulate(lower(program), PieceTimes({"mlp": 1.0}))).to_json())
        assert check(json.loads(json.dumps(texts[-1]))).startswith("valid: it takes")
    assert texts[0]["bound"] == texts[1]["bound"] and texts[0]["makespan"] < texts[1]["makespan"]


def task(text: dict[str, Any], *key: object) -> list[Any]:
    return next(each for each in text["tasks"] if each[: len(key)] == list(key))


def swapped(text: dict[str, Any]) -> None:
    """Two ops of a rank that take the same time change places."""
    one, other = task(text, "F", 0, 0), task(text, "F", 0, 1)
    one[START:], other[START:] = other[START:], one[START:]


def moved(text: dict[str, Any]) -> None:
    """An op runs on another rank."""
    task(text, "F", 1, 0)[5] = [0]


def shortened(text: dict[str, Any]) -> None:
    task(text, "F", 0, 0)[END] -= 0.5


def cheaper(text: dict[str, Any]) -> None:
    """An op costs less than the bound was found with."""
    for each in text["tasks"]:
        if each[0] == "F" and each[1] == 2:
            each[6] /= 2


def early(text: dict[str, Any]) -> None:
    """The last backward, and what is before it, run an hour before their time."""
    for each in text["tasks"]:
        if each[END] == text["makespan"]:
            each[START] -= 0.5
            each[END] -= 0.5
    text["makespan"] -= 0.5


def higher(text: dict[str, Any]) -> None:
    text["bound"]["value"] *= 1.01


def highest(text: dict[str, Any]) -> None:
    """Both are made up: a step that is over later than its last task."""
    text["bound"]["value"] = text["makespan"] = text["makespan"] + 1


def shorter(text: dict[str, Any]) -> None:
    text["makespan"] -= 1


def dropped_op(text: dict[str, Any]) -> None:
    text["tasks"].remove(task(text, "F", 1, 3))


def repeated_op(text: dict[str, Any]) -> None:
    text["tasks"].append(deepcopy(task(text, "F", 1, 3)))


def renamed_op(text: dict[str, Any]) -> None:
    task(text, "F", 1, 3)[3] = 9


def smaller_memory(text: dict[str, Any]) -> None:
    text["limits"] = [limit / 2 for limit in text["limits"]]


OF_TASKS = (swapped, moved, shortened, early, shorter, dropped_op, repeated_op, renamed_op)
EVERYWHERE = (*OF_TASKS, higher, highest, smaller_memory)


@pytest.mark.parametrize("name", ["steps", "work", "head", "chunks"])
@pytest.mark.parametrize("tamper", EVERYWHERE)
def test_what_was_tampered_with_is_rejected(name: str, tamper: Callable[[dict[str, Any]], None]) -> None:
    text = json.loads(of(name))
    tamper(text)
    with pytest.raises((ValueError, LookupError)):
        check(text)


def dropped(kind: str) -> Callable[[dict[str, Any]], None]:
    def drop(text: dict[str, Any]) -> None:
        text["tasks"].remove(task(text, kind))

    return drop


def elsewhere(text: dict[str, Any]) -> None:
    task(text, "activation")[5] = [2, 1]


def no_link(text: dict[str, Any]) -> None:
    """A message that takes no link, and so waits for no other."""
    task(text, "activation")[4] = "copy_out"


def invented(text: dict[str, Any]) -> None:
    """A message that nobody needs makes a link busier."""
    end = text["makespan"]
    text["tasks"].append(["activation", 1, 9, 0, "link", [0, 1], 0.5, end - 0.5, end, 0.5])


def further(text: dict[str, Any]) -> None:
    """A head that no task of the resource has."""
    text["bound"]["head"] += 1
    text["bound"]["value"] += 1


def numbers(change: Callable[[list[Any]], None]) -> Callable[[dict[str, Any]], None]:
    def changed(text: dict[str, Any]) -> None:
        for row in text["bound"]["rows"]:
            change(row)

    return changed


def backwards(row: list[Any]) -> None:
    """What waits is waited for."""
    if row[0] == "before":
        row[1], row[2] = row[2], row[1]


def negative(row: list[Any]) -> None:
    if row[0] == "memory":
        row[4] = -row[4]


def further_horizon(text: dict[str, Any]) -> None:
    text["bound"]["horizon"] += 1
    text["bound"]["value"] += text["bound"]["step"]


def longer_steps(text: dict[str, Any]) -> None:
    text["bound"]["step"] *= 1.01
    text["bound"]["value"] *= 1.01


def empty_row(text: dict[str, Any]) -> None:
    """A row of no start, below zero: only its right side would count."""
    text["bound"]["rows"] = [["busy", 0, -1, 10**6, -1.0]]


@pytest.mark.parametrize(
    ("name", "tamper"),
    [
        *((("work"), dropped(kind)) for kind in ("activation", "gradient")),
        *((("head"), dropped(kind)) for kind in ("head_input", "head_sums", "head_gradient", "gradient")),
        *(("work", tamper) for tamper in (elsewhere, no_link, invented, further, cheaper)),
        *(("steps", tamper) for tamper in (numbers(backwards), numbers(negative), empty_row)),
        *(("steps", tamper) for tamper in (further_horizon, longer_steps)),
    ],
)  # fmt: skip
def test_messages_and_bounds_are_checked(name: str, tamper: Callable[[dict[str, Any]], None]) -> None:
    text = json.loads(of(name))
    tamper(text)
    with pytest.raises((ValueError, LookupError)):
        check(text)


def test_a_rank_does_one_thing_at_a_time() -> None:
    """A W that is moved beside what its rank runs before it, after its I, is where it may be but for that."""
    text = json.loads(of("steps"))
    own = sorted((each for each in text["tasks"] if each[5] == [0]), key=lambda each: each[START])
    one, other = next(
        (one, other) for one, other in pairwise(own) if other[0] == "W" and one[1:4] != other[1:4] and one[END] > 10
    )
    other[START:] = one[START:]
    with pytest.raises(ValueError, match="two things at a time"):
        check(text)


def test_rows_over_several_ranks_are_left_out() -> None:
    """Keys and values that go from rank to rank are what an order decides, so no bound and no check rests on them."""
    stages = even_stages(1, 1)
    orders = [
        [Op("F", 0, 0, 0), Op("F", 0, 0, 1), Op("B", 0, 0, 1), Op("B", 0, 0, 0)],
        [Op("F", 0, 0, 2), Op("B", 0, 0, 2)],
    ]
    spread = Program(
        "spread",
        (replace(stages[0], placement="replicated"),),
        tuple(map(tuple, orders)),
        uniform(1, 3),
        kv_blocks=True,
    )
    for program, chained in ((spread, False), (replace(spread, ranks=(one_rank(3),)), True)):
        costs = PieceTimes({"mlp": 1.0})
        step = certify(simulate(lower(program, costs), costs))
        check(step.to_json())
        tasks = step.problem.tasks
        between = [
            (one, then)
            for then, waited in enumerate(step.problem.before)
            for one in waited
            if tasks[one].unit != tasks[then].unit
        ]
        assert bool(between) == chained
        text = step.to_json()
        numbered = [check_certificate.Task._make([*each[:4], (each[4], *each[5]), *each[6:]]) for each in text["tasks"]]
        pairs = check_certificate.dependencies(text, numbered)
        assert any(numbered[one][1:4] != numbered[then][1:4] for one, then in pairs) == chained


def one_rank(chunks: int) -> tuple[Op, ...]:
    """All of a microbatch of so many chunks on one rank."""
    return tuple(Op("F", 0, 0, chunk) for chunk in range(chunks)) + tuple(
        Op("B", 0, 0, chunk) for chunk in reversed(range(chunks))
    )


def test_microbatches_that_wait_for_each_other_have_no_turns() -> None:
    """Of documents that begin in one microbatch and end in the next: backwards go the other way."""
    workload = Workload(tuple(((Slice(number // 2, 8 * (number % 2), 8),),) for number in range(4)))
    orders = [Op("F", 0, number) for number in range(4)] + [Op("B", 0, number) for number in reversed(range(4))]
    costs = PieceTimes({"mlp": 1.0})
    step = certify(simulate(lower(Program("two", even_stages(1, 1), (tuple(orders),), workload), costs), costs))
    assert step.optimal and check(step.to_json()).startswith("valid")


def test_keys_and_values_in_another_order_are_rejected() -> None:
    """The chunks of a row run in its order, whatever the times say."""
    text = json.loads(of("chunks"))
    text["rows"] = [row[::-1] for row in text["rows"]]
    with pytest.raises(ValueError, match="before its needs"):
        check(text)
    text["rows"] = []
    with pytest.raises(ValueError, match="the bound is not proven"):
        check(text)


def test_a_certificate_of_another_format_is_rejected() -> None:
    text = json.loads(of("chunks"))
    for other in ("helixpipe certificate 1", None):
        text["format"] = other
        with pytest.raises(ValueError, match="format is not helixpipe certificate 2"):
            check(text)
    del text["format"]
    with pytest.raises(KeyError):
        check(text)


def test_the_checker_stands_alone() -> None:
    source = CHECKER.read_text(encoding="utf-8")
    imported = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(source))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported <= sys.stdlib_module_names and len(source.splitlines()) <= 150


# ------------------------------------------------------------------------------------------------------------- command


def test_simulate_certify(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    size = "simulate v-min -p 4 -m 4 -L 8 --piece-times mlp=1"
    text = run(capsys, f"{size} --certify {path}")
    assert "takes less than 32 (a linear program over time steps), and this one is 3.1 % longer." in text
    assert "Certified" not in run(capsys, size) and "Certified" in run(capsys, f"{size} --certify")
    checked = subprocess.run([sys.executable, "-I", CHECKER, path], capture_output=True, text=True, check=True)
    assert checked.stdout == f"{path}: valid: it takes 33, and no order less than 32\n"
    path.write_text(path.read_text().replace('"makespan": 33.0', '"makespan": 32.0'))
    checked = subprocess.run([sys.executable, "-I", CHECKER, path], capture_output=True, text=True)
    assert checked.returncode == 1 and checked.stderr == f"{path}: REJECTED: the makespan is another\n"
    certified = run_json(capsys, f"{size} --certify")["certified"]
    assert certified == {"bound": 32.0, "kind": "steps", "resource": None, "gap": 33 / 32 - 1}


def test_certify_takes_the_memory_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    """With more memory than the schedule uses its order is no longer as short as any."""
    size = "simulate v-half -p 4 -m 4 -L 8 --piece-times mlp=1"
    own, more = (run_json(capsys, f"{size} --certify{flags}")["certified"] for flags in ("", " --memory-limit 20"))
    assert own["bound"] == 29 > more["bound"] == 27


def test_certify_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    model = "--model weipipe-1024 --seq-length 4096 --hardware a800"
    found = run_json(capsys, f"simulate interleaved-1f1b -p 2 -m 4 -v 2 {model} --certify")
    assert 0 < found["certified"]["bound"] <= found["makespan"] and found["certified"]["gap"] < 0.05
    assert found["certified"]["resource"] == "compute(1)"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("simulate 1f1b gpipe --certify", "--certify is for one schedule of one size; simulate that alone."),
        ("simulate 1f1b --certify /nowhere/x.json", "--certify: cannot write /nowhere/x.json"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], words: str, sentence: str) -> None:
    assert command.main(words.split()) == 2
    assert sentence in capsys.readouterr().err
