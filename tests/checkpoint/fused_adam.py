"""Stands for FusedAdam of Apex and Transformer Engine: AdamW whose groups count the steps, and not its weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from megatron.core import optimizer as core_optimizer


class FusedAdam(torch.optim.Optimizer):
    def __init__(self, params: Any, adam_w_mode: bool = True, **defaults: Any):
        assert adam_w_mode
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
                assert state.keys() == {"exp_avg", "exp_avg_sq"}  # Transformer Engine's takes no other
                state["exp_avg"].lerp_(parameter.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
                variance = state["exp_avg_sq"] / (1 - beta2 ** group["step"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                mean = state["exp_avg"] / (1 - beta1 ** group["step"])
                parameter.sub_(group["lr"] * mean / (variance.sqrt() + group["eps"]))


@contextmanager
def fused_adam() -> Iterator[None]:
    """Let megatron-core build `FusedAdam` in this context, as it does where Apex is installed."""
    with (
        mock.patch.object(core_optimizer, "USING_PYTORCH_OPTIMIZER", False),
        mock.patch.object(core_optimizer, "Adam", FusedAdam),
    ):
        yield
