"""What head and loss over slices take, beside whole logits: forward and backward of the head alone, on this CPU.

    python -m benchmarks.loss_slices [--tokens 4096] [--hidden 512] [--vocabulary 16384] [--slices 512 2048] [--pairs 9]

One thread; processor time, so that what else the machine does matters little. Each round runs one step without slices
and one with each size; what is printed is the median of the rounds' ratios, and the most bytes alive in a step beside
weights, their float32 sums of gradients, and the step's input.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from helixpipe.model.device import prepare

prepare()  # before megatron-core is imported, whose notices it silences

from benchmarks.accounting import AliveBytes
from helixpipe.costs.models import Chunk, Layout, ModelShape
from helixpipe.costs.piece_bytes import PieceBytes
from helixpipe.model import Microbatch, UnitContext
from helixpipe.profile.subject import Task, build_model, initialize_parallel_state
from helixpipe.program.stages import Piece

HEAD = (Piece("head"),)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 4096), ("hidden", 512), ("vocabulary", 16384), ("pairs", 9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--slices", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group("gloo", init_method=f"file://{file.name}", rank=0, world_size=1)
        initialize_parallel_state(1)
        compare(options)
        dist.destroy_process_group()


def compare(options: argparse.Namespace) -> None:
    sizes = [0, *options.slices]
    steps = {size: step_of(options, size) for size in sizes}
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    peaks = {}
    for size, step in steps.items():  # also the warm-up
        with AliveBytes() as alive:
            step()
        peaks[size] = alive.peak
    for number in range(options.pairs):
        for size in sizes if number % 2 else reversed(sizes):
            start = time.thread_time()
            steps[size]()
            seconds[size].append(time.thread_time() - start)
    print(f"{options.tokens} tokens, hidden {options.hidden}, vocabulary {options.vocabulary}, {options.dtype}")
    print(f"{'slices of':>10}  {'seconds':>8}  {'of whole':>8}  {'peak MiB':>8}  {'predicted':>9}")
    for size in sizes:
        ratio = statistics.median(mine / whole for mine, whole in zip(seconds[size], seconds[0], strict=True))
        predicted = f"{prediction(options, size) / 2**20:.1f}" if size else ""
        median, peak = statistics.median(seconds[size]), peaks[size] / 2**20
        print(f"{size or 'whole':>10}  {median:8.3f}  {ratio:8.3f}  {peak:8.1f}  {predicted:>9}")


def shape_of(options: argparse.Namespace) -> ModelShape:
    kind = ("LayerNorm", "rope", False)
    hidden, vocabulary = options.hidden, options.vocabulary
    return ModelShape("head", 1, hidden, 4, 4, 4 * hidden, False, vocabulary, False, *kind, options.tokens)


def step_of(options: argparse.Namespace, size: int) -> Callable[[], None]:
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


def prediction(options: argparse.Namespace, size: int) -> float:
    """Bytes by the cost model: what is kept, but for the input, and the workspace."""
    element = {"float32": 4, "bfloat16": 2}[options.dtype]
    layout: Any = dataclasses.replace(Layout(), element_bytes=element, fused_kernels=False, loss_chunk=size)
    own, chunk = PieceBytes(shape_of(options), layout), Chunk(options.tokens)
    return own.stash(HEAD, chunk) - own.message(HEAD[0], chunk) + own.workspace(HEAD, chunk)


if __name__ == "__main__":
    main()
