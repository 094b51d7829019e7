"""Tiny programs for test_checker.py, as in `device_programs`: memory of the host, its threads, and gloo."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from tests.runtime.happens_before.device_programs import read_beside


def pinned() -> torch.Tensor:
    return torch.zeros(4, pin_memory=True)


def in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def reads_a_copy_too_early(right: bool) -> None:
    """the read by _local_scalar_dense in the main thread is not after the write by copy_ in compute"""
    host = pinned()
    host.copy_(torch.ones(4), non_blocking=not right)
    host.tolist()


def writes_what_is_being_copied(right: bool) -> None:
    """the write by fill_ in the main thread is not after the read by the copy to the device in compute"""
    host = pinned()
    host.to(torch.device("cuda"), non_blocking=True)
    if right:
        torch.cuda.current_stream().synchronize()
    host.fill_(1)


def a_thread_sends_a_copy_too_early(right: bool, network: Any) -> None:
    """the read by gloo's send to 1 in thread sender is not after the write by copy_ in compute"""
    host = pinned()
    host.copy_(torch.ones(4), non_blocking=True)
    copied = torch.cuda.Event(blocking=True)
    copied.record()

    def send() -> None:
        if right:
            copied.synchronize()
        network.send([host], 1, 0).wait()

    thread = threading.Thread(target=send, name="sender")
    thread.start()
    thread.join()


def a_thread_spins(right: bool) -> None:
    """a thread beside the main one spins until an event has come"""
    torch.ones(4)
    done = torch.cuda.Event(blocking=right)
    done.record()
    in_thread(done.synchronize).join()


def frees_what_a_thread_waits_for(right: bool) -> None:
    """of memory given out again in compute is not after the read by mul of memory of compute that has gone"""
    made = torch.ones(4)
    side = read_beside(made)
    done = torch.cuda.Event(blocking=True)
    done.record(side)
    thread = in_thread(done.synchronize)
    if right:
        thread.join()
    del made
    torch.zeros(4)
    thread.join()


def what_another_thread_has_waited_for(right: bool, network: Any) -> None:
    """the read by the copy to the device in compute is not after the write by gloo's receive from 1 in thread"""
    host, told, ended = pinned(), queue.Queue[int](), []
    work = network.recv([host], 1, 0)

    def wait() -> None:
        work.wait()
        ended.append(True)
        told.put(0)

    thread = in_thread(wait)
    if right:
        told.get()
    while not ended:  # seen, but by nothing that orders
        time.sleep(0.001)
    host.to(torch.device("cuda"), non_blocking=True)
    thread.join()


def copies_what_gloo_has_not_brought(right: bool, network: Any) -> None:
    """the read by the copy to the device in compute while nobody has waited for the end of gloo's receive from 1"""
    host = pinned()
    work = network.recv([host], 1, 0)
    if right:
        work.wait()
    host.to(torch.device("cuda"), non_blocking=True)
    work.wait()


def frees_what_gloo_reads(right: bool, network: Any) -> None:
    """memory that has gone is still used: gloo's send to 1"""
    host = pinned()
    work = network.send([host], 1, 0)
    if right:
        work.wait()
    del host
    work.wait()


def gives_gloo_the_device(right: bool, network: Any) -> None:
    """gloo's send to 1 uses memory of the device"""
    made = pinned() if right else torch.zeros(4)
    network.send([made], 1, 0).wait()


PROGRAMS = [
    reads_a_copy_too_early,
    writes_what_is_being_copied,
    a_thread_sends_a_copy_too_early,
    a_thread_spins,
    frees_what_a_thread_waits_for,
    what_another_thread_has_waited_for,
    copies_what_gloo_has_not_brought,
    frees_what_gloo_reads,
    gives_gloo_the_device,
]
