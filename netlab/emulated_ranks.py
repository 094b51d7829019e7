"""Runs on emulate.py's ranks: processes of one machine, each on a host of its own or several on one."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from helixpipe.common.errors import UserError
from helixpipe.lowering.project import LoweredProgram
from helixpipe.profile.message_times import fit_line
from helixpipe.runtime.executor import Step
from helixpipe.runtime.recording import Record
from helixpipe.runtime.transport import Receipt, Transport, make_transport
from netlab.emulated_costs import EmulatedCosts, Link, Size
from netlab.waiting_model import WaitingExecutor, WaitingModel, wait_until

NETWORK_NAMESPACE = 0x40000000
"""CLONE_NEWNET of Linux's sched.h."""

MESSAGE_BYTES = (1 << 14, 1 << 16, 1 << 17, 1 << 18, 1 << 19)
MESSAGES = 8
WARM_UP = 0.05
"""Of op times, in the step that does not count."""
LEAD = 0.02
"""Seconds from when rank 0 says that a step starts to when it does, on all ranks at once."""


def run_ranks(function: Callable[..., Any], namespaces: Sequence[str | None], timeout: float, *args: Any) -> list[Any]:
    """Call `function(rank, *args)` on a rank for each namespace (None: the machine's own), forked from this process,
    with a process group over all; what each returned, by rank. Raises UserError when a rank fails or takes longer than
    `timeout` seconds; then the others are ended."""
    context = multiprocessing.get_context("fork")
    processes: list[Any] = []
    results: list[Any] = [None] * len(namespaces)
    readers: dict[Any, int] = {}
    gc.collect()
    gc.freeze()  # what is here now the ranks need not search again
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank, namespace in enumerate(namespaces):
                reader, writer = context.Pipe(duplex=False)
                place = (rank, len(namespaces), namespace, str(Path(folder, "store")), timeout)
                process = context.Process(target=_rank, args=(writer, place, function, args))
                process.start()
                writer.close()
                processes.append(process)
                readers[reader] = rank
            deadline = time.monotonic() + timeout
            while readers:
                ready: list[Any] = wait(list(readers), timeout=max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise UserError(f"ranks {sorted(readers.values())} were not done after {timeout:.0f} s.")
                for connection in ready:
                    rank = readers.pop(connection)
                    try:
                        error, results[rank] = connection.recv()
                    except EOFError:
                        error = "it ended without a word"
                    if error is not None:
                        raise UserError(f"rank {rank} failed: {error}")
        finally:
            for process in processes:
                if readers:
                    process.kill()
                process.join()
            gc.unfreeze()
    return results


def _rank(writer: Connection, place: tuple[int, int, str | None, str, float], function: Any, args: Any) -> None:
    rank, ranks, namespace, store, timeout = place
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        if namespace is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
            enter(namespace)
        torch.set_num_threads(1)
        files = dist.FileStore(store, ranks)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=files, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout))
        dist.barrier()
        result = function(rank, *args)
        dist.barrier()
        dist.destroy_process_group()
        writer.send((None, result))
    except BaseException:
        writer.send((traceback.format_exc(), None))
    writer.close()


def enter(namespace: str) -> None:
    """Be on this host from now on: this thread, and those that it starts."""
    with open(f"/var/run/netns/{namespace}", "rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), NETWORK_NAMESPACE):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")


# ------------------------------------------------------------------------------------------------------- functions


def link_points(rank: int) -> list[tuple[float, float]]:
    """(bytes, seconds) of messages from rank 0 to rank 1 and back, with the executor's transport, halved."""
    assert dist.group.WORLD is not None
    transport = make_transport(dist.group.WORLD, torch.device("cpu"))
    points, number = [], 0
    for size in MESSAGE_BYTES:
        payload, seconds = torch.ones(size // 4), []
        for _ in range(MESSAGES):
            dist.barrier()
            receipt = transport.receive([payload.shape], payload.dtype, 1 - rank, number)
            start = time.perf_counter()
            if rank == 0:
                transport.send([payload], 1, number)
            receipt.wait()
            if rank == 1:
                transport.send([payload], 0, number)
            seconds.append((time.perf_counter() - start) / 2)
            transport.finish()
            number += 1
        points.append((float(size), min(seconds)))  # others on the machine only add
    transport.close()
    return points


def measured_link(namespaces: Sequence[str | None]) -> Link:
    """Between ranks on these two hosts."""
    points = run_ranks(link_points, namespaces, 60.0)[0]
    latency, seconds_per_byte = fit_line(points)
    return Link(latency, seconds_per_byte)


class TwoWays:
    """A transport with a connection for each direction between two ranks, as NCCL's has communicators. On one, gloo
    says that a receive may come behind what its rank is sending itself, and the two directions take turns."""

    def __init__(self, rank: int):
        every = list(range(dist.get_world_size()))
        self._rank = rank
        up, down = (make_transport(dist.new_group(every), torch.device("cpu")) for _ in range(2))
        self._up, self._down = up, down

    def _to(self, target: int) -> Transport:
        return self._up if target > self._rank else self._down

    def mark(self) -> None: ...

    def send(self, tensors: Sequence[torch.Tensor], target: int, number: int, since: Any = None) -> None:
        self._to(target).send(tensors, target, number)

    def receive(self, shapes: Sequence[torch.Size], dtype: torch.dtype, source: int, number: int) -> Receipt:
        way = self._up if source < self._rank else self._down
        return way.receive(shapes, dtype, source, number)

    def pass_on(self, receipt: Receipt, target: int, number: int) -> None:
        self._to(target).pass_on(receipt, target, number)

    def finish(self) -> None:
        self._up.finish()
        self._down.finish()

    def close(self) -> None:
        self._up.close()
        self._down.close()


class Emulated(NamedTuple):
    """Of one program: seconds of each step, the same on all ranks; this rank's times in the last; the sum of each
    weight's gradients over all steps."""

    seconds: list[float]
    record: Record
    gradients: dict[str, float]


def emulated_steps(
    rank: int, programs: Mapping[str, LoweredProgram], size: Size, costs: EmulatedCosts, steps: int
) -> dict[str, Emulated]:
    """`steps` steps of each program after one that does not count, the programs in turn."""
    transport = TwoWays(rank)
    step = Step(
        iteration=0,
        microbatch_number=lambda index: index,
        batch=lambda index: None,  # type: ignore[arg-type,return-value]
        root_gradient=lambda index: torch.ones(()),
        micro_batch_size=size.micro_batch_size,
        seq_length=size.tokens,
    )
    models = {name: WaitingModel(size.model, size.micro_batch_size) for name in programs}
    engines = {name: WaitingExecutor(costs, rank, model, transport) for name, model in models.items()}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    records = {}
    for number in range(1 + steps):
        for name, lowered in programs.items():
            engines[name].time_scale = 1.0 if number else WARM_UP
            taken, records[name] = timed_step(engines[name], lowered, step)
            if number:
                seconds[name].append(taken)
    transport.close()
    found = {}
    for name, model in models.items():
        sums = {
            str(piece): float(weight.grad.sum() / weight.numel())
            for piece, weight in model.weights.items()
            if weight.grad is not None and weight.numel()
        }
        found[name] = Emulated(seconds[name], records[name], sums)
    return found


def timed_step(engine: WaitingExecutor, lowered: LoweredProgram, step: Step) -> tuple[float, Record]:
    """Seconds from a common start to the end of the last rank, and this rank's times."""
    dist.barrier()
    begin = torch.tensor([time.perf_counter() + LEAD], dtype=torch.float64)
    dist.broadcast(begin, 0)
    wait_until(begin.item())
    _, record = engine.run(lowered, step, record=True)
    end = torch.tensor([time.perf_counter()], dtype=torch.float64)
    dist.all_reduce(end, dist.ReduceOp.MAX)
    return (end - begin).item(), record
