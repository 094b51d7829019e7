"""Runs in each process of host_time.py: steps of one rank whose model computes next to nothing.

python host_steps.py CASE     (with the checkout that is measured in PYTHONPATH, whose `benchmarks` this does not need)
"""

from __future__ import annotations

import dataclasses
import gc
import json
import statistics
import sys
import time
from types import MappingProxyType
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from helixpipe.costs.piece_kinds import inputs_after
from helixpipe.lowering.lower import lower
from helixpipe.model import Microbatch
from helixpipe.model.device import device
from helixpipe.model.linear import WeightGradients
from helixpipe.planning.memory.recompute import RecomputeOptions
from helixpipe.program.stages import PIECE_KINDS
from helixpipe.runtime.executor import Executor, Step
from helixpipe.watch.position import Position
from schedules import Shape, build

CASES = MappingProxyType(
    {
        "1f1b": ("1f1b", 1, False),
        "1f1b, recomputed": ("1f1b", 1, True),
        "zb1p": ("zb1p", 1, False),
        "seq1f1b": ("seq1f1b", 4, False),
    }
)
"""By name (schedule, chunks, whether whole layers are recomputed)."""

RANKS, RANK, MICROBATCHES, LAYERS, TOKENS = 4, 1, 32, 8, 16
"""Rank 1 of four receives and sends both activations and gradients."""

Times = dict[str, float]


def serve(case: str) -> None:
    """Answer each line of the input with times."""
    torch.set_num_threads(1)
    schedule, chunks, recompute = CASES[case]
    program = build(schedule, Shape(RANKS, MICROBATCHES // chunks, LAYERS, chunks))
    stages = RecomputeOptions("full").stages(program.stages) if recompute else program.stages
    lowered = lower(dataclasses.replace(program, stages=stages))
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
    batch, root = Microbatch(tokens, tokens, torch.ones(1, TOKENS)), torch.ones((), device=device())
    step = Step(0, lambda index: index, lambda index: batch, lambda index: root, 1, TOKENS)
    marks = Marks()
    executor = Executor(RANK, NullModel(), NullTransport(device()), position=marks)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        if line.strip() == "floor":
            print(json.dumps(floor()), flush=True)
            continue
        begin = time.process_time_ns()
        executor.run(lowered, step)
        per_op = (time.process_time_ns() - begin) / len(program.ranks[RANK])
        samples: dict[str, list[float]] = {"per op": [per_op]}
        for each, before, after in zip(lowered.streams[RANK], marks.times, marks.times[1:], strict=False):
            kind = each.op.kind if each.op is not None and each.action.value == "RUN" else each.action.value
            samples.setdefault(kind, []).append(after - before)
        print(json.dumps({kind: statistics.median(each) / 1e3 for kind, each in samples.items()}), flush=True)


class Marks(Position):
    """A position that keeps the time at which each instruction began."""

    def begin(self, lowered: Any, pp_rank: int) -> None:
        super().begin(lowered, pp_rank)
        self.times = [0] * (len(lowered.streams[pp_rank]) + 2)

    def at(self, index: int) -> None:
        super().at(index)
        self.times[index] = time.perf_counter_ns()


class NullReceipt:
    def __init__(self, tensors: tuple[Any, ...]):
        self.tensors = tensors

    def wait(self) -> tuple[Any, ...]:
        return self.tensors


class NullTransport:
    """Sends nothing, and receives what lies in new memory."""

    def __init__(self, device: Any):
        self.device = device

    def mark(self) -> None: ...

    def send(self, tensors: Any, target: int, number: int, since: Any = None) -> None: ...

    def receive(self, shapes: Any, dtype: Any, source: int, number: int) -> NullReceipt:

        return NullReceipt(tuple([torch.empty(shape, dtype=dtype, device=self.device) for shape in shapes]))

    def pass_on(self, receipt: Any, target: int, number: int) -> None: ...

    def finish(self) -> None: ...

    def close(self) -> None: ...


class NullModel:
    """One product a unit, and of a chunk its keys and values where there is attention."""

    payload_dtype = torch.float32

    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.ones(1, device=device()))
        self.store = WeightGradients()
        self.tensors_after = {kind: len(inputs_after(kind)) for kind in PIECE_KINDS[:-1]}

    def run(self, pieces: Any, inputs: Any, batch: Any, context: Any) -> Any:
        last = pieces[-1].kind
        hidden = self.weight * (inputs[0] if inputs else torch.ones(context.length, 1, 1, 1, device=device()))
        if context.keys_values is not None:
            for piece in pieces:
                if piece.kind == "attn":
                    context.keys_values.join(piece.layer, hidden, hidden)
        return (hidden.sum(),) if last == "head" else (hidden,) * self.tensors_after[last]

    def weight_gradients(self) -> Any:
        return self.store

    def attention_layers(self, pieces: Any, training: bool) -> list[int]:
        return [piece.layer for piece in pieces if piece.role == "attn"]

    def payload_shapes(self, after: Any, micro_batch_size: int, length: int) -> Any:
        return (torch.Size((length, 1, 1, 1)),) * self.tensors_after[after.kind]


def floor(count: int = 2000) -> Times:
    """Return what one tensor's F, B and receive take without an executor."""

    backward: Any = torch.autograd.Variable._execution_engine.run_backward
    where = device()
    weight, given = torch.nn.Parameter(torch.ones(1, device=where)), torch.ones(TOKENS, 1, 1, 1, device=where)
    samples: dict[str, list[int]] = {"F": [], "B": [], "RECV": []}
    clock = time.perf_counter_ns
    for _ in range(count):
        start = clock()
        leaf = given.detach().requires_grad_()
        output = weight * leaf
        edge = get_gradient_edge(output)
        sent = output.detach()
        samples["F"].append(clock() - start)
        del output
        start = clock()
        backward((edge,), (sent,), False, False, (), allow_unreachable=True, accumulate_grad=True)
        leaf.grad = None
        samples["B"].append(clock() - start)
        start = clock()
        torch.empty((TOKENS, 1, 1, 1), dtype=torch.float32, device=where)
        samples["RECV"].append(clock() - start)
    return {kind: statistics.median(each) / 1e3 for kind, each in samples.items()}


if __name__ == "__main__":
    serve(sys.argv[1])
