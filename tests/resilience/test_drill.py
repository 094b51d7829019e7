"""A fault of each kind in a small training run: it is found, the run goes on, and its losses are the undisturbed run's.

    make drill ARGS="-k message"          (root for those with links or a full disk)

A run saves every `SAVE` iterations, and is launched again where the fault has ended it, as a cluster's scheduler does.
The times that are printed at the end are not asserted.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from netlab.hosts import Lab, unavailable
from netlab.job import Job as LabJob
from tests.resilience.jobs import MODEL, Job, losses, newest, resumed

pytestmark = pytest.mark.drill

SAVE, LAST, STRUCK = 10, 60, 25
"""Iterations from save to save; in all; after which a fault that comes from outside strikes."""

STALL = 10
"""Seconds of --stall-timeout-seconds."""

FLAGS = (
    f"{MODEL} --micro-batch-size 2 --global-batch-size 8 --lr 1e-2 --train-iters {LAST} --save-interval {SAVE} "
    f"--stall-timeout-seconds {STALL}"
)
SCRIPT = "tests/resilience/faulty.py"
FAULTS: list[tuple[str, str, str]] = []
"""The faults that were found and recovered from, and after how long."""

Expected = dict[int, str]


def report(request: pytest.FixtureRequest, found: float | str, recovered: float | str) -> None:
    cells = (each if isinstance(each, str) else f"{each:.1f} s" for each in (found, recovered))
    FAULTS.append((request.node.name.removeprefix("test_"), *cells))


@pytest.fixture(scope="module", autouse=True)
def table(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("\n\n| fault | found after | recovered after |\n|---|--:|--:|")
        for row in FAULTS:
            print(f"| {' | '.join(row)} |")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    return dict(losses(Job(FLAGS, tmp_path_factory.mktemp("undisturbed") / "log").finish()))


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def start(flags: str, fault: str = "none", ranks: int = 2) -> Job:
        jobs.append(Job(flags, tmp_path / f"log-{len(jobs)}", SCRIPT, ranks, FAULT=fault))
        return jobs[-1]

    yield start
    for job in jobs:
        job.end()


def saving(folder: Path) -> str:
    return f"{FLAGS} --save {folder}/run --load {folder}/run"


def check(expected: Expected, *texts: str) -> None:
    """Check that all log lines are the undisturbed run's, and that every iteration is among them."""
    found = [line for text in texts for line in losses(text)]
    assert {number for number, _ in found} == set(expected)
    assert [line for line in found if expected[line[0]] != line[1]] == []


def go_on(launch: Callable[..., Job], flags: str, before: str, expected: Expected, saved: int) -> float:
    """Launch again after a fault that ended the run whose output this is. Returns when a new iteration came."""
    reached, job = losses(before)[-1][0], launch(flags)
    job.until(lambda: job.iterations > reached)
    recovered = time.monotonic()
    after = job.finish()
    assert resumed(after) == saved
    check(expected, before, after)
    return recovered


def test_a_killed_rank(
    launch: Callable[..., Job], tmp_path: Path, expected: Expected, request: pytest.FixtureRequest
) -> None:
    flags = saving(tmp_path)
    job = launch(flags)
    job.until(lambda: job.iterations >= STRUCK)
    struck = time.monotonic()
    gone = job.kill("1")
    recovered = go_on(launch, flags, job.text, expected, newest(tmp_path / "run"))
    report(request, gone, recovered - struck)


def test_a_stopped_rank(
    launch: Callable[..., Job], tmp_path: Path, expected: Expected, request: pytest.FixtureRequest
) -> None:
    flags = saving(tmp_path)
    job = launch(flags)
    job.until(lambda: job.iterations >= STRUCK)
    victim, struck = job.ranks()["1"], time.monotonic()
    os.kill(victim, signal.SIGSTOP)
    job.until(lambda: "the job has stalled" in job.text)
    found = time.monotonic() - struck
    job.until(lambda: "rank 1: silent" in job.text)
    job.kill("0", "1")  # as whoever reads the report does
    recovered = go_on(launch, flags, job.text, expected, newest(tmp_path / "run"))
    report(request, found, recovered - struck)


@pytest.mark.parametrize("replicas", [2, 1])
def test_a_killed_rank_with_snapshots_in_memory(replicas: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """No checkpoint is there. The other replica goes on with its processes; of one replica both ranks begin anew."""
    flags = f"{MODEL} --micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --train-iters {LAST}"
    flags += " --in-memory-checkpoint-interval 1"

    def start(name: str) -> Job:
        words = ("schedules.command", "train", "--ranks", str(2 * replicas))
        return Job(flags, tmp_path / name, launcher=words)

    undisturbed = dict(losses(start("undisturbed").finish()))
    job = start("killed")
    try:
        job.until(lambda: job.iterations >= STRUCK and len(job.ranks()) == 2 * replicas)
        struck, others = time.monotonic(), job.ranks()
        os.kill(others.pop("1"), signal.SIGKILL)
        job.until(lambda: "ranks go on" in job.text)
        found, reached = time.monotonic() - struck, job.iterations
        job.until(lambda: job.iterations > reached)
        recovered = time.monotonic() - struck
        assert replicas == 1 or others.items() <= job.ranks().items(), "they have begun anew"
        lines = losses(job.finish())
    finally:
        job.end()
    assert len({number for number, _ in lines}) == len(lines) >= len(undisturbed) - 1, "one line may be missing"
    for number, line in lines:
        loss, norm = map(float, line.split())
        assert (loss, norm) == pytest.approx(tuple(map(float, undisturbed[number].split())), rel=1e-5)
    report(request, found, recovered)


def test_a_slow_rank(launch: Callable[..., Job], request: pytest.FixtureRequest) -> None:
    """Rank 1 of 3 is at half its speed from iteration 22 on: another order is found, and losses keep their digits."""
    first, end = 22, 40
    flags = MODEL.replace("--num-layers 4 --pipeline-model-parallel-size 2", "--num-layers 3")
    flags += " --pipeline-model-parallel-size 3 --micro-batch-size 2 --global-batch-size 12 --memory-limit 10"
    flags += f" --lr 1e-2 --train-iters {end - 1}"
    undisturbed = dict(losses(launch(f"{flags} --replan off", ranks=3).finish()))
    text = launch(f"{flags} --replan auto", f"slow 1 {first} {end} 0.03", 3).finish()
    told = [int(at) for at in re.findall(r"iteration (\d+): rank 1 is at 0\.\d+ of its speed", text)]
    orders = [int(at) for at in re.findall(r"from iteration (\d+) on: ", text)]
    assert told and orders and min(*told, *orders) >= first
    check(undisturbed, text)
    report(request, f"{told[0] - first + 1} steps", f"{orders[0] - first} steps")


@pytest.mark.parametrize(
    ("where", "bit"), [("weight", 30), ("message", 3), ("flickering", 12)], ids=["weight", "message", "computed"]
)
def test_a_flipped_bit(
    where: str,
    bit: int,
    launch: Callable[..., Job],
    tmp_path: Path,
    expected: Expected,
    request: pytest.FixtureRequest,
) -> None:
    step = STRUCK + 2
    flags = f"{saving(tmp_path)} --check-every 5"
    job = launch(flags, f"flip {where} 1 {step} {bit}")
    job.launcher.wait(240)
    struck = time.monotonic()
    said = re.search(r"corrupt bits at iteration (\d+): (.*)", job.text)
    clean = re.search(r"checkpoints up to iteration (\d+) are from before", job.text)
    assert said is not None and clean is not None and "rank 1" in said[2], job.text[-4000:]
    # Later iterations may have been trained with the flipped bit.
    lines = [line for line in job.text.splitlines() if not (own := losses(line)) or own[0][0] <= int(clean[1])]
    saved = int(clean[1]) // SAVE * SAVE
    recovered = go_on(launch, f"{flags} --ckpt-step {saved}", "\n".join(lines), expected, saved)
    report(request, f"{int(said[1]) - step + 1} steps", recovered - struck)


def test_a_full_disk(
    launch: Callable[..., Job], tmp_path: Path, expected: Expected, request: pytest.FixtureRequest
) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "drill", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here ({done.stderr.decode().strip()}): it needs root")
    try:
        job = launch(f"{FLAGS} --save {folder / 'run'}")
        job.until(lambda: newest(folder / "run") >= SAVE)
        filler, struck = folder / "filler", time.monotonic()
        with filler.open("wb") as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 16))
        job.until(lambda: "was not saved" in job.text)
        found, told = time.monotonic() - struck, newest(folder / "run")
        filler.unlink()
        job.until(lambda: newest(folder / "run") > told)
        recovered = time.monotonic() - struck
        check(expected, job.finish())
    finally:
        subprocess.run(["umount", "-l", str(folder)], capture_output=True)
    report(request, found, recovered)


@pytest.fixture
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """Two hosts. Parameter: the rate of their link, bits a second."""
    if reason := unavailable():
        pytest.skip(reason)
    rate: dict[str, Any] = {"rate": request.param, "pairs": True} if request.param else {}
    with Lab(2, **rate) as hosts:
        yield hosts


def until_iteration(job: LabJob, number: int) -> None:
    job.wait_for(f"iteration {number:8d}/", 1, 240.0)


@pytest.mark.parametrize("lab", [None], indirect=True, ids=["two hosts"])
def test_a_cut_link(lab: Lab, tmp_path: Path, expected: Expected, request: pytest.FixtureRequest) -> None:
    arguments = [SCRIPT, *saving(tmp_path).split()]
    job = LabJob(lab, arguments)
    until_iteration(job, STRUCK)
    struck = time.monotonic()
    lab.plug(1, in_=False)
    while not any("stalled" in job.text(host) or job.nodes[host].poll() for host in (0, 1)):
        assert time.monotonic() - struck < 240.0
        time.sleep(0.1)
    found = time.monotonic() - struck
    job.end(2.0)
    lab.plug(1, in_=True)
    before, saved = job.text(1), newest(tmp_path / "run")
    again = LabJob(lab, arguments)
    until_iteration(again, losses(before)[-1][0] + 1)
    recovered = time.monotonic() - struck
    assert not any(again.wait())
    assert resumed(again.text(0)) == saved
    check(expected, before, again.text(1))
    report(request, found, recovered)


RATE = 3e6
"""Bits a second: messages take longer than ops, so that a slow link shows whatever else the machine does."""


@pytest.mark.parametrize("lab", [RATE], indirect=True, ids=["two hosts"])
def test_a_link_at_a_quarter_then_whole_again(lab: Lab, expected: Expected, request: pytest.FixtureRequest) -> None:
    def set_rate(rate: float) -> int:
        for pair in ((0, 1), (1, 0)):
            lab.set_pair_rate(*pair, rate)
        return losses(job.text(1))[-1][0]

    job = LabJob(lab, [SCRIPT, *FLAGS.split()])
    until_iteration(job, STRUCK)
    first = set_rate(RATE / 4)
    until_iteration(job, LAST - 20)
    well = set_rate(RATE)
    job.wait()
    speeds = [
        (int(at), float(own or 1))
        for at, line in re.findall(r"iteration (\d+): (.*link to rank .*)", job.text(0))
        for own in re.findall(r"link to rank \d (?:is at (\d+\.\d+) of its speed|has its first speed again)", line)
    ]
    slow = [at for at, speed in speeds if at > first and speed < 0.5]
    back = [at for at, speed in speeds if at > well and speed >= 0.5]
    assert slow and back, speeds
    check(expected, job.text(1))
    report(request, f"{slow[0] - first} steps", f"{back[0] - well} steps after its end")


PHASES = ("start-up", "training", "saving")


def wait_for(phase: str, job: Job, before: int, number: int) -> None:
    """Wait until a job that goes on from an iteration is in the phase."""
    if phase == "start-up":
        job.until(lambda: len(job.ranks()) == 2)
        time.sleep(0.5 * number)
    elif phase == "training":
        job.until(lambda: job.iterations > before + 2)
    else:
        job.until(lambda: "saving checkpoint at iteration" in job.text)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "async-save"])
def test_a_run_killed_again_and_again(
    asynchronous: bool, launch: Callable[..., Job], tmp_path: Path, expected: Expected
) -> None:
    """Ranks and the launcher are killed while they start, train and save; each launch resumes at the newest
    checkpoint."""
    flags = saving(tmp_path) + " --async-save" * asynchronous
    found: list[tuple[int, str]] = []
    victims = (("0",), ("1",), ("0", "1"), ("launcher",), ("1",), ("0",))
    for number, victim in enumerate(victims):
        before, job = newest(tmp_path / "run"), launch(flags)
        wait_for(PHASES[number % 3], job, before, number)
        assert job.kill(*victim) < 60.0
        assert resumed(job.text) in (None, before)
        found += losses(job.text)
    before, last = newest(tmp_path / "run"), launch(flags)
    found += losses(last.finish())
    assert resumed(last.text) == before
    assert {number for number, _ in found} == set(expected) and all(expected[at] == line for at, line in found)
