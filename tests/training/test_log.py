"""Log lines as Megatron-LM writes them, and metrics under its tags."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from helixpipe.common.errors import UserError
from megatron.pretrain.log.log import (
    MemoryUse,
    StepResult,
    TrainingLog,
    build_timers,
    measure_memory,
    memory_line,
    parameters_line,
    validation_line,
)
from megatron.pretrain.log.metrics import MetricsWriter
from tests.training.helpers import config

NUMBER = r"-?\d\.\d{6}E[+-]\d{2}"
ITERATION = re.compile(
    r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\] iteration [ \d]{8}/[ \d]{8} \| consumed samples: [ \d]{12} \| "
    r"elapsed time per iteration \(ms\): \d+\.\d \| (throughput per GPU \(TFLOP/s/GPU\): \d+\.\d \| )?"
    rf"learning rate: {NUMBER} \| global batch size: [ \d]{{5}} \| (lm loss: {NUMBER} \| )?loss scale: \d+\.\d \| "
    r"(grad norm: \d+\.\d{3} \| )?(num zeros: \d+\.\d \| )?(params norm: \d+\.\d{3} \| )?"
    r"number of skipped iterations: [ \d]{3} \| number of nan iterations: [ \d]{3} \| "
    r"tokens per second per GPU: \d+\.\d \| time left: [\d:]+ \|"
)


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Run:
    """A log whose lines are collected."""

    def __init__(self, flags: str = "", *, world: int = 1, rank: int = 0, writer: MetricsWriter | None = None) -> None:
        self.lines: list[str] = []
        self.clock = Clock()
        self.log = TrainingLog(
            config(f"--global-batch-size 4 --micro-batch-size 1 {flags}", world=world, rank=rank),
            total_iterations=10,
            writer=writer,
            report_memory=False,
            clock=self.clock,
            emit=self.lines.append,
        )

    def steps(self, first: int, *results: StepResult, seconds: float = 2.0) -> None:
        for offset, result in enumerate(results):
            self.clock.now += seconds
            self.log.step(first + offset, 4 * (first + offset), result)


def result(loss: float | torch.Tensor = 2.0, **changes: Any) -> StepResult:
    sizes = {"flops": 4 * 5e11, "tokens": 4 * 32}
    return StepResult(loss=loss, learning_rate=1.5e-4, samples=4, grad_norm=0.5, **{**sizes, **changes})


def test_the_iteration_line() -> None:
    run = Run("--log-interval 2 --log-throughput")
    run.steps(1, result(9.0), result(9.0), result(2.0), result(torch.tensor(4.0)))
    assert len(run.lines) == 3 and ITERATION.fullmatch(run.lines[2])
    shown = run.lines[2].split("] ", 1)[1]
    assert shown == (
        "iteration        4/      10 | consumed samples:           16 | elapsed time per iteration (ms): 2000.0 | "
        "throughput per GPU (TFLOP/s/GPU): 1.0 | learning rate: 1.500000E-04 | global batch size:     4 | "
        "lm loss: 3.000000E+00 | loss scale: 1.0 | grad norm: 0.500 | number of skipped iterations:   0 | "
        "number of nan iterations:   0 | tokens per second per GPU: 64.0 | time left: 0:00:12 |"
    )


def test_the_first_and_the_last_iteration_have_lines_of_their_own() -> None:
    """Whatever the interval, also of a run that resumes; the first, which is slower, is not in the next mean."""
    run = Run("--log-interval 4")
    run.steps(6, result(), seconds=50.0)
    run.steps(7, result(), result(), result(), result())
    assert [line.split("iteration ")[1][:8].strip() for line in run.lines] == ["6", "8", "10"]
    assert "(ms): 50000.0 " in run.lines[0] and "time left: 0:03:20 |" in run.lines[0]
    assert "(ms): 2000.0 " in run.lines[1] and "time left: 0:00:00 |" in run.lines[2]
    assert config().logging.log_interval == 100


def test_throughput_is_for_one_gpu_and_optional() -> None:
    run = Run("--log-interval 1", world=4, rank=3)
    run.steps(1, result())
    assert ITERATION.fullmatch(run.lines[0])
    assert "throughput" not in run.lines[0] and "tokens per second per GPU: 16.0 |" in run.lines[0]


def test_skipped_and_nan_iterations_are_counted_and_left_out_of_the_mean() -> None:
    run = Run("--log-interval 4")
    run.steps(0, result(9.0))
    run.steps(1, result(1.0), result(math.nan), result(7.0, skipped=True), result(3.0))
    assert ITERATION.fullmatch(run.lines[1])
    assert "lm loss: 2.000000E+00" in run.lines[1]
    assert "skipped iterations:   1 | number of nan iterations:   1 |" in run.lines[1]
    run.steps(5, *[result(skipped=True)] * 4)
    assert "lm loss" not in run.lines[2] and ITERATION.fullmatch(run.lines[2])


def test_optional_fields() -> None:
    run = Run("--log-interval 1")
    run.steps(1, result(num_zeros=12.0, params_norm=3.25))
    assert ITERATION.fullmatch(run.lines[0])
    assert "grad norm: 0.500 | num zeros: 12.0 | params norm: 3.250 |" in run.lines[0]


def test_losses_of_further_tokens() -> None:
    """As Megatron-LM's are, means over the interval; not those of skipped iterations."""
    run = Run("--log-interval 3")
    further = (torch.tensor(2.0), torch.tensor(5.0)), (torch.tensor(9.0), torch.tensor(9.0)), (4.0, 6.0)
    run.steps(1, result(), *(result(further=each, skipped=at == 1) for at, each in enumerate(further)))
    assert "| lm loss: 2.000000E+00 | mtp_1 loss: 2.000000E+00 | mtp_2 loss: 5.000000E+00 | loss sc" in run.lines[1]
    run.steps(5, result(further=(3.0, 4.0)), result(further=(5.0, 4.0)))
    assert "| mtp_1 loss: 4.000000E+00 | mtp_2 loss: 4.666667E+00 | loss scale" in run.lines[2]


def test_only_the_last_rank_writes() -> None:
    run = Run("--log-interval 1", world=2, rank=0)
    run.steps(1, result())
    run.log.evaluation("iteration 1", 2.0, 1, 4)
    assert run.lines == []


def test_evaluation_takes_no_time_of_iterations() -> None:
    run = Run("--log-interval 2")
    run.steps(1, result())
    with run.log.paused():
        run.clock.now += 50.0
    run.steps(2, result())
    assert "elapsed time per iteration (ms): 2000.0" in run.lines[0]


def test_the_validation_line() -> None:
    rule, line, again = validation_line("iteration 20", 2.0).split("\n")
    assert line == " validation loss at iteration 20 | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 | "
    assert rule == again == "-" * (len(line) + 1)
    assert "lm loss PPL: 4.851652E+08" in validation_line("x", 1e6)


def test_the_memory_and_parameter_lines() -> None:
    use = MemoryUse(2**20, 2**21, 3 * 2**20, 2**22)
    assert memory_line(3, 5, use) == (
        "[Rank 3] (after 5 iterations) memory (MB) | allocated: 1.00 | max allocated: 2.00 | reserved: 3.00 | "
        "max reserved: 4.00"
    )
    assert parameters_line(1, 0, 42) == " > number of parameters on (tensor, pipeline) model parallel rank (1, 0): 42"
    measured = measure_memory()
    assert 0 < measured.allocated <= measured.max_allocated


def test_memory_is_reported_once() -> None:
    lines: list[str] = []
    log = TrainingLog(config("--log-interval 1"), total_iterations=2, emit=lines.append)
    for iteration in (1, 2):
        log.step(iteration, iteration, result())
    assert sum(line.startswith("[Rank 0] (after 1 iterations) memory (MB) | allocated: ") for line in lines) == 1
    assert len(lines) == 3


def test_tensorboard_tags(tmp_path: Path) -> None:
    flags = (
        f"--tensorboard-dir {tmp_path} --log-interval 2 --log-throughput --log-memory-to-tensorboard "
        "--log-world-size-to-tensorboard --log-validation-ppl-to-tensorboard"
    )
    writer = MetricsWriter.from_config(config(flags))
    assert writer.active
    run = Run(flags, writer=writer)
    run.steps(1, result(2.0), result(4.0))
    run.log.evaluation("iteration 2", 1.0, 2, 8)
    writer.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    both = {"lm loss", "learning-rate", "grad-norm", "batch-size", "loss-scale", "world-size"}
    both |= {"lm loss validation", "lm loss validation ppl"}
    assert both | {f"{tag} vs samples" for tag in both} | {"iteration-time", "throughput"} <= tags
    assert {"mem-allocated-bytes", "mem-max-allocated-bytes", "mem-reserved-bytes"} <= tags
    assert [(event.step, event.value) for event in events.Scalars("lm loss")] == [(1, 2.0), (2, 4.0)]
    assert [event.step for event in events.Scalars("lm loss vs samples")] == [4, 8]
    assert events.Scalars("iteration-time")[0].value == 2.0


def test_other_ranks_write_no_metrics(tmp_path: Path) -> None:
    assert not MetricsWriter.from_config(config(f"--tensorboard-dir {tmp_path}", world=2, rank=0)).active
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_named_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="--wandb-project p needs the package wandb"):
        MetricsWriter.from_config(config("--wandb-project p", world=2, rank=0))


def test_timings_are_logged_and_written_with_every_line() -> None:
    """Timers average over the interval, over all ranks; the values for TensorBoard are read before the reset."""

    class Timers:
        def __init__(self) -> None:
            self._timers = {"optimizer": None}
            self.calls: list[object] = []

        def write(self, names: list[str], writer: object, iteration: int, normalizer: float, reset: bool) -> None:
            self.calls.append((names, iteration, normalizer, reset))

        def get_all_timers_string(self, normalizer: float, reset: bool) -> str:
            self.calls.append((normalizer, reset))
            return "(min, max) time across ranks (ms): ..."

    lines: list[str] = []
    timers = Timers()
    chosen = config("--log-interval 2 --timing-log-level 1 --log-timers-to-tensorboard")
    log = TrainingLog(
        chosen,
        total_iterations=4,
        timers=timers,
        report_memory=False,
        emit=lines.append,
    )
    for iteration in (1, 2, 3, 4):
        log.step(iteration, iteration, result())
    first, later = [(["optimizer"], 1, 1, False), (1, True)], [(["optimizer"], 4, 2, False), (2, True)]
    assert timers.calls[:2] == first and timers.calls[-2:] == later
    assert lines[1] == "(min, max) time across ranks (ms): ..."


def test_timers_are_megatron_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    timers = build_timers(config("--timing-log-level 1"))
    timers("forward", log_level=1).start()
    timers("forward").stop()
    assert timers("forward").elapsed(reset=False) >= 0.0
    timers("too-fine", log_level=2).start()


def test_loads_of_experts(tmp_path: Path) -> None:
    """The most uneven layer in the line, each in a line of its own and in TensorBoard where that is asked for."""
    loads: Any = torch.tensor([[10.0, 20.0, 30.0, 20.0], [0.0] * 4, [60.0, 0.0, 20.0, 0.0]])
    plain, by_layer = Run(), Run("--moe-per-layer-logging", writer=MetricsWriter(SummaryWriter(str(tmp_path))))
    for run in (plain, by_layer):
        run.steps(1, result(loads=loads))
        run.log._writer.close()
        assert "| experts max/mean: 3 | time left" in run.lines[0]
    assert len(plain.lines) == 1
    assert by_layer.lines[1:] == [
        " > layer   1 | experts max/mean: 1.50 | tokens: 10 20 30 20 |",
        " > layer   3 | experts max/mean: 3.00 | tokens: 60 0 20 0 |",
    ]
    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.Scalars("experts-max/mean")[0].value == 3
    assert events.Scalars("moe/experts max/mean layer 1")[0].value == 1.5
