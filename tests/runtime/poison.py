"""Transports whose memory is poisoned when nobody owns it, and what the ranks of test_poison.py run with them."""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from helixpipe.model.device import device, prepare

prepare()  # before megatron-core is imported, whose notices it silences

from megatron.core import parallel_state

from helixpipe.runtime.gloo import GlooReceipt, GlooTransport
from helixpipe.runtime.nccl import NcclTransport
from tests.model.common import set_parallel
from tests.runtime.equality import Case, reference, run_case

POISON = 0xFF
"""As every byte of a floating-point number, of any type: not a number."""


class _HostMemory(np.ndarray[Any, Any]):
    """Bytes of the host, as an object of which one can know when the last tensor in it has gone."""


class _DeviceMemory:
    """Bytes of a GPU, likewise."""

    def __init__(self, backing: Tensor):
        self.__cuda_array_interface__ = {
            "shape": tuple(backing.shape),
            "typestr": "|u1",
            "data": (backing.data_ptr(), False),
            "version": 3,
        }


class Poisoned:
    """Over a transport: what it is given to send lies in memory that is poisoned as soon as no tensor is left in it,
    and what it receives into is poisoned beforehand. Nothing else ever uses that memory, so who still reads it finds
    poison. `poisoned`: how often memory has been let go of.
    """

    def __post_init__(self) -> None:
        self._kept: list[Any] = []
        self.poisoned = 0
        super().__post_init__()  # type: ignore[misc]

    def send(self, tensors: Sequence[Tensor], target: int, number: int, since: Any = None) -> None:
        copies = [self._memory(tensor.shape, tensor.dtype, tensor.device).copy_(tensor.detach()) for tensor in tensors]
        super().send(copies, target, number)  # type: ignore[misc]

    def _buffer(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        buffer: Tensor = super()._buffer(shape, dtype)  # type: ignore[misc]
        if len(shape) == 1 and not buffer.is_pinned():  # weights, which may be passed on
            return self._memory(shape, dtype, buffer.device)
        return buffer.fill_(torch.nan)

    def _memory(self, shape: torch.Size, dtype: torch.dtype, where: torch.device) -> Tensor:
        size = shape.numel() * dtype.itemsize
        memory: Any
        backing: Any
        if where.type == "cpu":
            backing = np.full(size, POISON, np.uint8)
            memory = backing.view(_HostMemory)
            tensor = torch.from_numpy(memory)
        else:
            backing = torch.full((size,), POISON, dtype=torch.uint8, device=where)
            memory = _DeviceMemory(backing)
            tensor = torch.as_tensor(memory, device=where)
            assert tensor.data_ptr() == backing.data_ptr()
        self._kept.append(backing)  # or the allocator would give it to others, whose numbers look fine
        weakref.finalize(memory, self._poison, backing).atexit = False
        return tensor.view(dtype).view(shape)

    def _poison(self, backing: Any) -> None:
        """Where the caching allocator would let the memory be used again: on a GPU, in the stream that computes."""
        self.poisoned += 1
        with torch.cuda.stream(torch.cuda.default_stream()) if torch.cuda.is_available() else nullcontext():
            if isinstance(backing, Tensor):
                backing.fill_(POISON)
            else:
                backing.fill(POISON)


class PoisonedGloo(Poisoned, GlooTransport):
    """Gloo as it is."""


class PoisonedNccl(Poisoned, NcclTransport):
    """NCCL as it is; see `happens_before/` for the CPU."""


class Hasty(PoisonedGloo):
    """Wrong: lets go of what it sends before it has left."""

    def _start(self, tensors: list[Tensor], target: int, number: int) -> None:
        borrowed = [_borrowed(tensor) for tensor in tensors]

        def start() -> None:
            before = self.poisoned
            deadline = time.monotonic() + 1.0
            while self.poisoned == before and time.monotonic() < deadline:
                time.sleep(0.001)
            super(Hasty, self)._start(borrowed, target, number)

        thread = threading.Thread(target=start, daemon=True)
        thread.start()
        self._starting.append(thread)


class Hurried(PoisonedGloo):
    """Wrong: gives out what it receives before it has come."""

    def receive(self, shapes: Sequence[torch.Size], dtype: torch.dtype, source: int, number: int) -> GlooReceipt:
        receipt: GlooReceipt = super().receive(shapes, dtype, source, number)
        self._late.extend(receipt.works)
        receipt.works.clear()
        return receipt

    def __post_init__(self) -> None:
        self._late: list[Any] = []
        super().__post_init__()

    def finish(self) -> None:
        while self._late:  # or this rank would end while the other still sends
            self._late.pop().wait()
        super().finish()


def _borrowed(tensor: Tensor) -> Tensor:
    """The same memory without a claim to it, as a kernel in flight has."""
    size = tensor.nbytes
    raw = (ctypes.c_uint8 * size).from_address(tensor.data_ptr())
    return torch.from_numpy(np.ctypeslib.as_array(raw)).view(tensor.dtype).view(tensor.shape)


TRANSPORTS: dict[str, Callable[..., Any]] = {
    "gloo": PoisonedGloo,
    "nccl": PoisonedNccl,
    "hasty": Hasty,
    "hurried": Hurried,
}


def run_poisoned(rank: int, world_size: int, name: str, cases: list[Case]) -> list[tuple[float, float, int]]:
    """For each case the errors of gradients and losses, and how often memory was let go of."""
    set_parallel(tp=1)
    references = [reference(case.alone()) for case in cases]
    set_parallel(tp=1, pp=world_size)
    results = []
    for case, expected in zip(cases, references, strict=True):
        own = TRANSPORTS[name](parallel_state.get_pipeline_model_parallel_group(), device())
        result = run_case(case, *expected, own)
        own.close()
        results.append((result["gradient"][0], max(result["loss"], result["evaluation"]), own.poisoned))
    return results
