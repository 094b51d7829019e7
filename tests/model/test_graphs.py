"""When runs of pieces are captured, and when their graphs are given up; test_equality.py compares their gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from helixpipe.model.graphs import STEPS_KEPT, Graphs, why_not
from helixpipe.program.stages import Piece
from tests.model.common import make_config, make_options
from tests.runtime.recorded_graphs import RecordedEngine

MLP = (Piece("mlp", 0),)


class Slow(RecordedEngine):
    """The device takes longer than the host, or has not said yet."""

    def __init__(self, answers: Iterator[bool | None]):
        super().__init__()
        self.answers = answers

    def timed(self, function: Any) -> Any:
        return function(), lambda: next(self.answers)


class Doubling:
    """Pieces that multiply by one weight."""

    def __init__(self, often: int = 1, answers: tuple[bool | None, ...] = (True,)):
        weight: Any = torch.nn.Parameter(torch.tensor([2.0, 3.0]))
        weight.main_grad = torch.zeros(2)
        self.weight: Any = weight
        self.graphs = Graphs(Slow(iter(answers)), lambda pieces: [self.weight], often)

    def run(self, length: int = 4, offset: int = 0) -> tuple[Tensor, Tensor]:
        """An input of ones, and what comes of it."""
        given = torch.ones(length, 2, requires_grad=True)
        (result,) = self.graphs.run(MLP, (given,), offset, lambda pieces, state: (state[0] * self.weight,))
        return given, result

    def captured(self, times: int, **size: int) -> list[int]:
        """The slots there are after each of so many steps of one unit."""
        return [self.one(**size) for _ in range(times)]

    def one(self, **size: int) -> int:
        self.graphs.begin()
        given, result = self.run(**size)
        result.sum().backward()
        assert given.grad is not None and torch.equal(given.grad, self.weight.detach().expand_as(given))
        return self.graphs.slots


def test_what_comes_often_is_captured_and_what_does_not_is_not() -> None:
    model = Doubling(often=3)
    assert model.captured(5) == [0, 0, 0, 1, 1]
    assert model.captured(2, length=3) == [1, 1]
    assert model.captured(2, offset=4) == [1, 1]


def test_where_the_device_is_slower_nothing_is_captured() -> None:
    assert Doubling(answers=(None, None, False)).captured(6) == [0] * 6
    assert Doubling(answers=(None, True)).captured(5) == [0, 0, 0, 1, 1]


def test_a_slot_for_each_unit_in_flight() -> None:
    model = Doubling()
    model.captured(2)
    units = [model.run() for _ in range(3)]
    assert model.graphs.slots == 3
    for _, result in reversed(units):
        result.sum().backward()
    assert model.captured(3) == [3, 3, 3]


def test_slots_of_a_step_that_was_given_up_are_free_in_the_next() -> None:
    model = Doubling()
    model.captured(2)
    for _ in range(2):
        model.run()
    model.graphs.begin()
    assert model.captured(2) == [2, 2]


def test_graphs_of_weights_that_moved_are_forgotten() -> None:
    model = Doubling(answers=(True, True))
    assert model.captured(3) == [0, 0, 1]
    model.graphs.begin()
    assert model.captured(1) == [1]
    model.weight.data = torch.tensor([5.0, 7.0])
    model.graphs.begin()
    assert model.graphs.slots == 0
    assert model.captured(3) == [0, 0, 1]


def test_nothing_is_captured_in_the_step_that_a_run_is_first_seen_in() -> None:
    """Its backward may not have run yet, which loads kernels."""
    model = Doubling()
    for _ in range(6):
        model.run()
    assert model.graphs.slots == 0


def test_inputs_without_gradients_are_not_captured() -> None:
    """Autograd would not come to the graph's backward, which adds the gradients of the weights."""
    model = Doubling()
    for step in range(4):
        model.graphs.begin()
        (result,) = model.graphs.run(MLP, (torch.ones(4, 2),), 0, lambda pieces, state: (state[0] * model.weight,))
        result.sum().backward()
        assert torch.equal(model.weight.grad, torch.full((2,), 4.0 * (step + 1)))


def test_runs_that_come_no_more_are_forgotten() -> None:
    model = Doubling(answers=(True, True))
    assert model.captured(3) == [0, 0, 1]
    for _ in range(STEPS_KEPT):
        model.graphs.begin()
    assert model.graphs.slots == 1
    model.graphs.begin()
    assert model.graphs.slots == 0
    assert model.captured(3) == [0, 0, 1]


def test_weights_without_a_lasting_sum_of_gradients_are_not_captured() -> None:
    model = Doubling()
    model.weight.main_grad = None
    assert model.captured(4) == [0] * 4


def test_an_evaluation_is_not_captured() -> None:
    model = Doubling()
    with torch.no_grad():
        for _ in range(4):
            model.run()
    assert model.graphs.slots == 0


@pytest.mark.parametrize(
    ("changes", "options", "ranks", "reason"),
    [
        ({}, {"cuda_graphs": "off"}, 1, "off"),
        ({}, {}, 2, "tensor- or context-parallel"),
        ({"hidden_dropout": 0.1}, {}, 1, "--hidden-dropout"),
        ({}, {"chunk_size": 4}, 1, "--chunk-size"),
        ({}, {}, 1, ""),
    ],
)
def test_why_not(
    changes: dict[str, Any], options: dict[str, Any], ranks: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpt = replace(make_options("gpt", True), **{"cuda_graphs": "auto", **options})
    if options.get("cuda_graphs") != "off":
        assert why_not(make_config("gpt"), gpt, 1) == "there is no GPU"
    monkeypatch.setattr("helixpipe.model.graphs.device", lambda: torch.device("cuda", 0))
    found = why_not(make_config("gpt", **changes), gpt, ranks)
    assert reason in found and bool(found) == bool(reason)
