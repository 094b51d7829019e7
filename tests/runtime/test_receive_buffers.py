"""Memory that messages are received into is used again as soon as nothing refers to it, and no sooner, by messages of
any length; it never grows but where a step needs more than those before."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helixpipe.runtime.arena import ALIGNMENT
from helixpipe.runtime.receive_buffers import ReceiveBuffers

SHAPE = torch.Size((32, 4))
SIZE = 512
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
    lambda tensor: torch.nn.Parameter(torch.empty(0)).data.set_(tensor.untyped_storage()),
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
    assert buffers.reserved == 2 * SIZE
    buffers.end_step()
    assert buffers.reserved == 2 * SIZE, "blocks stay while something is in them"
    del held
    assert buffers.take(SHAPE, torch.float32).data_ptr() == place
    assert buffers.reserved == 2 * SIZE


def test_messages_of_other_lengths_and_types_share_the_memory() -> None:
    buffers = ReceiveBuffers(CPU)
    long = [buffers.take(SHAPE, torch.float64) for _ in range(2)]
    assert buffers.reserved == 4 * SIZE
    long.clear()
    buffers.end_step()
    short = [buffers.take(torch.Size((16, 4)), torch.bfloat16) for _ in range(4)]
    assert buffers.reserved == 4 * SIZE and len({each.data_ptr() for each in short}) == 4
    for each in short:
        assert each.dtype == torch.bfloat16 and each.shape == (16, 4) and each.is_contiguous()
        assert each.untyped_storage().nbytes() == each.nbytes == 128, "or who keeps it would copy it"
    del each
    short.clear()
    buffers.take(torch.Size((4, 32, 4)), torch.float32)
    assert buffers.reserved == 4 * SIZE


def test_tensors_outlive_the_buffers() -> None:
    buffers = ReceiveBuffers(CPU)
    tensor = buffers.take(SHAPE, torch.float32).fill_(3.0)
    buffers.clear()
    assert buffers.reserved == 0 and bool((tensor == 3.0).all())


Lengths = st.integers(1, 9000)


@given(st.lists(st.tuples(st.integers(1, 5), Lengths), min_size=2, max_size=8))
def test_steps_of_unlike_lengths_take_memory_only_where_they_need_more(steps: list[tuple[int, int]]) -> None:
    """steps: how many messages are in use at once, and of how many bytes each is. A message more than that is all that
    is ever kept beside what the largest step has needed."""
    buffers, most, longest = ReceiveBuffers(CPU), 0, 0
    for live, length in steps:
        used = live * -(-length // ALIGNMENT) * ALIGNMENT
        with mock.patch.object(torch, "empty", wraps=torch.empty) as taken:
            held: list[Tensor] = []
            for number in range(2 * live):
                held.append(buffers.take(torch.Size((1, length)), torch.uint8).fill_(number))
                assert all(int(each[0, 0]) == int(each[0, -1]) == number for number, each in _last(held, number))
                if len(held) == live:
                    held.pop(0)
            held.clear()
            buffers.end_step()
        assert used > most or taken.call_count == 0
        most, longest = max(most, used), max(longest, used // live)
        assert most <= buffers.reserved <= most + longest


@given(st.lists(Lengths, min_size=1, max_size=20), st.randoms(use_true_random=False))
def test_a_step_of_unlike_messages_takes_no_memory_once_it_has_come_a_few_times(lengths: list[int], rng: Any) -> None:
    buffers = ReceiveBuffers(CPU)
    ends = [rng.randint(0, 5) for _ in lengths]
    counts = []
    for _ in range(5):
        with mock.patch.object(torch, "empty", wraps=torch.empty) as taken:
            held: list[tuple[int, int, Tensor]] = []
            for number, (length, end) in enumerate(zip(lengths, ends, strict=True)):
                held.append((number + end, number, buffers.take(torch.Size((length,)), torch.uint8).fill_(number)))
                assert all(int(tensor[0]) == int(tensor[-1]) == value for _, value, tensor in held)
                held = [each for each in held if each[0] > number]
            held.clear()
            buffers.end_step()
        counts.append(taken.call_count)
    assert counts[-1] == 0
    assert buffers.reserved <= 6 * (max(lengths) + ALIGNMENT) * 2


def test_steps_of_unlike_messages_take_no_memory_after_the_first_unless_they_need_more_at_once() -> None:
    rng, buffers, most, grown = random.Random(7), ReceiveBuffers(CPU), 0, 0
    for step in range(40):
        lengths = [int(rng.lognormvariate(7, 1)) + 1 for _ in range(24)]
        with mock.patch.object(torch, "empty", wraps=torch.empty) as taken:
            held: list[Tensor] = []
            used = 0
            for length in lengths:
                held.append(buffers.take(torch.Size((length, 8)), torch.bfloat16))
                used = max(used, buffers.used)
                if len(held) == 4:
                    held.pop(0)
            held.clear()
            buffers.end_step()
        if step > 1 and used <= most:
            assert taken.call_count == 0
            grown += 1
        most = max(most, used)
        assert buffers.reserved <= 2 * most
    assert grown > 20


def _last(held: list[Tensor], number: int) -> list[tuple[int, Tensor]]:
    """Return the tensors with what was written into each; the last has `number`."""
    return [(number - place, each) for place, each in enumerate(reversed(held))]
