"""Kill −9 a training run at random moments, relaunch it each time, and compare every loss with an undisturbed run's.

    make bench-kill-test ARGS="[--kills 20] [--seed 1] [--workers 0] [--during saving] [--async-save]"

Two pipeline ranks train a tiny model under torchrun, saving every few iterations. Each kill hits rank 0, rank 1, both,
or torchrun itself, while the run starts up, trains or saves. What has to hold: all processes of the job are gone soon
after, the next launch resumes at the newest checkpoint, and every loss printed, however often an iteration is
repeated, has the undisturbed run's digits. The exit status says whether it did. Linux only (it reads /proc).
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.ranks import own_environment
from benchmarks.report import ROOT, Figures, Outcome, markdown
from helixpipe.common.child import python_command
from helixpipe.common.errors import UserError
from helixpipe.common.flags import option

MARK = "HELIXPIPE_KILL_TEST"
SAVE_INTERVAL = 5
ALLOWED_SECONDS = 60.0  # for a job to be gone
VICTIMS = ("rank 0", "rank 1", "both ranks", "torchrun")
PHASES = ("start-up", "training", "saving")
FLAGS = (
    "--pipeline-model-parallel-size 2 --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 --lr 1e-2 --lr-decay-style constant "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 100 --log-interval 1 --eval-iters 0 "
    f"--save-interval {SAVE_INTERVAL}"
)


@dataclass
class Kill:
    """One kill and what came of it. gone: seconds until no process of the job was left. resumed: the iteration the next
    launch went on from; newest: the one the tracker file named when all was gone (0: no checkpoint)."""

    phase: str
    victim: str
    at: float
    newest: int = 0
    gone: float = 0.0
    resumed: int | None = None

    @property
    def right(self) -> bool:
        return self.gone < ALLOWED_SECONDS and self.resumed == self.newest


class Job:
    """One launch of the training program; its processes are found by a mark in their environment. launcher: in place of
    torchrun, a module and words before the flags."""

    def __init__(
        self,
        flags: str,
        log: Path,
        script: str = "pretrain_gpt.py",
        ranks: int = 2,
        launcher: Sequence[str] = (),
        **environment: str,
    ):
        self.mark = uuid.uuid4().hex
        self.log = log
        self.started = time.monotonic()
        torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), script)
        with log.open("w") as file:
            self.launcher = subprocess.Popen(
                [*python_command(*(launcher or torchrun)), *flags.split()],
                cwd=ROOT,
                env=own_environment({MARK: self.mark, **environment}),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, condition: Callable[[], bool], seconds: float = 120.0) -> bool:
        """Poll until the condition holds; False when the launcher ends before."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if condition():
                return True
            if self.launcher.poll() is not None:
                return False
            time.sleep(0.005)
        raise TimeoutError(f"the job did not get on within {seconds:.0f} s; see {self.log}")

    def processes(self) -> dict[int, str]:
        """Every living process of the job: pid -> its LOCAL_RANK, by which it is started, ('' for torchrun)."""
        found = {}
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            with contextlib.suppress(OSError):  # gone meanwhile, or another user's
                variables = dict(
                    item.split("=", 1)
                    for item in (folder / "environ").read_text(errors="replace").split("\0")
                    if "=" in item
                )
                if (
                    variables.get(MARK) == self.mark
                    and (folder / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
                ):
                    found[int(folder.name)] = variables.get("LOCAL_RANK", "")
        return found

    def ranks(self) -> dict[str, int]:
        """Rank -> pid of the rank's own process, whose parent is the launcher."""
        parents = {pid: _parent(pid) for pid in self.processes()}
        return {rank: pid for pid, rank in self.processes().items() if rank and parents.get(pid) == self.launcher.pid}

    def kill(self, victim: str) -> float:
        """SIGKILL; returns the seconds until nothing of the job was left."""
        ranks = self.ranks()
        victims: dict[str, list[int | None]] = {
            "rank 0": [ranks.get("0")],
            "rank 1": [ranks.get("1")],
            "both ranks": [ranks.get("0"), ranks.get("1")],
            "torchrun": [self.launcher.pid],
        }
        begun = time.monotonic()
        for pid in victims[victim]:
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        while time.monotonic() - begun < ALLOWED_SECONDS:
            self.launcher.poll()  # lets go of the process once it has ended
            if not self.processes():
                break
            time.sleep(0.02)
        gone = time.monotonic() - begun
        self.end()
        return gone

    def finish(self, seconds: float) -> str:
        """Let the job run to its end; return its output. Raises UserError if it fails."""
        try:
            status = self.launcher.wait(seconds)
        finally:
            self.end()
        if status:
            raise UserError(f"a run failed that nothing had struck, or outlives it:\n{self.text()[-4000:]}")
        return self.text()

    def end(self) -> None:
        """Leave nothing behind, whatever happened."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.launcher.wait()


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return -1


def losses(text: str) -> list[tuple[int, str]]:
    """(iteration, everything a log line says of the training itself) of each log line."""
    lines = re.findall(r"iteration +(\d+)/ *\d+ \|.*?(lm loss: \S+).*?(grad norm: \S+)", text)
    return [(int(iteration), f"{loss} {norm}") for iteration, loss, norm in lines]


def newest(folder: Path) -> int:
    try:
        return int((folder / "latest_checkpointed_iteration.txt").read_text())
    except FileNotFoundError:
        return 0


def resumed(text: str) -> int | None:
    """The iteration a launch went on from, None when it did not get so far."""
    match = re.search(r"successfully loaded checkpoint from .* at iteration (\d+)", text)
    if match:
        return int(match[1])
    first = losses(text)
    return first[0][0] - 1 if first else None


def seconds_of_a_save(job: Job) -> float:
    """From the line that a save begins to the line that it is there; of the first one."""
    job.wait_for(lambda: "saving checkpoint at iteration" in job.text())
    begun = time.monotonic()
    job.wait_for(lambda: "successfully saved checkpoint" in job.text())
    return time.monotonic() - begun


def wait_for_moment(job: Job, kill: Kill, save_seconds: float, delay: random.Random) -> bool:
    """Until the moment of the kill; False when the run ended before."""
    if kill.phase == "start-up":
        there = job.wait_for(lambda: len(job.ranks()) == 2)
        time.sleep(kill.at * 6.0)  # seconds: from the ranks' first moment to about their first iteration
        return there and job.launcher.poll() is None
    if kill.phase == "training":
        wanted = 1 + round(kill.at * 11)  # iterations
        there = job.wait_for(lambda: len(losses(job.text())) >= wanted)
        time.sleep(delay.uniform(0.0, 0.03))
        return there
    there = job.wait_for(lambda: "saving checkpoint at iteration" in job.text())
    time.sleep(kill.at * 1.2 * save_seconds)
    return there


def plan(kills: int, during: Sequence[str], generator: random.Random) -> list[Kill]:
    """Phases and victims in turn, shuffled; moments spread evenly within each phase."""
    phases = [during[i % len(during)] for i in range(kills)]
    victims = [VICTIMS[i % len(VICTIMS)] for i in range(kills)]
    generator.shuffle(victims)
    planned = [
        Kill(phase, victim, (i + generator.random()) / kills)
        for i, (phase, victim) in enumerate(zip(phases, victims, strict=True))
    ]
    generator.shuffle(planned)
    return planned


@dataclass(frozen=True)
class Options(Figures):
    kills: int = option(20, "How many.", at_least=1)
    seed: int = option(1, "Of moments and victims.")
    iterations: int = option(0, "Of the whole run (default: 9 a kill and 20).", at_least=0)
    workers: int = option(0, "Data loader processes a rank.", at_least=0)
    during: tuple[str, ...] = option(PHASES, "What is interrupted.", choices=PHASES)
    async_save: bool = option(False, "Checkpoints are written beside training.", flags=("--async-save",))


def run(options: Options) -> Outcome:
    iterations = options.iterations or 20 + 9 * options.kills
    flags = f"{FLAGS} --num-workers {options.workers} --train-iters {iterations}"
    flags += " --async-save" * options.async_save
    generator = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(f"undisturbed run of {iterations} iterations", flush=True)
        reference = Job(f"{flags} --save {folder / 'reference'}", folder / "reference.log")
        save_seconds = seconds_of_a_save(reference)
        expected = dict(losses(reference.finish(600)))
        kills: list[Kill] = []
        found: list[tuple[int, str]] = []
        for number, kill in enumerate(plan(options.kills, options.during, generator), 1):
            job = _launch(flags, folder, number)
            try:
                if not wait_for_moment(job, kill, save_seconds, generator):
                    raise UserError(f"the run ended before kill {number}; see --iterations\n{job.text()[-2000:]}")
                kill.gone = job.kill(kill.victim)
            finally:
                job.end()
            kill.newest = newest(folder / "killed")
            _settle(kills, job)
            found += losses(job.text())
            kills.append(kill)
            print(
                f"kill {number:2d}: {kill.phase:8s} {kill.victim:10s} gone after {kill.gone:5.2f} s, "
                f"checkpoint {kill.newest}",
                flush=True,
            )
        job = _launch(flags, folder, len(kills) + 1)
        final = dict(losses(job.finish(600)))
        _settle(kills, job)
        found += list(final.items())
    return report(kills, found, expected)


def _launch(flags: str, folder: Path, number: int) -> Job:
    return Job(f"{flags} --save {folder / 'killed'} --load {folder / 'killed'}", folder / f"launch-{number}.log")


def _settle(kills: list[Kill], job: Job) -> None:
    """Where the launch went on, for the kills before it that do not know yet."""
    where = resumed(job.text())
    for kill in kills:
        if kill.resumed is None and where is not None:
            kill.resumed = where


def report(kills: Sequence[Kill], found: Sequence[tuple[int, str]], expected: Mapping[int, str]) -> Outcome:
    rows = [
        (str(number), kill.phase, kill.victim, f"{kill.gone:.2f} s", str(kill.newest), str(kill.resumed))
        for number, kill in enumerate(kills, 1)
    ]
    heads = ("kill", "during", "victim", "all gone after", "newest checkpoint", "resumed at")
    different = [(iteration, text) for iteration, text in found if expected.get(iteration) != text]
    complete = {iteration for iteration, _ in found} == set(expected)
    right = sum(kill.right for kill in kills)
    gone = [kill.gone for kill in kills]
    good = not different and complete and right == len(kills)
    lines = [
        *("", *markdown(heads, rows, "llllll"), ""),
        f"all processes gone after: median {median(gone):.2f} s, at most {max(gone):.2f} s",
        f"resumed at the newest checkpoint: {right} of {len(kills)}",
        f"log lines: {len(found)} for {len(expected)} iterations, {len(different)} differ from the undisturbed run's",
        "PASSED" if good else "FAILED",
    ]
    figures = {"kills": [asdict(kill) for kill in kills], "lines": len(found), "different": different, "good": good}
    return Outcome("\n".join(lines), figures=figures, status=0 if good else 1)
