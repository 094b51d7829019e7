"""A fault of each kind in small training runs: how soon it is found, and how the run goes on.

    make drill ARGS="[--rows killed flip-message] [--output docs/resilience.md]"     (root for some of the faults)

Each row is a run of its own on this machine's CPU, two pipeline ranks unless the row says otherwise, which saves every
`SAVE` iterations and is launched again where the fault has ended it, as a cluster's scheduler would. Found after:
from the fault until the run says so. Recovered after: from the fault until the first iteration that is new, or as fast
as before. Losses: every line of every launch beside those of an undisturbed run, digit by digit. Rows that need root
(network namespaces, a small tmpfs) say so where there is none. The exit status is 1 where a row that ran has failed.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.kill_test import Job, losses, newest, resumed
from benchmarks.lost_ranks import ALLOWED
from benchmarks.lost_ranks import FLAGS as FLAGS_IN_MEMORY
from benchmarks.lost_ranks import losses as loss_values
from benchmarks.report import Figures, Outcome, Page, markdown, progress
from helixpipe.common.errors import UserError
from helixpipe.common.flags import option

SAVE, LAST, STRUCK = 10, 60, 25
"""Iterations from save to save; in all; after which a fault that comes from outside strikes."""

PATIENCE, STALL = 240.0, 10
"""Seconds for what should come soon, on a machine that has other things to do; seconds of --stall-timeout-seconds."""

MODEL = (
    "--hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 "
    "--lr 1e-2 --lr-decay-style constant --mock-data --tokenizer-type NullTokenizer --vocab-size 100 --log-interval 1 "
    "--eval-iters 0"
)
FLAGS = (
    f"{MODEL} --pipeline-model-parallel-size 2 --num-layers 4 --global-batch-size 8 --train-iters {LAST} "
    f"--save-interval {SAVE} --stall-timeout-seconds {STALL}"
)
SLOW, FIRST, END = 1, 22, 40
"""The rank that becomes slow, in which iterations: from the first on, before the end."""

SLOW_FLAGS = (
    f"{MODEL} --pipeline-model-parallel-size 3 --num-layers 3 --global-batch-size 12 --train-iters {END - 1} "
    "--memory-limit 10"
)
SCRIPT = "benchmarks/drill_ranks.py"


@dataclass(frozen=True)
class Options(Figures, Page):
    rows: tuple[str, ...] | None = option(None, "Which faults (default: all).")


@dataclass(frozen=True)
class Row:
    """What came of a fault. lost: finished steps that had to be run again. equal: whether all losses had the digits of
    the undisturbed run. not_run: why the row was left out."""

    fault: str
    found: str = "never"
    recovered: str = "never"
    lost: int = 0
    equal: bool = False
    not_run: str = ""

    @property
    def good(self) -> bool:
        return bool(self.not_run) or (self.equal and "never" not in (self.found, self.recovered))


def run(options: Options) -> Outcome:
    chosen = FAULTS if options.rows is None else {name: _fault(name) for name in options.rows}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        drill = Drill(Path(folder))
        for name, fault in chosen.items():
            progress(f"{name} …")
            rows.append(fault(drill))
            progress(str(rows[-1]))
    lines = table(rows)
    bad = [row.fault for row in rows if not row.good]
    left = [f"not run: {row.fault}: {row.not_run}" for row in rows if row.not_run]
    said = [f"FAILED: {', '.join(bad)}" if bad else "PASSED: every row that was run"]
    return Outcome(
        "\n".join([*lines, "", *left, *said]), {"drill": lines}, [asdict(row) for row in rows], status=1 if bad else 0
    )


def table(rows: list[Row]) -> list[str]:
    heads = ("fault", "found after", "recovered after", "steps lost", "losses equal")
    cells = [
        (row.fault, row.found, row.recovered, str(row.lost), "yes" if row.equal else "no")
        if not row.not_run
        else (row.fault, "not run", "", "", "")
        for row in rows
    ]
    return markdown(heads, cells, "lrrrl")


def _fault(name: str) -> Callable[[Drill], Row]:
    if name not in FAULTS:
        raise UserError(f"--rows {name} is not a fault; valid values are {', '.join(FAULTS)}.")
    return FAULTS[name]


class Drill:
    """What rows share: a folder, and the losses of undisturbed runs."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._launches = 0
        self._expected: dict[tuple[str, int], dict[int, str]] = {}

    def launch(self, flags: str, ranks: int = 2, fault: str = "none") -> Job:
        self._launches += 1
        return Job(flags, self.folder / f"launch-{self._launches}.log", SCRIPT, ranks, FAULT=fault)

    def expected(self, flags: str = FLAGS, ranks: int = 2) -> dict[int, str]:
        if (flags, ranks) not in self._expected:
            self._expected[flags, ranks] = dict(losses(self.launch(flags, ranks).finish(PATIENCE)))
        return self._expected[flags, ranks]

    def equal(self, *texts: str, flags: str = FLAGS, ranks: int = 2) -> bool:
        """Whether all log lines are those of the undisturbed run, and every iteration is among them."""
        expected, found = self.expected(flags, ranks), [line for text in texts for line in losses(text)]
        return {number for number, _ in found} == set(expected) and all(expected[n] == line for n, line in found)

    def saving(self, name: str) -> str:
        folder = self.folder / name
        return f"{FLAGS} --save {folder} --load {folder}"

    def go_on(self, fault: str, struck: float, found: str, before: str, flags: str) -> Row:
        """Launch again, from what was saved, after a fault that ended the run whose output this is."""
        reached = losses(before)[-1][0]
        job = self.launch(flags)
        until(job, lambda: any(number > reached for number, _ in losses(job.text())))
        recovered = time.monotonic() - struck
        after = job.finish(PATIENCE)
        lost = reached - (resumed(after) or 0)
        return Row(fault, found, f"{recovered:.0f} s", lost, self.equal(before, after))


def until(job: Job, holds: Callable[[], bool]) -> None:
    if not job.wait_for(holds, PATIENCE) and not holds():
        raise UserError(f"a run ended before what was waited for:\n{job.text()[-3000:]}")


def _iterations(text: str) -> int:
    """How many iterations have been logged."""
    done = losses(text)
    return done[-1][0] if done else 0


# ---------------------------------------------------------------------------------------------------------- the faults


def killed(drill: Drill) -> Row:
    flags = drill.saving("killed")
    job = drill.launch(flags)
    until(job, lambda: _iterations(job.text()) >= STRUCK)
    struck = time.monotonic()
    gone = job.kill("rank 1")
    return drill.go_on("rank 1 killed (SIGKILL)", struck, f"{gone:.1f} s", job.text(), flags)


def lost_replica(drill: Drill) -> Row:
    """Two replicas, no checkpoints: the other goes on from what its host has in memory."""
    flags = f"{FLAGS_IN_MEMORY} --global-batch-size 8 --train-iters {LAST}"

    def launch(name: str) -> Job:
        words = ("schedules.command", "train", "--ranks", "4")
        return Job(flags, drill.folder / f"replicas-{name}.log", launcher=words)

    expected = dict(loss_values(launch("undisturbed").finish(PATIENCE)))
    job = launch("killed")
    until(job, lambda: _iterations(job.text()) >= STRUCK and len(job.ranks()) == 4)
    struck, others = time.monotonic(), job.ranks()
    os.kill(others.pop("1"), signal.SIGKILL)
    until(job, lambda: "2 of 4 ranks go on" in job.text())
    found, reached = time.monotonic() - struck, _iterations(job.text())
    until(job, lambda: _iterations(job.text()) > reached)
    recovered, stay = time.monotonic() - struck, others.items() <= job.ranks().items()
    lines = loss_values(job.finish(PATIENCE))
    done = {number for number, _ in lines}
    near = all(abs(loss / expected[number] - 1) < ALLOWED for number, loss in lines)
    equal = len(expected) - len(done) <= 1 and near
    fault = "a rank of one of two replicas killed, snapshots in memory"
    return Row(fault, f"{found:.1f} s", f"{recovered:.1f} s" if stay else "never", len(lines) - len(done), equal)


def stopped(drill: Drill) -> Row:
    flags = drill.saving("stopped")
    job = drill.launch(flags)
    until(job, lambda: _iterations(job.text()) >= STRUCK)
    victim, struck = job.ranks()["1"], time.monotonic()
    os.kill(victim, signal.SIGSTOP)
    until(job, lambda: "the job has stalled" in job.text())
    found = time.monotonic() - struck
    silent = "rank 1: silent" in job.text() or job.wait_for(lambda: "rank 1: silent" in job.text(), 10.0)
    job.kill("both ranks")  # as whoever reads the report does
    return drill.go_on("rank 1 stopped (SIGSTOP)", struck, f"{found:.0f} s" if silent else "never", job.text(), flags)


def slow(drill: Drill) -> Row:
    fault = f"rank {SLOW} of 3 at half its speed (its ops sleep)"
    job = drill.launch(f"{SLOW_FLAGS} --replan auto", 3, f"slow {SLOW} {FIRST} {END} 0.03")
    text = job.finish(PATIENCE)
    told = [int(at) for at in re.findall(rf"iteration (\d+): rank {SLOW} is at 0\.\d+ of its speed", text)]
    orders = [int(at) for at in re.findall(r"from iteration (\d+) on: ", text)]
    early = any(at < FIRST for at in (*told, *orders))  # of what was not there yet
    return Row(
        fault,
        f"{told[0] - FIRST + 1} steps" if told and not early else "never",
        f"{orders[0] - FIRST} steps, another order" if orders and not early else "never",
        0,
        drill.equal(text, flags=f"{SLOW_FLAGS} --replan off", ranks=3),
    )


def full_disk(drill: Drill) -> Row:
    fault = "disk full"
    folder = drill.folder / "small"
    folder.mkdir()
    try:
        with _tmpfs(folder, "8m"):
            flags = f"{FLAGS} --save {folder / 'run'}"
            job = drill.launch(flags)
            until(job, lambda: newest(folder / "run") >= SAVE)
            filler, struck = folder / "filler", time.monotonic()
            with filler.open("wb") as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(1 << 16))
            until(job, lambda: "was not saved" in job.text())
            found, told = time.monotonic() - struck, newest(folder / "run")
            filler.unlink()
            until(job, lambda: newest(folder / "run") > told)
            recovered = time.monotonic() - struck
            text = job.finish(PATIENCE)
            return Row(fault, f"{found:.1f} s, with the next save", f"{recovered:.1f} s", 0, drill.equal(text))
    except PermissionError as error:
        return Row(fault, not_run=str(error))


@contextlib.contextmanager
def _tmpfs(folder: Path, size: str) -> Iterator[None]:
    """A small file system in memory. Raises PermissionError where it cannot be mounted."""
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "drill", str(folder)], capture_output=True)
    if done.returncode:
        raise PermissionError(f"a tmpfs cannot be mounted here ({done.stderr.decode().strip()}): it needs root.")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], capture_output=True)


def flip(where: str, fault: str, bit: int) -> Callable[[Drill], Row]:
    def row(drill: Drill) -> Row:
        step = STRUCK + 2
        flags = f"{drill.saving(f'flip-{where}')} --check-every 5"
        job = drill.launch(flags, fault=f"flip {where} 1 {step} {bit}")
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.launcher.wait(PATIENCE)
        struck = time.monotonic()
        job.end()
        said = re.search(r"corrupt bits at iteration (\d+): (.*)", job.text())
        clean = re.search(r"checkpoints up to iteration (\d+) are from before", job.text())
        if said is None or clean is None or "rank 1" not in said[2]:
            return Row(fault)
        before = _without(job.text(), int(clean[1]))
        saved = int(clean[1]) // SAVE * SAVE
        after = drill.go_on(fault, struck, f"{int(said[1]) - step + 1} steps", before, f"{flags} --ckpt-step {saved}")
        return Row(fault, after.found, after.recovered, int(said[1]) - 1 - saved, after.equal)

    return row


def _without(text: str, last: int) -> str:
    """The output without log lines of later iterations, which a flipped bit may have changed."""
    return "\n".join(line for line in text.splitlines() if not (own := losses(line)) or own[0][0] <= last)


def cut_link(drill: Drill) -> Row:
    from netlab.hosts import Lab, unavailable
    from netlab.job import Job as LabJob

    fault = "link between two hosts cut"
    if reason := unavailable():
        return Row(fault, not_run=reason)
    arguments = [SCRIPT, *drill.saving("cut").split()]
    with Lab(2) as lab:
        job = LabJob(lab, arguments)
        _until_iteration(job, STRUCK)
        struck = time.monotonic()
        lab.plug(1, in_=False)
        while not any("stalled" in job.text(host) or job.nodes[host].poll() for host in (0, 1)):
            if time.monotonic() - struck > PATIENCE:
                job.end()
                return Row(fault)
            time.sleep(0.1)
        found = time.monotonic() - struck
        job.end(2.0)
        lab.plug(1, in_=True)
        before = job.text(1)
        reached = _iterations(before)
        again = LabJob(lab, arguments)
        _until_iteration(again, reached + 1)
        recovered = time.monotonic() - struck
        if any(again.wait()):
            return Row(fault, f"{found:.0f} s")
        after = again.text(1)
    return Row(
        fault,
        f"{found:.0f} s",
        f"{recovered:.0f} s",
        reached - (resumed(again.text(0)) or 0),
        drill.equal(before, after),
    )


def slow_link(drill: Drill) -> Row:
    from netlab.hosts import Lab, unavailable
    from netlab.job import Job as LabJob

    fault = "link between two hosts at a quarter, then whole again"
    if reason := unavailable():
        return Row(fault, not_run=reason)
    rate = 3e6  # messages take longer than ops, so that it shows whatever else the machine does
    with Lab(2, rate=rate, pairs=True) as lab:
        job = LabJob(lab, [SCRIPT, *FLAGS.split()])
        _until_iteration(job, STRUCK)
        for pair in ((0, 1), (1, 0)):
            lab.set_pair_rate(*pair, rate / 4)
        first = _iterations(job.text(1))
        _until_iteration(job, LAST - 20)
        for pair in ((0, 1), (1, 0)):
            lab.set_pair_rate(*pair, rate)
        well = _iterations(job.text(1))
        job.wait()
        text, said = job.text(1), job.text(0)
    speeds = link_speeds(said)
    slow = [at for at, speed in speeds if at > first and speed < 0.5]
    back = [at for at, speed in speeds if at > well and speed >= 0.5]
    return Row(
        fault,
        f"{slow[0] - first} steps" if slow else "never",
        f"{back[0] - well} steps after its end" if back else "never",
        0,
        drill.equal(text),
    )


def link_speeds(text: str) -> list[tuple[int, float]]:
    """Return what a run has said of a link's speed, in which iteration; 1 is as at first."""
    lines = re.findall(r"iteration (\d+): (.*link to rank .*)", text)
    found = r"link to rank \d (?:is at (\d+\.\d+) of its speed|has its first speed again)"
    return [(int(at), float(own or 1)) for at, line in lines for own in re.findall(found, line)]


def _until_iteration(job: object, number: int) -> None:
    job.wait_for(f"iteration {number:8d}/", 1, PATIENCE)  # type: ignore[attr-defined]


FAULTS: Mapping[str, Callable[[Drill], Row]] = {
    "killed": killed,
    "lost-replica": lost_replica,
    "stopped": stopped,
    "slow": slow,
    "full-disk": full_disk,
    "cut-link": cut_link,
    "slow-link": slow_link,
    "flip-weight": flip("weight", "exponent's bit of a weight flips in memory", 30),
    "flip-message": flip("message", "mantissa's bit of a message flips", 3),
    "flip-computed": flip("flickering", "every second forward of rank 1 flips a bit", 12),
}
