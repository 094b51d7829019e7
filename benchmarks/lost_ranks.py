"""Kill −9 ranks of one training run at random moments, and compare every loss with an undisturbed run's.

    make bench-lost-ranks ARGS="[--kills 10] [--iterations 200] [--seed 1] [--rejoin-after 2] [--replicas 2]
                                [--microbatches 64] [--distributed-optimizer] [--output docs/resilience.md]"

Two pipeline ranks of each replica train a tiny model under `helixpipe train` with a snapshot in memory after each step.
There are no checkpoints: what the run goes on from is in memory. Kills hit ranks drawn at random, at moments drawn from
two steps. What has to hold: the run ends by itself, no step whose line was printed is repeated, every loss is within
1e-6 of the undisturbed run's, relative. A line is missing where the last rank was killed after all had the snapshot of
the step and before it was printed. Linux only (it reads /proc).
"""

from __future__ import annotations

import os
import random
import re
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.kill_test import Job
from benchmarks.report import Figures, Outcome, Page, markdown
from helixpipe.common.errors import UserError
from helixpipe.common.flags import option

ALLOWED = 1e-6
_PATIENCE = 1800.0  # seconds for a run
FLAGS = (
    "--pipeline-model-parallel-size 2 --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --lr 1e-3 --lr-decay-style constant --mock-data --num-workers 0 "
    "--tokenizer-type NullTokenizer --vocab-size 100 --log-interval 1 --eval-iters 0 --in-memory-checkpoint-interval 1"
)


@dataclass(frozen=True)
class Options(Figures, Page):
    kills: int = option(10, "How many.", at_least=1)
    iterations: int = option(200, "Of the run.", at_least=2)
    seed: int = option(1, "Of moments and victims.")
    rejoin_after: int = option(2, "Seconds for which the others train on without a replica that has lost a rank.")
    replicas: int = option(2, "Of the pipeline of two ranks.", at_least=1)
    microbatches: int = option(64, "Of a replica: steps take long enough for lost ones to join between kills.")
    distributed_optimizer: bool = option(False, "Replicas share out the optimizer's state.")


@dataclass
class Kill:
    """One kill. after: the last iteration printed before it. seconds: until the next was printed. resumed: the
    iteration whose snapshots the run went on from. ranks: with how many. stayed: whether they are the same processes as
    before."""

    rank: int
    after: int
    seconds: float = 0.0
    resumed: int = 0
    ranks: int = 0
    stayed: bool = False


def losses(text: str) -> list[tuple[int, float]]:
    """(iteration, loss) of each log line."""
    lines = re.findall(r"iteration +(\d+)/ *\d+ \|.*?lm loss: (\S+)", text)
    return [(int(iteration), float(loss)) for iteration, loss in lines]


def run(options: Options) -> Outcome:
    generator = random.Random(options.seed)
    flags = f"{FLAGS} --global-batch-size {options.microbatches * options.replicas} --train-iters {options.iterations}"
    flags += " --use-distributed-optimizer" * options.distributed_optimizer
    launcher = ("schedules.command", "train", "--ranks", str(2 * options.replicas))
    with tempfile.TemporaryDirectory() as name:
        reference = Job(flags, Path(name) / "reference.log", launcher=launcher)
        expected = dict(losses(reference.finish(_PATIENCE)))
        job = Job(f"{flags} --rejoin-after {options.rejoin_after}", Path(name) / "killed.log", launcher=launcher)
        try:
            step = options.iterations // (options.kills + 1)
            kills = [_kill(job, step * (n + 1), options, generator) for n in range(options.kills)]
            text = job.finish(_PATIENCE)
        finally:
            job.end()
    return report(kills, losses(text), expected)


def _kill(job: Job, iteration: int, options: Options, generator: random.Random) -> Kill:
    """Kill a rank some time after an iteration, once all ranks train again, and see the run go on."""

    def is_due() -> bool:
        text = job.text()
        done, changes = losses(text), re.findall(r"(\d+) of \d+ ranks go on|lost replicas (join)", text)
        everybody = not changes or changes[-1] in (("", "join"), (str(2 * options.replicas), ""))
        return bool(done) and done[-1][0] >= iteration and everybody

    if not job.wait_for(is_due, 300.0):
        raise UserError(f"the run ended before iteration {iteration}:\n{job.text()[-4000:]}")
    done = losses(job.text())
    seconds = _seconds_of_a_step(job.text())
    time.sleep(2 * seconds * generator.random())
    ranks = job.ranks()
    rank = generator.choice(sorted(ranks))
    os.kill(ranks[rank], signal.SIGKILL)
    begun, done = time.monotonic(), losses(job.text())
    kill = Kill(int(rank), done[-1][0])
    job.wait_for(lambda: len(losses(job.text())) > len(done) and len(job.ranks()) > 0)
    kill.seconds = time.monotonic() - begun
    text = job.text()
    kill.resumed = int(re.findall(r"going on from the snapshots of iteration (\d+)", text)[-1])
    kill.ranks = int(re.findall(r"(\d+) of \d+ ranks go on", text)[-1])
    now = job.ranks()
    kill.stayed = all(now.get(each) == pid for each, pid in ranks.items() if each != str(rank))
    print(f"{kill}", flush=True)
    return kill


def _seconds_of_a_step(text: str) -> float:
    return median(float(each) for each in re.findall(r"elapsed time per iteration \(ms\): (\S+)", text)[-5:]) / 1000


def report(kills: Sequence[Kill], found: Sequence[tuple[int, float]], expected: dict[int, float]) -> Outcome:
    apart = max(abs(loss / expected[iteration] - 1) for iteration, loss in found)
    repeated = len(found) - len({iteration for iteration, _ in found})
    missing = set(expected) - {iteration for iteration, _ in found}
    rows = [
        (
            *map(str, (number, each.rank, each.after, each.resumed, each.ranks)),
            "yes" if each.stayed else "no",
            f"{each.seconds:.1f}",
        )
        for number, each in enumerate(kills, 1)
    ]
    heads = ("kill", "rank", "last line before", "went on after", "with ranks", "same processes", "next line after, s")
    good = apart < ALLOWED and not repeated and missing <= {each.resumed for each in kills}
    table = markdown(heads, rows, "rrrrrlr")
    seconds = [each.seconds for each in kills]
    told = (
        f"{len(expected)} iterations, lines of {repeated} repeated and of {len(missing)} missing; losses within "
        f"{apart:.1e} of the undisturbed run's; the next line after {median(seconds):.1f} s (median), "
        f"{max(seconds):.1f} s at most."
    )
    figures = {"kills": [asdict(each) for each in kills], "apart": apart, "repeated": repeated, "good": good}
    lines = [*table, "", told, "PASSED" if good else "FAILED"]
    return Outcome("\n".join(lines), {"lost-ranks": [*table, "", told]}, figures, 0 if good else 1)
