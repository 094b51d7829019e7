"""`make bench-steps`: training steps with and without a flush between them, on this machine's CPU, p = 2.

    python benchmarks/steps.py [--schedules zb2p wzb2] [--rounds 7] [--flags "--seq-length 512"] [--json out.json]

The same model and data are trained under each schedule twice, in one process a rank: with the norm of the gradients
waited for after every step, and without (`--enable-optimizer-post-validation`; megatron/pretrain/step/update.py). Runs
take turns, `STEPS` steps each; figures are medians over rounds. Nothing is clipped, but in one run every step: those
are waited for, and should cost nothing.

Predicted: the program simulated with what its ops took; with a flush a step takes until the last rank ends, without
as long as the rank that takes longest from its first op to its last. The optimizer comes to both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from helixpipe.common.child import python_command

HERE = Path(__file__).resolve().parent
STEPS, WARM_UP = 8, 1
CATALOGUE = ("1f1b", "zb1p", "zb2p", "zbv", "wzb2")
FLAGS = (
    "--pipeline-model-parallel-size 2 --num-layers 4 --hidden-size 128 --num-attention-heads 8 --seq-length 1024 "
    "--max-position-embeddings 1024 --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--ffn-hidden-size 344 --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 "
    "--hidden-dropout 0 --micro-batch-size 1 --global-batch-size 4 --train-iters 100000 --lr 1e-5 "
    "--lr-decay-style constant --mock-data --tokenizer-type NullTokenizer --vocab-size 511 --eval-iters 0 "
    "--make-vocab-size-divisible-by 512"
)
CLIPPED, UNCLIPPED = "--clip-grad 1e-6", "--clip-grad 1e9"
LATE = "--enable-optimizer-post-validation"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage="%(prog)s [options]"
    )
    names = ", ".join(CATALOGUE)
    parser.add_argument("--schedules", nargs="+", default=CATALOGUE, metavar="NAME", help=f"which (default: {names})")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count, at least 3 (default: 7)")
    parser.add_argument("--flags", default="", help="more of pretrain_gpt.py's, for another model or batch")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    arguments = parser.parse_args()
    if arguments.rounds < 3:
        parser.error("--rounds must be at least 3")
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "result.json")
        command = python_command("torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__)
        command += ["ranks", str(output), str(arguments.rounds), ",".join(arguments.schedules), arguments.flags]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
        subprocess.run(command, check=True, env=environment)
        rows = json.loads(output.read_text(encoding="utf-8"))
    report(rows)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")


def report(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    print("| schedule | ms with a flush | without | speed without over with | quartiles | predicted |")
    print("|---|--:|--:|--:|--:|--:|")
    for row in rows:
        low, middle, high = statistics.quantiles(row["ratios"], n=4, method="inclusive")
        with_flush, without = (1e3 * statistics.median(row[kind]) for kind in ("flush", "late"))
        predicted = f"{row['predicted']:.3f}" if row["predicted"] else ""
        print(
            f"| {row['name']} | {with_flush:.1f} | {without:.1f} | {middle:.3f} | {low:.3f}–{high:.3f} | {predicted} |"
        )


class Run:
    """One training run of this process, some steps at a time."""

    def __init__(self, flags: str):
        from megatron.pretrain.arguments import parse_args
        from megatron.pretrain.checkpoint.state import TrainingProgress
        from megatron.pretrain.feed.samples import SampleFeed
        from megatron.pretrain.log.log import StepResult, build_timers
        from megatron.pretrain.plan.pipeline import Pipeline
        from megatron.pretrain.plan.programs import make_planner
        from megatron.pretrain.process.parallel import Parallel
        from megatron.pretrain.process.signals import SignalFlag, StopCheck
        from megatron.pretrain.step.lr_schedule import build_param_scheduler
        from megatron.pretrain.step.microbatches import BatchSchedule, run_length
        from megatron.pretrain.step.model import build_model
        from megatron.pretrain.train import Trainer

        class NoLog:
            def step(self, iteration: int, consumed_samples: int, result: StepResult) -> None:
                """Nothing is printed."""

        config = parse_args(flags.split())
        length = config.model.seq_length or 0
        parallel, schedule = Parallel.current(), BatchSchedule.from_config(config)
        pipeline = Pipeline(config, make_planner(config), parallel, schedule.step_sizes())
        state = build_model(config, parallel, pipeline.pieces, pipeline.copies)
        pipeline.attach(state.model, state.weights)
        with SignalFlag(active=False) as flag:
            stop = StopCheck(config, flag, agree=lambda reason: reason)
        log: Any = NoLog()
        unused: Any = None
        self.trainer = Trainer(
            config=config,
            parallel=parallel,
            pipeline=pipeline,
            state=state,
            scheduler=build_param_scheduler(state.optimizer, config, schedule),
            length=run_length(config, schedule),
            feed=SampleFeed(schedule, pipeline.plans, microbatches(length) if pipeline.reads_data else None),
            checkpointer=unused,
            progress=TrainingProgress(),
            log=log,
            timers=build_timers(config),
            stop=stop,
        )

    def seconds(self) -> float:
        """Of a step, over `STEPS` of them from a standstill to the next."""
        import torch.distributed as dist

        dist.barrier()
        start = time.perf_counter()
        for _ in range(STEPS):
            self.trainer._iteration(record=False)
        if self.trainer._unfinished is not None:
            self.trainer._finish_step()
        dist.barrier()
        return (time.perf_counter() - start) / STEPS

    def predicted(self) -> tuple[float, float]:
        """Seconds of a step's ops with and without a flush; collective."""
        work, record = self.trainer._iteration(record=True)
        assert record is not None
        ops = self.trainer.pipeline.recorded(record, work.lowered).simulated.ops
        first = {event.rank: event.start for event in reversed(ops)}
        last = {event.rank: max(each.end for each in ops if each.rank == event.rank) for event in ops}
        return max(last.values()), max(last[rank] - first[rank] for rank in last)


def predicted_ratio(flush: float, late: float) -> float:
    """Of the time of `STEPS` steps with a flush after each over that with one after the last."""
    return STEPS * flush / ((STEPS - 1) * late + flush)


def microbatches(length: int) -> Iterator[Any]:
    import torch

    from helixpipe.model import Microbatch

    generator = torch.Generator().manual_seed(1)
    while True:
        tokens = torch.randint(0, 511, (1, length + 1), generator=generator)
        yield Microbatch(tokens[:, :-1], tokens[:, 1:], torch.ones(1, length))


def on_ranks(output: str, rounds: int, schedules: list[str], more: str) -> None:
    import torch
    import torch.distributed as dist

    from helixpipe.model.device import prepare

    prepare()
    from megatron.pretrain.arguments import parse_args
    from megatron.pretrain.process.parallel import initialize

    torch.set_num_threads(1)
    model = f"{FLAGS} {more}"
    initialize(parse_args(model.split()))
    cases = [(name, f"{model} --pipeline-schedule {name} {UNCLIPPED}") for name in schedules]
    cases.append((f"{schedules[0]}, every step clipped", f"{model} --pipeline-schedule {schedules[0]} {CLIPPED}"))
    rows = []
    for name, flags in cases:
        flush, late = Run(flags), Run(f"{flags} {LATE}")
        for _ in range(WARM_UP):
            flush.seconds()
            late.seconds()
        seconds = [(flush.seconds(), late.seconds()) for _ in range(rounds)]
        with_flush, without = zip(*seconds, strict=True)
        whole, span = flush.predicted()
        optimizer = max(statistics.median(with_flush) - whole, 0.0)
        rows.append(
            {
                "name": name,
                "flush": with_flush,
                "late": without,
                "ratios": [a / b for a, b in seconds],
                "predicted": None if "clipped" in name else predicted_ratio(whole + optimizer, span + optimizer),
            }
        )
        for run in (flush, late):
            run.trainer.pipeline.close()
    if dist.get_rank() == 0:
        Path(output).write_text(json.dumps(rows), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:2] == ["ranks"]:
        on_ranks(sys.argv[2], int(sys.argv[3]), sys.argv[4].split(","), " ".join(sys.argv[5:]))
    else:
        main()
