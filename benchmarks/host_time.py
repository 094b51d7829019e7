"""`make bench-host`: what the executor itself takes of the host for each instruction, in microseconds.

    python benchmarks/host_time.py [--steps 150] [--beside DIR] [--json out.json]

One rank's stream runs on a model that computes next to nothing and a transport that sends nothing, so that what is left
is the executor, autograd and the few calls of torch that nobody could do without. These alone, in a plain loop, are the
column `floor`. --beside: another checkout of this repository, in a process of its own, whose steps take turns with
these one by one, so that what else the machine does hits both alike. A figure is the median over a step's instructions
of a kind, and of these the least of the steps; the ratio is the median over pairs of steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CASES = {  # name: (schedule, chunks, whether whole layers are recomputed)
    "1f1b": ("1f1b", 1, False),
    "1f1b, recomputed": ("1f1b", 1, True),
    "zb1p": ("zb1p", 1, False),
    "seq1f1b": ("seq1f1b", 4, False),
}
RANKS, RANK, MICROBATCHES, LAYERS, TOKENS = 4, 1, 32, 8, 16
"""Rank 1 of four receives and sends both activations and gradients."""
WARM_UP = 5
KINDS = ("F", "B", "I", "W", "R", "RECV", "WAIT", "SEND", "REDUCE", "FREE", "per op")
"""Of instructions, in microseconds; last, processor time of a step over its ops."""

Times = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="of each case (default: 150)")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, metavar="CASE")
    parser.add_argument("--beside", type=Path, metavar="DIR", help="another checkout to compare with")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    arguments = parser.parse_args()
    roots = [ROOT, *([arguments.beside.resolve()] if arguments.beside else [])]
    rows: dict[str, Any] = {}
    for case in arguments.cases:
        rows[case] = run_case(case, roots, arguments.steps)
        report(case, *rows[case])
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def run_case(case: str, roots: Sequence[Path], steps: int) -> tuple[list[list[Times]], Times]:
    """(of each checkout the times of each step, the floor)."""
    workers = [start(case, root) for root in roots]
    floor = ask(workers[0], "floor")
    found: list[list[Times]] = [[] for _ in roots]
    for number in range(WARM_UP + steps):
        for which in range(len(roots)) if number % 2 == 0 else reversed(range(len(roots))):
            times = ask(workers[which], "step")
            if number >= WARM_UP:
                found[which].append(times)
    for worker in workers:
        worker.communicate()
    return found, floor


def start(case: str, root: Path) -> subprocess.Popen[str]:
    """A process on the code of a checkout, which runs a step whenever it is told."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    command = [sys.executable, __file__, "--serve", case]
    return subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def ask(worker: subprocess.Popen[str], what: str) -> Times:
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write(what + "\n")
    worker.stdin.flush()
    answer: Times = json.loads(worker.stdout.readline())
    return answer


def report(case: str, found: Sequence[Sequence[Times]], floor: Times) -> None:
    """A line a kind of instruction."""
    beside = f"{'beside':>9}{'ratio':>9}" if len(found) > 1 else ""
    print(f"\n{case:<18}{'here':>9}{beside}{'floor':>9}")
    for kind in [each for each in KINDS if each in found[0][0]]:
        least = [min(times[kind] for times in steps) for steps in found]
        print(f"  {kind:<16}" + "".join(f"{time:>9.2f}" for time in least), end="")
        if len(found) > 1:
            ratios = [here[kind] / beside[kind] for here, beside in zip(*found, strict=True)]
            print(f"{statistics.median(ratios):>9.2f}", end="")
        print(f"{floor[kind]:>9.2f}" if kind in floor else "", flush=True)


# ----------------------------------------------------------------------------------------- what each process runs


def serve(case: str) -> None:
    """Answer each line of the input with times."""
    import gc

    import torch

    from helixpipe.lowering.lower import lower
    from helixpipe.model import Microbatch
    from helixpipe.model.device import device
    from helixpipe.planning.memory.recompute import RecomputeOptions
    from helixpipe.runtime.executor import Executor, Step
    from schedules import Shape, build

    torch.set_num_threads(1)
    schedule, chunks, recompute = CASES[case]
    program = build(schedule, Shape(RANKS, MICROBATCHES // chunks, LAYERS, chunks))
    stages = RecomputeOptions("full").stages(program.stages) if recompute else program.stages
    lowered = lower(dataclasses.replace(program, stages=stages))
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
    batch, root = Microbatch(tokens, tokens, torch.ones(1, TOKENS)), torch.ones((), device=device())
    step = Step(0, lambda index: index, lambda index: batch, lambda index: root, 1, TOKENS)
    marks = marking_position()
    executor = Executor(RANK, null_model(), NullTransport(device()), position=marks)
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


def marking_position() -> Any:
    """A position that keeps the time at which each instruction began."""
    from helixpipe.watch.position import Position

    class Marks(Position):
        def begin(self, lowered: Any, pp_rank: int) -> None:
            super().begin(lowered, pp_rank)
            self.times = [0] * (len(lowered.streams[pp_rank]) + 2)

        def at(self, index: int) -> None:
            super().at(index)
            self.times[index] = time.perf_counter_ns()

    return Marks()


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
        import torch

        return NullReceipt(tuple([torch.empty(shape, dtype=dtype, device=self.device) for shape in shapes]))

    def pass_on(self, receipt: Any, target: int, number: int) -> None: ...

    def finish(self) -> None: ...

    def close(self) -> None: ...


def null_model() -> Any:
    """One product a unit, and of a chunk its keys and values where there is attention."""
    import torch

    from helixpipe.costs.piece_kinds import inputs_after
    from helixpipe.model.device import device
    from helixpipe.model.linear import WeightGradients
    from helixpipe.program.stages import PIECE_KINDS

    class NullModel:
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

        def payload_shapes(self, after: Any, micro_batch_size: int, length: int) -> Any:
            return (torch.Size((length, 1, 1, 1)),) * self.tensors_after[after.kind]

    return NullModel()


def floor(count: int = 2000) -> Times:
    """What one tensor's F, B and receive take without an executor."""
    import torch
    from torch.autograd.graph import get_gradient_edge

    from helixpipe.model.device import device

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
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2])
    else:
        main()
