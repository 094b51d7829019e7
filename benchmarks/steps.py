"""Training steps with and without a flush between them, on this machine's CPU, p = 2.

    make bench-steps ARGS="[--schedules zb2p wzb2] [--rounds 7] [--flags '--seq-length 512'] [--json out.json]"

The same model and data are trained under each schedule twice, in one process a rank: with the norm of the gradients
waited for after every step, and without (`--enable-optimizer-post-validation`; megatron/pretrain/step/update.py). Runs
take turns, `STEPS` steps each; figures are medians over rounds. Nothing is clipped, but in one run every step: those
are waited for, and should cost nothing.

Predicted: the program simulated with what its ops took; with a flush a step takes until the last rank ends, without
as long as the rank that takes longest from its first op to its last. The optimizer comes to both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.ranks import on_ranks
from benchmarks.report import Figures, Outcome, markdown
from benchmarks.rounds import in_turn, ratios
from helixpipe.common.flags import option

STEPS, WARM_UP = 8, 1
SCHEDULES = ("1f1b", "zb1p", "zb2p", "zbv", "wzb2")
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


@dataclass(frozen=True)
class Options(Figures):
    schedules: tuple[str, ...] = option(SCHEDULES, "Which schedules.")
    rounds: int = option(7, "Rounds that count.", at_least=3)
    flags: str = option("", "More of pretrain_gpt.py's, for another model or batch.")


def run(options: Options) -> Outcome:
    rows = on_ranks("benchmarks.steps:measure", options.rounds, options.schedules, options.flags)
    return Outcome(report(rows), figures=rows)


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table."""
    lines = []
    for row in rows:
        low, middle, high = statistics.quantiles(row["ratios"], n=4, method="inclusive")
        times = (f"{1e3 * statistics.median(row[kind]):.1f}" for kind in ("flush", "late"))
        predicted = f"{row['predicted']:.3f}" if row["predicted"] else ""
        lines.append((row["name"], *times, f"{middle:.3f}", f"{low:.3f}–{high:.3f}", predicted))
    heads = ("schedule", "ms with a flush", "without", "speed without over with", "quartiles", "predicted")
    return "\n".join(markdown(heads, lines, "lrrrrr"))


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


def measure(rounds: int, schedules: Sequence[str], more: str) -> list[dict[str, Any]]:
    """On each rank: a row a schedule, and one of the first with every step clipped."""
    from helixpipe.model.device import prepare

    prepare()
    from megatron.pretrain.arguments import parse_args
    from megatron.pretrain.process.parallel import initialize

    model = f"{FLAGS} {more}"
    initialize(parse_args(model.split()))
    cases = [(name, f"{model} --pipeline-schedule {name} {UNCLIPPED}") for name in schedules]
    cases.append((f"{schedules[0]}, every step clipped", f"{model} --pipeline-schedule {schedules[0]} {CLIPPED}"))
    rows = []
    for name, flags in cases:
        runs = {"flush": Run(flags), "late": Run(f"{flags} {LATE}")}
        times = in_turn(runs, rounds, lambda kind, runs=runs: runs[kind].seconds(), WARM_UP)  # type: ignore[misc]
        whole, span = runs["flush"].predicted()
        optimizer = max(statistics.median(times["flush"]) - whole, 0.0)
        predicted = None if "clipped" in name else predicted_ratio(whole + optimizer, span + optimizer)
        rows.append({"name": name, **times, "ratios": ratios(times["flush"], times["late"]), "predicted": predicted})
        for each in runs.values():
            each.trainer.pipeline.close()
    return rows
