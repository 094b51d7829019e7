"""Measures what head and loss over slices take, beside whole logits: forward and backward of the head alone, on this
CPU.

    make bench-loss-slices ARGS="[--tokens 4096] [--hidden 512] [--vocabulary 16384] [--slices 512 2048] [--pairs 9]"

One thread; processor time, so that what else the machine does matters little. Each round runs one step without slices
and one with each size; what is printed is the median of the rounds' ratios, and the most bytes alive in a step beside
weights, their float32 sums of gradients, and the step's input.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from helixpipe.model.device import prepare

prepare()  # before megatron-core is imported, whose notices it silences

from benchmarks.accounting import AliveBytes
from benchmarks.report import Figures, Outcome
from benchmarks.rounds import in_turn, median_ratio
from helixpipe.common.flags import option
from helixpipe.costs.models import Chunk, Layout, ModelShape
from helixpipe.costs.piece_bytes import PieceBytes
from helixpipe.draw.table import right_aligned
from helixpipe.model import Microbatch, UnitContext
from helixpipe.profile.subject import Task, build_model, initialize_parallel_state
from helixpipe.program.stages import Piece

HEAD = (Piece("head"),)


@dataclass(frozen=True)
class Options(Figures):
    tokens: int = option(4096, "Of the sequence.", at_least=1)
    hidden: int = option(512, "Hidden size.", at_least=4)
    vocabulary: int = option(16384, "Words.", at_least=1)
    slices: tuple[int, ...] = option((512, 2048), "Tokens of a slice, each.", at_least=1)
    pairs: int = option(9, "Rounds.", at_least=1)
    dtype: Literal["float32", "bfloat16"] = option("float32", "Of weights and activations.")


def run(options: Options) -> Outcome:
    torch.set_num_threads(1)
    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group("gloo", init_method=f"file://{file.name}", rank=0, world_size=1)
        initialize_parallel_state(1)
        outcome = compare(options)
        dist.destroy_process_group()
    return outcome


def compare(options: Options) -> Outcome:
    sizes = [0, *options.slices]
    steps = {size: step_of(options, size) for size in sizes}
    peaks = {size: peak_of(step) for size, step in steps.items()}  # also the warm-up
    seconds = in_turn(sizes, options.pairs, lambda size: thread_seconds(steps[size]))
    rows = []
    for size in sizes:
        predicted = f"{prediction(options, size) / 2**20:.1f}" if size else ""
        ratio, median = median_ratio(seconds[size], seconds[0]), statistics.median(seconds[size])
        rows.append((str(size or "whole"), f"{median:.3f}", f"{ratio:.3f}", f"{peaks[size] / 2**20:.1f}", predicted))
    title = f"{options.tokens} tokens, hidden {options.hidden}, vocabulary {options.vocabulary}, {options.dtype}"
    heads = ("slices of", "seconds", "of whole", "peak MiB", "predicted")
    figures = {"seconds": seconds, "peaks": peaks}
    return Outcome("\n".join([title, *right_aligned(heads, rows, [0] * len(heads))]), figures=figures)


def peak_of(step: Callable[[], None]) -> int:
    with AliveBytes() as alive:
        step()
    return alive.peak


def thread_seconds(step: Callable[[], None]) -> float:
    start = time.thread_time()
    step()
    return time.thread_time() - start


def shape_of(options: Options) -> ModelShape:
    kind = ("LayerNorm", "rope", False)
    hidden, vocabulary = options.hidden, options.vocabulary
    return ModelShape("head", 1, hidden, 4, 4, 4 * hidden, False, vocabulary, False, *kind, options.tokens)


def step_of(options: Options, size: int) -> Callable[[], None]:
    """A forward and a backward of a head, over slices of that many tokens."""
    task = Task(shape_of(options), options.tokens, 1, options.dtype, 1, 1, 1, loss_chunk_size=size)
    model, _ = build_model(task, 1, HEAD)
    labels = torch.randint(0, options.vocabulary, (1, options.tokens))
    batch = Microbatch(labels, labels, torch.ones(1, options.tokens))
    hidden = torch.randn(options.tokens, 1, options.hidden).to(model.payload_dtype).requires_grad_()
    root = torch.tensor(1.0 / options.tokens)

    def step() -> None:
        (loss,) = model.run(HEAD, (hidden,), batch, UnitContext(step=0, microbatch=0))
        loss.backward(root)
        hidden.grad = None

    return step


def prediction(options: Options, size: int) -> float:
    """Bytes by the cost model: what is kept, but for the input, and the workspace."""
    element = {"float32": 4, "bfloat16": 2}[options.dtype]
    layout: Any = dataclasses.replace(Layout(), element_bytes=element, fused_kernels=False, loss_chunk=size)
    own, chunk = PieceBytes(shape_of(options), layout), Chunk(options.tokens)
    return own.stash(HEAD, chunk) - own.message(HEAD[0], chunk) + own.workspace(HEAD, chunk)
