"""Runs on the ranks of test_host_reads.py: steps in which nothing may wait for a number of a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from helixpipe.model.device import device, prepare

prepare()  # before megatron-core is imported, whose notices it silences

from megatron.core import parallel_state

from helixpipe.runtime.transport import make_transport
from tests.model.common import set_parallel
from tests.runtime.equality import Case, lowered, make_executor, make_step

_READS = frozenset({"_local_scalar_dense", "equal", "masked_select", "nonzero", "repeat_interleave", "unique_dim"})
"""Ops of ATen whose result, or its size, is a number that the host must wait for."""

_COPIES = (
    torch.Tensor.cpu,
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.Tensor.item,
    torch.Tensor.__bool__,
    torch.as_tensor,
    torch.from_numpy,
    torch.tensor,
)
"""Functions that on CUDA copy to the host, or from memory of it that is not pinned."""


_FACTORIES = frozenset({torch.arange, torch.empty, torch.full, torch.linspace, torch.ones, torch.randperm, torch.zeros})
"""Functions whose tensors lie on the host unless they are told the device."""


class HostRead(RuntimeError):
    """Something that on CUDA would make the host wait for the device."""


class NoReads(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.removeprefix("aten::")
        by_mask = name in ("index", "index_put_") and any(
            each is not None and each.dtype is torch.bool for each in args[1]
        )
        scalar = name == "index_put_" and by_mask and args[2].dim() == 0  # which torch makes a masked_fill_
        if name in _READS or (by_mask and not scalar):
            raise HostRead(name)
        return func(*args, **(kwargs or {}))


class NoCopies(TorchFunctionMode):
    """Without CUDA what lies on the host cannot be told from what lies on the device: a tensor made in here without
    saying where counts as the host's."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _COPIES:
            raise HostRead(func.__name__)
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and _lies_on_host(args[1]):
            raise HostRead("an index on the host")
        result = func(*args, **(kwargs or {}))
        if func in _FACTORIES and (kwargs or {}).get("device") is None:
            result.on_host = True
        return result


def _lies_on_host(index: Any) -> bool:
    """Whether an index, or one of several, would be copied to the device first."""
    each = index if isinstance(index, tuple) else (index,)
    return any(isinstance(one, (list, range, np.ndarray)) or getattr(one, "on_host", False) for one in each)


def run_without_reads(rank: int, world_size: int, cases: list[Case]) -> list[str]:
    """For each case what went wrong on this rank, or nothing."""
    found, sizes = [], (0, 0)
    transport: Any = None
    for case in cases:
        if sizes != (case.tp, case.pp):
            sizes = case.tp, case.pp
            set_parallel(*sizes)
            transport = make_transport(parallel_state.get_pipeline_model_parallel_group(), device())
        _, executor = make_executor(case, transport)
        plan = lowered(case)
        step = make_step(case)
        if torch.cuda.is_available():
            executor.run(plan, step)  # the first step makes tables, of positions for example
        with NoCopies(), NoReads(), _no_waits():
            try:
                executor.run(plan, step)
                found.append("")
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}")
                return found  # the other rank waits for ever
    return found


@contextmanager
def _no_waits() -> Iterator[None]:
    """With CUDA, torch itself refuses what makes the host wait."""
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")


def reads(rank: int, world_size: int) -> list[str]:
    """Return what the guard says of some that are not allowed, and of some that are."""
    tensor, own = torch.arange(4.0), torch.arange(2)
    said = []
    attempts: tuple[Callable[[], Any], ...] = (
        lambda: tensor.sum().item(),
        lambda: float(tensor.sum()),
        lambda: bool((tensor > 1).any()),
        lambda: tensor[tensor > 1],
        lambda: tensor.cpu(),
        lambda: torch.tensor([1.0]),
        lambda: tensor[[0, 2]],
        lambda: tensor[None, [0, 2]],
        lambda: tensor[torch.arange(2)],
        lambda: tensor.__setitem__([0, 2], 1.0),
        lambda: tensor[torch.arange(2, device=tensor.device)],
        lambda: tensor[own],
        lambda: tensor[1:3],
        lambda: tensor.masked_fill(tensor > 1, 0.0),
        lambda: tensor.index_select(0, torch.zeros(1, dtype=torch.int64)),
    )
    for attempt in attempts:
        with NoCopies(), NoReads():
            try:
                attempt()
                said.append("")
            except HostRead:
                said.append("read")
    return said
