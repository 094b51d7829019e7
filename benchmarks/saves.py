"""`make bench-saves`: how long training is held up by a checkpoint, written at once and beside it; CPU, p = 2.

    python benchmarks/saves.py [--rounds 9] [--flags "--hidden-size 256"] [--folder DIR] [--json out.json]

One process a rank trains. A round takes `STEPS` steps three times: alone, after a checkpoint that is written at once,
and after one that is written beside them (`--async-save`); each comes first in its turn. What a checkpoint costs is the
time of its steps less that of the round's steps alone, so it has what the save itself takes and how much slower the
steps beside the writer are. Not in it is what the writer still had to do after these steps, the last column. Figures
are medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from helixpipe.common.child import python_command

HERE = Path(__file__).resolve().parent
STEPS, WARM_UP = 6, 1
KINDS = ("alone", "at once", "beside")
MODEL = "--num-layers 4 --hidden-size 384 --ffn-hidden-size 1032 --seq-length 128 --pipeline-schedule 1f1b"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="that count, at least 3 (default: 9)")
    parser.add_argument("--flags", default="", help="more of pretrain_gpt.py's, for another model")
    parser.add_argument("--folder", metavar="DIR", help="where checkpoints go (default: a temporary folder)")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    arguments = parser.parse_args()
    if arguments.rounds < 3:
        parser.error("--rounds must be at least 3")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        output = Path(folder, "result.json")
        command = python_command("torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__)
        command += ["ranks", str(output), str(arguments.rounds), arguments.flags]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
        subprocess.run(command, check=True, env=environment)
        found = json.loads(output.read_text(encoding="utf-8"))
    report(found)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=1), encoding="utf-8")


def report(found: dict[str, Any]) -> None:
    """Print the table."""
    rounds = found["rounds"]
    alone = statistics.median(each["alone"]["steps"] for each in rounds)
    print(f"{found['bytes'] / 2**20:.0f} MiB of state, {1e3 * alone / STEPS:.0f} ms a step; medians of {len(rounds)}\n")
    print("| a checkpoint written | holds up its call, ms | training, ms | quartiles | writer's rest, ms |")
    print("|---|--:|--:|--:|--:|")
    for kind in KINDS[1:]:
        call = 1e3 * statistics.median(each[kind]["save"] for each in rounds)
        held_up = [1e3 * (each[kind]["steps"] - each["alone"]["steps"]) for each in rounds]
        low, middle, high = statistics.quantiles(held_up, n=4, method="inclusive")
        rest = 1e3 * statistics.median(each[kind]["rest"] for each in rounds)
        print(f"| {kind} | {call:.0f} | {middle:.0f} | {low:.0f}–{high:.0f} | {rest:.0f} |")


def on_ranks(output: Path, rounds: int, more: str) -> None:
    import torch
    import torch.distributed as dist

    from helixpipe.model.device import prepare

    prepare()
    from benchmarks.steps import FLAGS, UNCLIPPED, Run
    from megatron.pretrain.arguments import parse_args
    from megatron.pretrain.checkpoint.checkpointing import Checkpointer
    from megatron.pretrain.checkpoint.options import CheckpointOptions
    from megatron.pretrain.process.parallel import initialize

    torch.set_num_threads(1)
    flags = f"{FLAGS} {MODEL} {UNCLIPPED} {more}"
    initialize(parse_args(flags.split()))
    trainer = Run(flags).trainer
    folder = output.parent / "saved"
    savers = {
        kind: Checkpointer(CheckpointOptions(save=str(folder), async_save=kind == "beside")) for kind in KINDS[1:]
    }

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
        written = max(sum(file.stat().st_size for file in each.iterdir()) for each in folder.glob("iter_*"))
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
        dist.barrier()
    if dist.get_rank() == 0:
        output.write_text(json.dumps({"bytes": written, "rounds": found[WARM_UP:]}), encoding="utf-8")
    trainer.pipeline.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:2] == ["ranks"]:
        on_ranks(Path(sys.argv[2]), int(sys.argv[3]), " ".join(sys.argv[4:]))
    else:
        main()
