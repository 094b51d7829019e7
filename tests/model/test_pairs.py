"""A forward beside the backward of another unit: what runs while a collective is under way, and what comes of it.

That gradients equal those of one process is tested under schedules (tests/runtime/pairs_cases.py).
"""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch
from torch import Tensor

from helixpipe.model.collectives import ForwardBeside, Started, begin, end, pause
from tests.distributed import run_ranks
from tests.model.pairs import beside_each_other, over_context
from tests.model.test_halves import idle


@pytest.mark.parametrize("split", [False, True], ids=["B", "I"])
def test_collectives_of_both_run_beside_products(split: bool) -> None:
    """All but one of a layer's backward, two without weight gradients. Dropout draws the same masks; a late result is
    NaN until it is waited for."""
    for results in run_ranks(beside_each_other, 2, split, timeout=120.0):
        for result in results:
            assert result["error"][0] < 1e-9, result["error"]
            events = result["events"]
            collectives = sum(event.startswith("start") for event in events)
            assert collectives >= (20 if result["sequence parallel"] else 8)
            assert len(idle(events)) <= collectives * (0.5 if split else 0.25), idle(events)


def test_a_forward_goes_on_while_context_parallel_ranks_exchange() -> None:
    """Swaps all run beside products, and of a ring's messages all but those of an end."""
    for results in run_ranks(over_context, 2, timeout=120.0):
        for how, result in results.items():
            assert result["error"][0] < 1e-9, result["error"]
            events = result["events"]
            collectives = sum(event.startswith("start") for event in events)
            assert collectives == 8
            assert idle(events) == [], (how, idle(events), events)


class _Doubled:
    """Stands for an exchange: twice what is given, there when it is waited for."""

    def __init__(self, events: list[str]):
        self.events = events

    def _start(self, what: str, tensor: Tensor) -> Started:
        self.events.append(f"{what} starts")
        result = torch.full_like(tensor, torch.nan)

        class Work:
            def wait(_) -> None:
                result.copy_(2 * tensor)
                self.events.append(f"{what} ends")

        return Started(result, Work())

    def forward(self, tensor: Tensor) -> Started:
        return self._start("forward", tensor.detach())

    def backward(self, gradient: Tensor) -> Started:
        return self._start("backward", gradient)


def test_an_exchange_lets_the_forward_beside_its_backward_take_a_step() -> None:
    events: list[str] = []
    beside, exchange = ForwardBeside(), _Doubled(events)
    tensor = torch.ones(3, requires_grad=True)
    begun = begin(3 * tensor, exchange, beside)
    result = pause(end(begun), beside)
    assert events == ["forward starts", "forward ends"] and torch.equal(result.detach(), torch.full((3,), 6.0))

    def other() -> object:
        for step in range(4):
            events.append(f"step {step}")
            assert torch.is_grad_enabled()
            yield

    events.clear()
    beside.begin(other())
    result.sum().backward()
    assert events == ["step 0", "step 1", "backward starts", "step 2", "backward ends"]
    beside.finish()
    assert events[-1] == "step 3"
    assert tensor.grad is not None and torch.equal(tensor.grad, torch.full((3,), 6.0))


@pytest.mark.parametrize("leads", [True, False])
def test_a_forward_takes_its_first_step_before_the_backward_where_it_leads(leads: bool) -> None:
    taken, beside = list[int](), ForwardBeside(leads)

    def steps() -> Generator[None, None, None]:
        for number in range(3):
            taken.append(number)
            yield

    beside.begin(steps())
    assert taken == [0] * leads
    beside.finish()
    assert taken == [0, 1, 2]
