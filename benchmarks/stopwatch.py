"""A stranger's stopwatch: from a clone to the first picture, to the first training, to a plan for one's own model.

    make bench-stopwatch ARGS="[--revisions 3a9eac9 HEAD] [--goals picture plan] [--json out.json]"

Each goal begins with a clone of this repository at the revision in an empty temporary folder. Where a revision has an
installation without torch, pictures and plans take that, else `make install`; the first training is `make quickstart`.
A model of one's own is a Hugging Face config.json where the revision reads one, else flags. Packages come from where
pip is told, without its cache: with a network their size counts. Not counted: reading, and typing.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from benchmarks.report import ROOT, Figures, Outcome, markdown, progress
from helixpipe.common.errors import UserError
from helixpipe.common.flags import option

DRAW = "draw 1f1b helix -p 4 -m 8 -L 8 --output first.html"
PLAN = "plan --hardware h100 --gpus 8 --seq-length 32768 --global-batch-size 64"
FLAGS = (
    "--num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 32 --num-query-groups 8 "
    "--vocab-size 128256 --swiglu"
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
"""The same model as in `FLAGS`."""

OUTSIDE = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")
"""Variables of the one who measures that a stranger does not have."""


@dataclass(frozen=True)
class Options(Figures):
    revisions: tuple[str, ...] = option(("HEAD",), "What is cloned, one after the other.")
    goals: tuple[Literal["picture", "training", "plan"], ...] = option(
        ("picture", "training", "plan"), "What is timed."
    )
    python: str = option("python3", "The interpreter that a stranger has.")
    limit: float = option(3600.0, "Seconds after which a goal is given up.", more_than=0)


class Step(NamedTuple):
    command: str
    seconds: float


@dataclass(frozen=True)
class Reached:
    """seconds: from before the clone. processor: of all processes. installed: bytes in .venv."""

    revision: str
    goal: str
    seconds: float
    processor: float
    installed: int
    steps: tuple[Step, ...]


def run(options: Options) -> Outcome:
    found = []
    for revision in options.revisions:
        for goal in options.goals:
            with tempfile.TemporaryDirectory(prefix="stopwatch-") as folder:
                found.append(_timed(revision, goal, Path(folder), options))
            progress(f"{revision} {goal}: {found[-1].seconds:.0f} s")
    return Outcome(report(found), figures=[asdict(each) for each in found])


def commands(revision: str, goal: str, python: str) -> list[str]:
    """What a stranger types at this revision, after the clone and in its folder."""
    if goal == "training":
        return [f"make PYTHON={python} quickstart"]
    if _has(revision, "pyproject.toml", "\ntrain = ["):
        install = [f"{python} -m venv .venv", ".venv/bin/pip install --quiet ."]
    else:
        install = [f"make PYTHON={python} install"]
    if goal == "picture":
        return [*install, f".venv/bin/helixpipe {DRAW}"]
    reads = _has(revision, "helixpipe/cli/model_shape.py", "huggingface")
    return [*install, f".venv/bin/helixpipe {PLAN} {'--model config.json' if reads else FLAGS}"]


def report(found: Sequence[Reached]) -> str:
    """The table, and the part of each command."""
    rows = [
        (
            each.revision,
            each.goal,
            f"{each.seconds / 60:.2f}",
            f"{each.processor / 60:.2f}",
            f"{each.installed / 1e6:.0f}",
        )
        for each in found
    ]
    heads = ("revision", "from clone to", "minutes", "of processors", "installed, MB")
    parts = [
        f"{each.revision} {each.goal}: " + ", ".join(f"{step.command} {step.seconds:.1f} s" for step in each.steps)
        for each in found
    ]
    return "\n".join([*markdown(heads, rows, "llrrr"), "", *parts])


def _timed(revision: str, goal: str, folder: Path, options: Options) -> Reached:
    """Raises UserError for a command that fails, or is not done in time."""
    environment = {name: value for name, value in os.environ.items() if name not in OUTSIDE}
    environment |= {"PIP_NO_CACHE_DIR": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    clone = folder / "clone"
    checkout = f"git clone --quiet {ROOT} {clone} && git -C {clone} checkout --quiet --detach {_commit(revision)}"
    steps: list[Step] = []
    before, first = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    for command in [checkout, *commands(revision, goal, options.python)]:
        begun = time.monotonic()
        where = folder if command == checkout else clone
        try:
            done = subprocess.run(
                command, shell=True, cwd=where, env=environment, capture_output=True, text=True, timeout=options.limit
            )
        except subprocess.TimeoutExpired:
            raise UserError(f"{revision}, {goal}: {command!r} is not done after {options.limit:g} s.") from None
        if done.returncode != 0:
            raise UserError(f"{revision}, {goal}: {command!r} failed: {(done.stderr or done.stdout)[-1000:]}")
        steps.append(Step(command.split(" ")[0].rsplit("/")[-1], time.monotonic() - begun))
        (clone / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    sizes = (path.lstat().st_size for path in (clone / ".venv").rglob("*") if path.is_file())
    return Reached(revision, goal, time.monotonic() - first, processor, sum(sizes), tuple(steps))


def _commit(revision: str) -> str:
    return _git("rev-parse", "--verify", f"{revision}^{{commit}}").strip()


def _has(revision: str, path: str, text: str) -> bool:
    """Whether a file of the revision is there and has a text."""
    there = subprocess.run(("git", "show", f"{revision}:{path}"), cwd=ROOT, capture_output=True, text=True)
    return there.returncode == 0 and text in there.stdout


def _git(*words: str) -> str:
    """Raises UserError for a revision that is not there."""
    done = subprocess.run(("git", *words), cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise UserError(f"--revisions: git knows no {words[-1]!r}.")
    return done.stdout
