"""All that is to be run once a GPU is at hand, in one command; what it finds goes into a folder.

    make bench-gpu ARGS="[--output runs/gpu] [--only profile-8k ...] [--list]"
    make gpu-hour CALL=1                         one of three calls of 9.5 minutes at most (docs/gpu.md)
    make gpu-hour CALL=1 ARGS="--dry-run"        whether its commands would start: those that train on the fake device

Steps run one after the other, each by itself with a time limit, the quick and telling ones first; one that fails or
takes too long stops none of the others. Of each there is a log, and where it measures, a JSON file; `summary.md` says
after every step what has been done. Steps that have ended well are left out when the same folder is named again, so a
run that is cut off goes on where it was. Without a GPU the same steps run at tiny sizes on the CPU. The steps are in
benchmarks/data/gpu.toml.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from string import Template
from tempfile import TemporaryDirectory

from benchmarks import data
from benchmarks.ranks import own_environment
from benchmarks.report import FOLDER, ROOT, Outcome, read_figures, write_figures
from benchmarks.run import options_of
from helixpipe.cli.parser import parsed, parsers
from helixpipe.common.errors import UserError
from helixpipe.common.flags import option
from schedules import CATALOGUE

FILE = "gpu.toml"
CALLS = 3
CALL_MINUTES = 9.5
"""What a call of the first GPU hour may take."""


@dataclass(frozen=True)
class Step:
    """A command of this checkout's Python; $output is the folder. minutes: its limit. call: of those of the
    first hour, 0: none."""

    name: str
    command: str
    minutes: float = 10.0
    call: int = 0

    def words(self, output: Path) -> list[str]:
        return Template(self.command).substitute(output=output).split()


def steps_on(device: str) -> list[Step]:
    """Return the steps of the file, with its [words]."""
    words = data.read(FOLDER / FILE)["words"]
    steps = data.rows(FILE, device, Step)
    return [replace(step, command=Template(step.command).safe_substitute(words)) for step in steps]


@dataclass(frozen=True)
class Options:
    output: str = option("runs/gpu", "The folder.", metavar="DIR")
    only: tuple[str, ...] = option((), "Some steps, also if they have been done.", metavar="STEP")
    call: int = option(0, "The steps of this call of the first GPU hour alone; 0: all.", at_least=0, at_most=CALLS)
    dry_run: bool = option(
        False, "Try what trains on GPUs that compute nothing, of others the flags.", flags=("--dry-run",)
    )
    list: bool = option(False, "Print the steps and their commands.", flags=("--list",))


def run(options: Options) -> Outcome:
    steps = steps_on("gpu" if options.call or options.dry_run or has_gpu() else "cpu")
    steps = [step for step in steps if options.call in (0, step.call)]
    names = [step.name for step in steps]
    if unknown := sorted(set(options.only) - set(names)):
        raise UserError(f"--only {' '.join(unknown)}: valid here are {', '.join(names)}.")
    if options.list:
        return Outcome("\n".join(f"{step.name:<16} {step.command}" for step in steps))
    if options.dry_run:
        return dry_run([step for step in steps if step.name in (options.only or names)])
    output, began = Path(options.output).resolve(), time.monotonic()
    output.mkdir(parents=True, exist_ok=True)
    record = output / "steps.json"
    done: dict[str, dict[str, float | str]] = read_figures(record)
    for step in steps:
        if step.name not in (options.only or names) or (
            not options.only and done.get(step.name, {}).get("ended") == "well"
        ):
            continue
        print(f"{step.name} ...", end=" ", flush=True)
        start = time.monotonic()
        left = CALL_MINUTES - (start - began) / 60 if options.call else step.minutes
        ended = run_step(replace(step, minutes=max(0.0, min(step.minutes, left))), output)
        done[step.name] = {"ended": ended, "seconds": round(time.monotonic() - start, 1)}
        print(f"{ended}, {done[step.name]['seconds']} s", flush=True)
        write_figures(record, done)
        (output / "summary.md").write_text(summary(steps, done, output), encoding="utf-8")
    return Outcome(status=int(any(each["ended"] != "well" for each in done.values())))


def training(step: Step) -> tuple[int, list[str]] | None:
    """Return the ranks and the flags of a step that trains; None for others."""
    launcher, program, flags = step.command.partition(" pretrain_gpt.py ")
    if not program:
        return None
    words = [word for word in flags.replace("--distributed-backend gloo ", "").split() if "$output" not in word]
    named = (
        "--save",
        "--record-timeline",
        "--save-interval",
    )  # what is not written, and not asked for without the rest
    kept = [word for number, word in enumerate(words) if word not in named and words[number - 1] != "--save-interval"]
    return int(launcher.split("--nproc-per-node ")[1].split()[0]), kept


def dry_run(steps: list[Step]) -> Outcome:
    """Run the first and last rank of each step that trains on the fake device, over NCCL; of other steps see that their
    tests are found and their flags are those of the program."""
    lines, status = [], 0
    for step in steps:
        trains = training(step) is not None
        reason = not_trained(step) if trains else not_started(step)
        lines.append(f"{step.name}: {reason or ('would train' if trains else 'would start')}")
        status = status or int(bool(reason))
    return Outcome("\n".join(lines), status=status)


def not_trained(step: Step) -> str:
    """Why a step that trains would not; empty if it would."""
    ranks, flags = training(step) or (0, [])
    words = ["-m", "schedules.command", "dry-run", "--world-size", str(ranks), "--ranks"]
    return _failure([*words, ",".join(map(str, sorted({0, ranks - 1}))), "--", *flags])


def not_started(step: Step) -> str:
    """Why another step would not start; empty if it would."""
    with TemporaryDirectory() as output:  # pytest writes its report there even where it only collects
        return _not_started(*step.words(Path(output))[1:])


def _not_started(module: str, *words: str) -> str:
    try:
        if module == "benchmarks":
            options_of(words[0], list(words[1:]))
        elif module == "schedules.command":
            parser, commands = parsers(CATALOGUE, only=words[0])
            parsed(parser, commands, CATALOGUE, list(words))
        elif module == "pytest":
            return _failure(["-m", module, *words, "--collect-only"])  # fails where there is no test
    except UserError as error:
        return str(error)
    return "" if find_spec(module) else f"there is no module {module}"


def _failure(words: list[str]) -> str:
    """What a command prints that fails; empty if it does not."""
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=own_environment(), capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stdout + done.stderr or f"exit code {done.returncode}"


def has_gpu() -> bool:
    """Asked of another process: this one must not hold memory on it."""
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def run_step(step: Step, output: Path) -> str:
    """How it ended: `well`, `with exit code 1`, `out of time`."""
    with Path(output, f"{step.name}.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [sys.executable, *step.words(output)],
            cwd=ROOT,
            env=own_environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that its ranks, too, can be ended
        )
        try:
            code = process.wait(60 * step.minutes)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return "out of time"
    return "well" if code == 0 else f"with exit code {code}"


def summary(steps: list[Step], done: dict[str, dict[str, float | str]], output: Path) -> str:
    """A table of the steps, and the end of each log."""
    lines = ["| step | ended | seconds |", "|---|---|--:|"]
    ran = [step for step in steps if step.name in done]
    lines += [f"| {step.name} | {done[step.name]['ended']} | {done[step.name]['seconds']} |" for step in ran]
    for step in ran:
        log = Path(output, f"{step.name}.log").read_text(encoding="utf-8", errors="replace").splitlines()
        lines += ["", f"## {step.name}", "", "    " + " ".join(step.words(output)), "", "```", *log[-40:], "```"]
    return "\n".join(lines) + "\n"
