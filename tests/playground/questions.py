"""Questions of the playground at random, and what the command line answers."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from random import Random
from typing import Any

from schedules import CATALOGUE, command

MODELS = ("llama2-7b", "llama3-8b", "qwen3-4b", "helix-1.3b")


def random_questions(count: int, seed: int) -> list[dict[str, Any]]:
    """Settings as a person chooses them: all schedules, few ranks, times by hand or of a model. Some cannot be."""
    random = Random(seed)
    return [_question(random, list(CATALOGUE)[number % len(CATALOGUE)]) for number in range(count)]


def _question(random: Random, schedule: str) -> dict[str, Any]:
    ranks = 1 if CATALOGUE.find(schedule).one_rank else random.choice((1, 2, 2, 3, 4, 4))
    flags = ["-p", ranks, "-m", random.randint(1, 9)]
    if random.random() < 0.5:
        flags += ["-k", random.choice((2, 3, 4))]
    if random.random() < 0.3:
        flags += ["-L", ranks * random.randint(2, 4)]
    if random.random() < 0.3:
        flags += ["--recompute-granularity", random.choice(("full", "selective"))]
    costs: list[Any] = []
    if random.random() < 0.35:
        costs += ["--model", random.choice(MODELS), "--hardware", random.choice(("a800", "h100"))]
        costs += ["--seq-length", random.choice((1024, 4096)), "--memory-limit", 2000]
    else:
        times = (round(random.uniform(0.1, 9), 3) for _ in range(3))
        costs += ["--piece-times", "pre={},attn={},post={}".format(*times)]
        costs += ["--message-time", round(random.uniform(0, 2), 3)]
    return {"schedule": schedule, "flags": [*map(str, flags)], "costs": [*map(str, costs)], "moves": []}


def command_line(question: dict[str, Any]) -> dict[str, Any]:
    """What `helixpipe simulate --json` prints; `error`, where it ends with a sentence."""
    words = ["simulate", question["schedule"], *question["flags"], *question["costs"], "--json"]
    printed, said = io.StringIO(), io.StringIO()
    with redirect_stdout(printed), redirect_stderr(said):
        status = command.main(words)
    if status:
        return {"error": said.getvalue().strip().removeprefix("helixpipe: ")}
    result: dict[str, Any] = json.loads(printed.getvalue())
    return result
