"""Run a function on several ranks, each a process with a process group, for tests."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar, cast

import torch
import torch.multiprocessing as multiprocessing

Value = TypeVar("Value")
Name = TypeVar("Name", bound=Hashable)


def store_of_a_launch() -> Any:
    """What the ranks of a launch meet at, on a port that is free."""
    make = torch.distributed.TCPStore  # type: ignore[attr-defined]  # torch does not say that it exports it
    return make("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 280.0, backend: str = "gloo"
) -> list[Any]:
    """Call `function(rank, world_size, *args)` on every rank and return what each returned, by rank.

    The function must be importable by name (not a lambda or a nested function); it runs with torch.distributed
    initialised and one thread. Ranks are forked from a process that has imported torch and megatron-core and done
    nothing else, since importing them would take every rank six seconds. They know nothing of what this process did.
    With CUDA, which a forked process cannot have, they are started afresh, and share the GPUs evenly. When a rank
    fails, its traceback is raised here as RuntimeError at once and the others are killed; so are all after `timeout`
    seconds (TimeoutError), their stacks printed shortly before.
    """
    context = preloaded()
    store = store_of_a_launch()
    readers: dict[Any, int] = {}
    connections = []
    processes = []
    for rank in range(world_size):
        reader, writer = context.Pipe()
        process = context.Process(
            target=_run_rank, args=(writer, function, rank, world_size, store.port, timeout, backend, args)
        )
        process.start()
        writer.close()
        readers[reader] = rank
        connections.append(reader)
        processes.append(process)
    results: list[Any] = [None] * world_size
    deadline = time.monotonic() + timeout
    try:
        while readers:
            ready = wait(list(readers), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"ranks {sorted(readers.values())} of {world_size} not done after {timeout:.0f} s")
            for connection in cast(list[Any], ready):
                rank = readers.pop(connection)
                try:
                    error, results[rank] = connection.recv()
                except EOFError:
                    processes[rank].join(5)
                    raise RuntimeError(f"rank {rank} died with exit code {processes[rank].exitcode}") from None
                if error is not None:
                    raise RuntimeError(f"rank {rank} failed:\n{error}")
        for connection in connections:
            with contextlib.suppress(BrokenPipeError):
                connection.send(None)  # all are done: each may leave
    finally:
        for process in processes:
            if not readers:
                process.join(10)
            kill_group(process.pid)
            process.kill()  # in case it had no group yet
            process.join()
    return results


def gather_tensors(own: Mapping[Name, torch.Tensor], group: Any = None) -> list[dict[Name, torch.Tensor]]:
    """Return what each rank of the group has, by rank, on every one of them.

    All of one type travel as one tensor: to pickle and load one takes about a millisecond, however small it is.
    """
    by_type: dict[torch.dtype, list[Name]] = {}
    for name, tensor in own.items():
        by_type.setdefault(tensor.dtype, []).append(name)
    packed = [
        ([(name, own[name].shape) for name in names], torch.cat([own[name].detach().flatten() for name in names]))
        for names in by_type.values()
    ]
    parts: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(parts, (list(own), packed), group=group)
    return [_unpacked(*part) for part in parts]


def _unpacked(order: list[Name], packed: list[tuple[list[tuple[Name, torch.Size]], torch.Tensor]]) -> dict[Name, Any]:
    found = {}
    for outline, flat in packed:
        sizes = [shape.numel() for _, shape in outline]
        for (name, shape), values in zip(outline, flat.split(sizes), strict=True):
            found[name] = values.view(shape)
    return {name: found[name] for name in order}


def preloaded() -> Any:
    """Return what starts processes that have imported torch and megatron-core (without CUDA), and done nothing else."""
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    return context


def kill_group(pid: int | None) -> None:
    """Kill a rank and the processes it started (megatron-core's checkpoint writer leaves one that outlives it)."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid or 0, signal.SIGKILL)


def die_with_parent() -> None:
    """End this process and its group when the process that asked for it is gone; for a thread of its own."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.killpg(0, signal.SIGKILL)


def _run_rank(
    writer: Connection,
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    timeout: float,
    backend: str,
    args: tuple[Any, ...],
) -> None:
    os.setsid()  # a group of its own, so that all of it can be killed
    threading.Thread(target=die_with_parent, daemon=True).start()
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # rank 0 connects to it as well
        TORCHELASTIC_RESTART_COUNT="0",
        OMP_NUM_THREADS="1",
    )
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    faulthandler.dump_traceback_later(0.9 * timeout, exit=False)  # shows where a rank hangs
    try:
        torch.distributed.init_process_group(backend, timeout=timedelta(seconds=timeout))
        if backend == "gloo":  # a rank whose function returns at once must not leave while others still connect to it
            torch.distributed.barrier()
        writer.send((None, function(rank, world_size, *args)))
        if torch.distributed.is_initialized():  # a function may have ended it, as a failing program does
            writer.recv()  # a rank that left while others still connect to it would break their connections
            torch.distributed.destroy_process_group()
    except BaseException:
        writer.send((traceback.format_exc(), None))
    writer.close()
