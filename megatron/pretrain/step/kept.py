"""Keeps what an update of the weights changes, so that it can be undone bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class KeptState:
    """A copy of the state that an update changes: the weights, `copied` among them, and the optimizers' state."""

    def __init__(self, optimizers: list[torch.optim.Optimizer], copied: Sequence[Tensor]):
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._states: list[tuple[torch.optim.Optimizer, Tensor, dict[str, Any]]] = []
        weights = {id(weight): weight for weight in copied}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                self._groups.append((group, {key: _copy(value) for key, value in group.items() if key != "params"}))
                for weight in group["params"]:
                    weights[id(weight)] = weight
                    state = {key: _copy(value) for key, value in optimizer.state.get(weight, {}).items()}
                    self._states.append((optimizer, weight, state))
        self._weights = [(weight, weight.detach().clone()) for weight in weights.values()]

    def restore(self) -> None:
        for group, values in self._groups:
            group.update(values)
        for weight, value in self._weights:
            weight.detach().copy_(value)
        for optimizer, weight, state in self._states:
            if state:
                optimizer.state[weight] = state
            else:
                optimizer.state.pop(weight, None)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
