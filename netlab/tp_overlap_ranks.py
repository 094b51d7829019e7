"""Runs on each of tp_overlap.py's two ranks: layers over tensor-parallel ranks, whole and in halves, in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.rounds import in_turn
from helixpipe.costs.models import HALVES, OFF
from helixpipe.model import GPTOptions, Microbatch, PipelineModel, UnitContext
from helixpipe.program.stages import model_pieces


def measure(layers: int, hidden: int, heads: int, tokens: int, rounds: int, flops: float) -> dict[str, Any]:
    """Seconds of forward and backward, by `off` and `halves`, over the link and with collectives that move nothing;
    and of an all-reduce by its bytes. gradient_difference: of halves from off, relative to the largest gradient. flops:
    a second, at which matrix products are waited for instead of computed; 0: they are computed."""
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(2, 1, create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1)
    steps = {way: Step(way, layers, hidden, heads, tokens) for way in (OFF, HALVES)}
    gradients = {way: step.gradients() for way, step in steps.items()}  # also the warm-up
    largest = max(float(each.abs().max()) for each in gradients[OFF])
    difference = max(float((a - b).abs().max()) for a, b in zip(*gradients.values(), strict=True))

    def timed(name: str) -> float:
        way, _, where = name.partition(" ")
        with moving_nothing() if where else nullcontext(), Waiting(flops) if flops else nullcontext():
            return seconds_of(steps[way].run)

    names = [way + where for way in (OFF, HALVES) for where in ("", " alone")]
    sizes = [4 * tokens * hidden, 2 * tokens * hidden, 4]
    return {
        "seconds": in_turn(names, rounds, timed, warm_up=1),
        "all_reduce": [[size, min(seconds_of(all_reduce(size)) for _ in range(5))] for size in sizes],
        "gradient_difference": difference / largest,
    }


class Step:
    """Layers of a model, forward and backward, from random hidden states to the sum of their squares."""

    def __init__(self, way: str, layers: int, hidden: int, heads: int, tokens: int):
        config = TransformerConfig(
            num_layers=layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            tensor_model_parallel_size=2,
            use_cpu_initialization=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            transformer_impl="local",
            cuda_graph_scope=[],
        )
        options = GPTOptions(64, tokens, "rope", overlap_tp_comm=way)
        self.pieces = model_pieces(layers)[1:-1]
        self.model = PipelineModel(config, options, self.pieces)
        self.model.weight_gradients()
        generator = torch.Generator().manual_seed(1)
        self.hidden = torch.randn(tokens, 1, hidden, generator=generator)
        nothing = torch.zeros(1, tokens)
        self.batch = Microbatch(nothing, nothing, nothing)

    def run(self) -> None:
        self.model.zero_grad()
        hidden = self.hidden.detach().requires_grad_()
        (output,) = self.model.run(self.pieces, (hidden,), self.batch, UnitContext(0, 0))
        output.square().mean().backward()

    def gradients(self) -> list[Tensor]:
        self.run()
        found = [parameter.grad for parameter in self.model.parameters()]
        return [gradient.clone() for gradient in found if gradient is not None]


class Waiting(TorchDispatchMode):
    """Waits for matrix products instead of computing them, which leaves the cores to what moves tensors."""

    def __init__(self, flops: float):
        super().__init__()
        self._flops = flops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.mm.default:
            return func(*args, **(kwargs or {}))
        first, second = args
        time.sleep(2 * first.numel() * second.size(1) / self._flops)
        return first.new_zeros(first.size(0), second.size(1))


class _Done:
    def wait(self) -> None: ...


@contextmanager
def moving_nothing() -> Iterator[None]:
    """Let collectives end at once and change nothing."""

    def nothing(*unused: Any, async_op: bool = False, **others: Any) -> _Done | None:
        return _Done() if async_op else None

    with patch.object(dist, "all_reduce", nothing):
        yield


def all_reduce(nbytes: int) -> Callable[[], Any]:
    tensor = torch.zeros(nbytes // 4)
    return lambda: dist.all_reduce(tensor, group=parallel_state.get_tensor_model_parallel_group())


def seconds_of(run: Callable[[], Any]) -> float:
    """From a common start to the later end."""
    dist.barrier()
    start = time.perf_counter()
    run()
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)
