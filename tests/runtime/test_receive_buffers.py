"""Memory that messages are received into is used again as soon as nothing refers to it, and no sooner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from helixpipe.runtime.receive_buffers import STEPS_KEPT, ReceiveBuffers

SHAPE = torch.Size((3, 4))
CPU = torch.device("cpu")


def saved_by_autograd(tensor: Tensor) -> Any:
    return tensor.detach().requires_grad_().square().sum()


def packed_by_a_hook(tensor: Tensor) -> Any:
    """As offloading keeps what autograd saves: the storage alone."""

    def pack(saved: Tensor) -> Any:
        return saved.untyped_storage()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda storage: torch.empty(0)):
        return tensor.detach().requires_grad_().square().sum()


HOLDERS: list[Callable[[Tensor], Any]] = [
    lambda tensor: tensor,
    lambda tensor: tensor[1:, ::2],
    lambda tensor: tensor.detach(),
    lambda tensor: tensor.untyped_storage(),
    lambda tensor: torch.nn.Parameter(torch.empty(0)).data.set_(tensor),
    saved_by_autograd,
    packed_by_a_hook,
]


@pytest.mark.parametrize("holder", HOLDERS)
def test_memory_that_something_refers_to_is_not_given_out(holder: Callable[[Tensor], Any]) -> None:
    buffers = ReceiveBuffers(CPU)
    tensor = buffers.take(SHAPE, torch.float32)
    place, held = tensor.data_ptr(), holder(tensor)
    del tensor
    other = buffers.take(SHAPE, torch.float32)
    assert other.data_ptr() != place
    assert buffers.reserved == 2 * 48
    del held
    assert buffers.take(SHAPE, torch.float32).data_ptr() == place
    assert buffers.reserved == 2 * 48


def test_memory_is_shared_by_messages_of_as_many_bytes() -> None:
    buffers = ReceiveBuffers(CPU)
    first = buffers.take(SHAPE, torch.float32)
    place = first.data_ptr()
    del first
    second = buffers.take(torch.Size((24,)), torch.bfloat16)
    assert (second.data_ptr(), second.dtype, second.shape) == (place, torch.bfloat16, (24,))
    assert second.is_contiguous() and second.untyped_storage().nbytes() == second.nbytes
    assert buffers.take(SHAPE, torch.float64).data_ptr() != place
    assert buffers.reserved == 48 + 96


def test_memory_that_no_message_has_any_longer_is_given_back() -> None:
    buffers = ReceiveBuffers(CPU)
    kept = buffers.take(SHAPE, torch.float32)
    buffers.take(SHAPE, torch.float64)
    for _ in range(STEPS_KEPT):
        buffers.end_step()
        assert buffers.reserved == 48 + 96
    buffers.end_step()
    assert buffers.reserved == 48, "what is still in use stays"
    del kept
    buffers.take(SHAPE, torch.float32)
    for _ in range(STEPS_KEPT + 1):
        buffers.end_step()
    assert buffers.reserved == 0
