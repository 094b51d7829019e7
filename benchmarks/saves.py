"""How long training is held up by a checkpoint, written at once and beside it; CPU, p = 2.

    make bench-saves ARGS="[--rounds 9] [--flags '--hidden-size 256'] [--folder DIR] [--json out.json]"

One process a rank trains. A round takes `STEPS` steps three times: alone, after a checkpoint that is written at once,
and after one that is written beside them (`--async-save`); each comes first in its turn. What a checkpoint costs is the
time of its steps less that of the round's steps alone, so it has what the save itself takes and how much slower the
steps beside the writer are. Not in it is what the writer still had to do after these steps, the last column. Figures
are medians over rounds.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.ranks import on_ranks
from benchmarks.report import Figures, Outcome, markdown
from benchmarks.steps import FLAGS, UNCLIPPED, Run
from helixpipe.common.flags import option

STEPS, WARM_UP = 6, 1
KINDS = ("alone", "at once", "beside")
MODEL = "--num-layers 4 --hidden-size 384 --ffn-hidden-size 1032 --seq-length 128 --pipeline-schedule 1f1b"


@dataclass(frozen=True)
class Options(Figures):
    rounds: int = option(9, "Rounds that count.", at_least=3)
    flags: str = option("", "More of pretrain_gpt.py's, for another model.")
    folder: str | None = option(None, "Where checkpoints go (default: a temporary folder).", metavar="DIR")


def run(options: Options) -> Outcome:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = on_ranks("benchmarks.saves:measure", folder, options.rounds, options.flags)
    return Outcome(report(found), figures=found)


def report(found: Mapping[str, Any]) -> str:
    """The table."""
    rounds = found["rounds"]
    alone = statistics.median(each["alone"]["steps"] for each in rounds)
    size = f"{found['bytes'] / 2**20:.0f} MiB of state, {1e3 * alone / STEPS:.0f} ms a step; medians of {len(rounds)}"
    lines = []
    for kind in KINDS[1:]:
        call, rest = (1e3 * statistics.median(each[kind][what] for each in rounds) for what in ("save", "rest"))
        held_up = [1e3 * (each[kind]["steps"] - each["alone"]["steps"]) for each in rounds]
        low, middle, high = statistics.quantiles(held_up, n=4, method="inclusive")
        lines.append((kind, f"{call:.0f}", f"{middle:.0f}", f"{low:.0f}–{high:.0f}", f"{rest:.0f}"))
    heads = ("a checkpoint written", "holds up its call, ms", "training, ms", "quartiles", "writer's rest, ms")
    return "\n".join([size, "", *markdown(heads, lines, "lrrrr")])


def measure(folder: str, rounds: int, more: str) -> dict[str, Any]:
    """On each rank: bytes of a checkpoint, and of each round the times of each kind."""
    import torch.distributed as dist

    from helixpipe.model.device import prepare

    prepare()
    from megatron.pretrain.arguments import parse_args
    from megatron.pretrain.checkpoint.checkpointing import Checkpointer
    from megatron.pretrain.checkpoint.options import CheckpointOptions
    from megatron.pretrain.process.parallel import initialize

    flags = f"{FLAGS} {MODEL} {UNCLIPPED} {more}"
    initialize(parse_args(flags.split()))
    trainer = Run(flags).trainer
    saved = Path(folder, "saved")
    savers = {kind: Checkpointer(CheckpointOptions(save=str(saved), async_save=kind == "beside")) for kind in KINDS[1:]}

    def seconds(kind: str) -> dict[str, float]:
        """Of the save's call; of that and the steps, until both ranks are done with them; of what is left to write."""
        dist.barrier()
        start = time.perf_counter()
        if kind in savers:
            savers[kind].save(trainer.progress, trainer.state.model, trainer.state.optimizer, trainer.scheduler, {})
        called = time.perf_counter() - start
        for _ in range(STEPS):
            trainer._iteration(record=False)
        dist.barrier()
        done = time.perf_counter() - start
        if kind in savers:
            savers[kind].settle()
        dist.barrier()
        return {"save": called, "steps": done, "rest": time.perf_counter() - start - done}

    found = []
    for number in range(WARM_UP + rounds):
        order = [KINDS[(number + place) % len(KINDS)] for place in range(len(KINDS))]
        found.append({kind: seconds(kind) for kind in order})
        written = max(sum(file.stat().st_size for file in each.iterdir()) for each in saved.glob("iter_*"))
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(saved)
        dist.barrier()
    trainer.pipeline.close()
    return {"bytes": written, "rounds": found[WARM_UP:]}
