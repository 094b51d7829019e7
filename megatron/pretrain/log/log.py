"""Megatron-LM's log lines, and the accounting behind them. Values are handed in; nothing is fetched."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from helixpipe.common.output import say
from megatron.pretrain.config import Config
from megatron.pretrain.log.metrics import MetricsWriter

if TYPE_CHECKING:
    from megatron.core.timers import Timers

MEGABYTE = 1024 * 1024
MAX_OVER_MEAN = "experts max/mean"
TERA = 10**12


@dataclass(frozen=True)
class StepResult:
    """The outcome of one iteration. Numbers may be zero-dimensional tensors: they are read only when something is
    written.

    loss: mean over the tokens of the batch. tokens, flops: of the step, over all ranks. grad_norm: None if not known.
    skipped: after an overflow, with weights unchanged. figures: further numbers by name; those below 1 are shares.
    """

    loss: Any
    learning_rate: float
    samples: int
    tokens: int = 0
    flops: float = 0.0
    loss_scale: float = 1.0
    grad_norm: Any = None
    num_zeros: Any = None
    params_norm: Any = None
    skipped: bool = False
    figures: Mapping[str, float] = field(default_factory=dict)
    loads: Any = None
    """[layers, experts], the tokens that were sent to each expert; 0 in layers without."""
    further: Sequence[Any] = ()
    """Losses of the tokens after the next that the head predicts, each a mean over microbatches."""


@dataclass
class _Interval:
    """Sums and counts since the last log line."""

    losses: list[Any] = field(default_factory=list)
    further: list[Sequence[Any]] = field(default_factory=list)
    tokens: int = 0
    flops: float = 0.0
    iterations: int = 0
    skipped: int = 0


def iteration_line(
    *,
    iteration: int,
    total_iterations: int,
    consumed_samples: int,
    seconds: float,
    result: StepResult,
    loss: float | None,
    skipped: int,
    nan: int,
    further: Mapping[str, float] = MappingProxyType({}),
    tflops: float | None = None,
    tokens_per_second: float | None = None,
    remaining: float | None = None,
    now: datetime | None = None,
) -> str:
    """Return the line about one interval; `seconds` is for one iteration, the throughputs for one GPU, remaining: the
    seconds that training still takes at this rate.
    """
    stamp = (now or datetime.now()).strftime("%Y-%m-%d %H:%M:%S.%f")
    fields = [
        f" [{stamp}] iteration {iteration:8d}/{total_iterations:8d}",
        f"consumed samples: {consumed_samples:12d}",
        f"elapsed time per iteration (ms): {seconds * 1000.0:.1f}",
    ]
    if tflops is not None:
        fields.append(f"throughput per GPU (TFLOP/s/GPU): {tflops:.1f}")
    fields.append(f"learning rate: {result.learning_rate:.6E}")
    fields.append(f"global batch size: {result.samples:5d}")
    if loss is not None:
        fields.append(f"lm loss: {loss:.6E}")
    fields += [f"{name}: {value:.6E}" for name, value in further.items()]
    fields.append(f"loss scale: {result.loss_scale:.1f}")
    if result.grad_norm is not None:
        fields.append(f"grad norm: {float(result.grad_norm):.3f}")
    if result.num_zeros is not None:
        fields.append(f"num zeros: {float(result.num_zeros):.1f}")
    if result.params_norm is not None:
        fields.append(f"params norm: {float(result.params_norm):.3f}")
    fields.append(f"number of skipped iterations: {skipped:3d}")
    fields.append(f"number of nan iterations: {nan:3d}")
    if tokens_per_second is not None:
        fields.append(f"tokens per second per GPU: {tokens_per_second:.1f}")
    fields += [f"{name}: {figure_text(name, value)}" for name, value in result.figures.items()]
    if remaining is not None:
        fields.append(f"time left: {timedelta(seconds=round(remaining))}")
    return " | ".join(fields) + " |"


def further_losses(steps: Sequence[Sequence[Any]]) -> dict[str, float]:
    """Return the mean over steps of each loss of a further token, by Megatron-LM's name."""
    return {
        f"mtp_{number} loss": sum(map(float, values)) / len(values)
        for number, values in enumerate(zip(*steps, strict=True), start=1)
    }


def loads_by_layer(loads: Any) -> dict[int, list[int]]:
    """Return the tokens of each expert of the layers with experts, by the layer's number, from 1 on."""
    layers = () if loads is None else enumerate(loads.tolist(), start=1)
    return {number: [int(tokens) for tokens in layer] for number, layer in layers if any(layer)}


def max_over_mean(layer: Sequence[int]) -> float:
    """Return how many times as many tokens the busiest expert of a layer has as the mean."""
    return max(layer) * len(layer) / sum(layer)


def loads_line(number: int, layer: Sequence[int]) -> str:
    return f" > layer {number:3d} | {MAX_OVER_MEAN}: {max_over_mean(layer):.2f} | tokens: {' '.join(map(str, layer))} |"


SHARES = ("spread", "bubble", "hidden")
"""Words at the end of the names of figures that are shares, shown in percent."""


def figure_text(name: str, value: float) -> str:
    if name.endswith(SHARES):
        return f"{100 * value:.1f} %"
    return str(int(value)) if value == int(value) else f"{value:.2f}"


def validation_line(where: str, loss: float) -> str:
    """Return ` validation loss at WHERE | lm loss value: … | lm loss PPL: … | `, between rules of its length."""
    line = f" validation loss at {where} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity(loss):.6E} | "
    rule = "-" * (len(line) + 1)
    return f"{rule}\n{line}\n{rule}"


def perplexity(loss: float) -> float:
    """Return exp(loss), capped as in Megatron-LM so that a diverged run does not overflow."""
    return math.exp(min(20.0, loss))


def parameters_line(tensor_rank: int, pipeline_rank: int, parameters: int) -> str:
    """Return the line on the parameters this rank holds."""
    rank = f"({tensor_rank}, {pipeline_rank})"
    return f" > number of parameters on (tensor, pipeline) model parallel rank {rank}: {parameters}"


@dataclass(frozen=True)
class MemoryUse:
    """Bytes: now and at the peak, in use and held by the allocator."""

    allocated: int
    max_allocated: int
    reserved: int
    max_reserved: int


def measure_memory() -> MemoryUse:
    """Return the memory use of the current CUDA device; without one, the process's resident memory for both pairs."""
    import torch

    if torch.cuda.is_available():
        cuda = torch.cuda
        return MemoryUse(
            cuda.memory_allocated(), cuda.max_memory_allocated(), cuda.memory_reserved(), cuda.max_memory_reserved()
        )
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            now = int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        now = peak
    return MemoryUse(now, max(now, peak), now, max(now, peak))


def memory_line(rank: int, iteration: int, use: MemoryUse) -> str:
    """Return `[Rank N] (after K iterations) memory (MB) | …`."""
    return (
        f"[Rank {rank}] (after {iteration} iterations) memory (MB)"
        f" | allocated: {use.allocated / MEGABYTE:.2f} | max allocated: {use.max_allocated / MEGABYTE:.2f}"
        f" | reserved: {use.reserved / MEGABYTE:.2f} | max reserved: {use.max_reserved / MEGABYTE:.2f}"
    )


def build_timers(config: Config) -> Timers:
    """Return megatron-core's timers at --timing-log-level."""
    from megatron.core.timers import Timers as CoreTimers

    return CoreTimers(config.logging.timing_log_level, config.logging.timing_log_option)


class TrainingLog:
    """Counts what happens in each interval and writes its line, its metrics, timings and, once, the memory in use.

    Every rank has one and calls it alike; the last rank writes.
    """

    def __init__(
        self,
        config: Config,
        *,
        total_iterations: int,
        writer: MetricsWriter | None = None,
        timers: Timers | None = None,
        report_memory: bool = True,
        clock: Callable[[], float] = time.perf_counter,
        emit: Callable[[str], None] = say,
    ) -> None:
        """Create the log. report_memory: whether this rank prints its memory line; one of each model-parallel position
        is enough.
        """
        self._config = config
        self._total = total_iterations
        self._writer = writer or MetricsWriter()
        self._timers = timers
        self._report_memory = report_memory
        self._clock = clock
        self._emit = emit
        self._last_rank = config.launch.rank == config.launch.world_size - 1
        self._interval = _Interval()
        self._first = True  # of this run; unlike the others, so it has a line of its own
        self._start = clock()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Evaluating or saving: its time belongs to no iteration."""
        begun = self._clock()
        try:
            yield
        finally:
            self._start += self._clock() - begun

    def step(self, iteration: int, consumed_samples: int, result: StepResult) -> None:
        """Account for one iteration and, when it is due, write. Collective when timings are logged."""
        interval, logging = self._interval, self._config.logging
        interval.iterations += 1
        interval.tokens += result.tokens
        interval.flops += result.flops
        interval.skipped += result.skipped
        if not result.skipped:
            interval.losses.append(result.loss)
            interval.further.append(result.further)
        loads = loads_by_layer(result.loads)
        if loads:  # of the layer that is used most unevenly
            figures = {**result.figures, MAX_OVER_MEAN: max(map(max_over_mean, loads.values()))}
            result = replace(result, figures=figures)
        if self._writer.active and iteration % logging.tensorboard_log_interval == 0:
            self._write_metrics(iteration, consumed_samples, result)
            if logging.moe_per_layer_logging:
                tags = {f"moe/{MAX_OVER_MEAN} layer {number}": max_over_mean(each) for number, each in loads.items()}
                self._writer.scalars(tags, iteration)
        if self._first or iteration % logging.log_interval == 0 or iteration == self._total:
            self._first = False
            self._write_line(iteration, consumed_samples, result)
            if self._last_rank and logging.moe_per_layer_logging:
                for number, each in loads.items():
                    self._emit(loads_line(number, each))
            self._interval = _Interval()
            self._start = self._clock()

    def evaluation(self, where: str, loss: float, iteration: int, consumed_samples: int) -> None:
        """Write the line and metrics of one evaluation; `where` is such as `iteration 100` or `iteration 100 on test
        set`.
        """
        if self._last_rank:
            self._emit(validation_line(where, loss))
        self._writer.scalars({"lm loss validation": loss}, iteration, consumed_samples)
        if self._config.logging.log_validation_ppl_to_tensorboard:
            self._writer.scalars({"lm loss validation ppl": perplexity(loss)}, iteration, consumed_samples)

    def _write_line(self, iteration: int, consumed_samples: int, result: StepResult) -> None:
        config, interval = self._config, self._interval
        losses = [float(loss) for loss in interval.losses]  # waits for the device, so the time is read after it
        finite = [loss for loss in losses if math.isfinite(loss)]
        seconds = self._clock() - self._start
        world = config.launch.world_size
        gpu_seconds = seconds * world
        tflops = interval.flops / gpu_seconds / TERA if seconds > 0 else 0.0
        tokens = interval.tokens / gpu_seconds if seconds > 0 else 0.0
        per_iteration = seconds / interval.iterations
        if self._last_rank:
            self._emit(
                iteration_line(
                    iteration=iteration,
                    total_iterations=self._total,
                    consumed_samples=consumed_samples,
                    seconds=per_iteration,
                    result=result,
                    loss=sum(finite) / len(finite) if finite else (losses[-1] if losses else None),
                    skipped=interval.skipped,
                    nan=len(losses) - len(finite),
                    further=further_losses(interval.further),
                    tflops=tflops if config.logging.log_throughput else None,
                    tokens_per_second=tokens,
                    remaining=per_iteration * (self._total - iteration),
                )
            )
        if self._report_memory:
            self._report_memory = False
            self._emit(memory_line(config.launch.rank, iteration, measure_memory()))
        values = {"iteration-time": per_iteration, "tokens-per-second-per-gpu": tokens}
        if config.logging.log_throughput:
            values["throughput"] = tflops
        self._writer.scalars(values, iteration)
        self._write_timers(iteration, interval.iterations)

    def _write_metrics(self, iteration: int, consumed_samples: int, result: StepResult) -> None:
        logging = self._config.logging
        values: dict[str, float] = {"learning-rate": result.learning_rate, "batch-size": result.samples}
        if not result.skipped:
            values["lm loss"] = float(result.loss)
            values |= further_losses([result.further])
        if logging.log_loss_scale_to_tensorboard:
            values["loss-scale"] = result.loss_scale
        if logging.log_world_size_to_tensorboard:
            values["world-size"] = self._config.launch.world_size
        for tag, value in (
            ("grad-norm", result.grad_norm),
            ("num-zeros", result.num_zeros),
            ("params-norm", result.params_norm),
        ):
            if value is not None:
                values[tag] = float(value)
        values |= {name.replace(" ", "-"): value for name, value in result.figures.items()}
        self._writer.scalars(values, iteration, consumed_samples)
        if logging.log_memory_to_tensorboard:
            use = measure_memory()
            self._writer.scalars(
                {
                    "mem-allocated-bytes": use.allocated,
                    "mem-max-allocated-bytes": use.max_allocated,
                    "mem-reserved-bytes": use.reserved,
                },
                iteration,
            )

    def _write_timers(self, iteration: int, iterations: int) -> None:
        """Write timings an iteration, over all ranks: a collective, so it depends on flags alone."""
        if self._timers is None or self._config.logging.timing_log_level == 0:
            return
        if self._config.logging.log_timers_to_tensorboard:
            names = list(self._timers._timers)  # there is no public list of them
            self._timers.write(names, self._writer.tensorboard, iteration, normalizer=iterations, reset=False)
        text = self._timers.get_all_timers_string(normalizer=iterations, reset=True)
        if self._last_rank and text:
            self._emit(text)
