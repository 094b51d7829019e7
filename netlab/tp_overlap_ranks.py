"""Runs on each of tp_overlap.py's two ranks: layers that the ranks share, with each way to hide what they send, in
turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
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
from helixpipe.common.alternate import finished
from helixpipe.costs.models import OFF, P2P, PAIRS
from helixpipe.model import GPTOptions, Microbatch, PipelineModel, UnitContext
from helixpipe.model.attention.context_parallel import select
from helixpipe.program.stages import model_pieces
from netlab.tp_overlap import WAYS


def measure(
    shared: str, layers: int, hidden: int, heads: int, tokens: int, rounds: int, flops: float
) -> dict[str, Any]:
    """Seconds of forward and backward, by each way, over the link and with collectives that move nothing.
    gradient_difference: the largest from off, relative to the largest
    gradient. flops: a second, at which matrix products and attention are waited for instead of computed; 0: they are
    computed."""
    dist.init_process_group("gloo")
    sizes = {"tensor_model_parallel_size" if shared == "tp" else "context_parallel_size": 2}
    parallel_state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1)
    steps = {way: Step(way, shared, layers, hidden, heads, tokens) for way in WAYS[shared]}
    gradients = {way: step.gradients() for way, step in steps.items()}  # also the warm-up
    largest = max(float(each.abs().max()) for each in gradients[OFF])
    difference = max(
        float((a - b).abs().max()) for own in gradients.values() for a, b in zip(gradients[OFF], own, strict=True)
    )

    def timed(name: str) -> float:
        way, _, where = name.partition(" ")
        with moving_nothing() if where else nullcontext(), Waiting(flops) if flops else nullcontext():
            return seconds_of(steps[way].run)

    names = [way + where for way in WAYS[shared] for where in ("", " alone")]
    return {
        "seconds": in_turn(names, rounds, timed, warm_up=1),
        "gradient_difference": difference / largest,
    }


class Step:
    """Layers of a model, forward and backward, from random hidden states to the mean of their squares. In pairs the
    forward is that of the next step, beside the backward."""

    def __init__(self, way: str, shared: str, layers: int, hidden: int, heads: int, tokens: int):
        config = TransformerConfig(
            num_layers=layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            tensor_model_parallel_size=2 if shared == "tp" else 1,
            use_cpu_initialization=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            transformer_impl="local",
            cuda_graph_scope=[],
        )
        how = P2P if shared == "tp" else shared
        options = GPTOptions(64, tokens, "rope", overlap_tp_comm=way, cp_comm_type=how)
        self.pieces = model_pieces(layers)[1:-1]
        self.model = PipelineModel(config, options, self.pieces)
        self.model.weight_gradients()
        generator = torch.Generator().manual_seed(1)
        whole = torch.randn(tokens, 1, hidden, generator=generator)
        self.hidden = select(whole, self.model.context.runs(0, tokens), 0)
        nothing = torch.zeros(1, tokens)
        self.batch = Microbatch(nothing, nothing, nothing)
        self._in_pairs = way == PAIRS
        self._loss: Tensor | None = None

    def run(self) -> None:
        self.model.zero_grad()
        if not self._in_pairs or self._loss is None:
            finished(self._forward())
        loss, self._loss = self._loss, None
        assert loss is not None
        if self._in_pairs:
            self.model.beside.begin(self._forward())
        loss.backward()
        self.model.beside.finish()

    def _forward(self) -> Generator[None, None, None]:
        hidden = self.hidden.detach().requires_grad_()
        (output,) = yield from self.model.steps(self.pieces, (hidden,), self.batch, UnitContext(0, 0))
        self._loss = output.square().mean()

    def gradients(self) -> list[Tensor]:
        self.run()
        found = [parameter.grad.clone() for parameter in self.model.parameters() if parameter.grad is not None]
        for gradient in found:  # of all tokens
            dist.all_reduce(gradient, group=parallel_state.get_context_parallel_group())
        return found


_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class Waiting(TorchDispatchMode):
    """Waits for matrix products and attention instead of computing them, which leaves the cores to what moves
    tensors."""

    def __init__(self, flops: float):
        super().__init__()
        self._flops = flops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            first, second = args
            time.sleep(2 * first.numel() * second.size(1) / self._flops)
            return first.new_zeros(first.size(0), second.size(1))
        if func is _ATTENTION:
            query, key, _, *others = args
            self._attend(4, query, key, others[1:2] == [True])
            return torch.zeros_like(query), query.new_zeros(query.shape[:3])
        if func is _ATTENTION_BACKWARD:
            _, query, key, value, *_ = args
            self._attend(10, query, key, args[7])
            return tuple(map(torch.zeros_like, (query, key, value)))
        return func(*args, **(kwargs or {}))

    def _attend(self, products: int, query: Tensor, key: Tensor, causal: bool) -> None:
        time.sleep(products * query.numel() * key.size(2) / (2 if causal else 1) / self._flops)


class _Done:
    def wait(self) -> None: ...


@contextmanager
def moving_nothing() -> Iterator[None]:
    """Let collectives end at once and change nothing."""

    def nothing(*unused: Any, async_op: bool = False, **others: Any) -> _Done | None:
        return _Done() if async_op else None

    with (
        patch.object(dist, "all_reduce", nothing),
        patch.object(dist, "all_to_all_single", nothing),
        patch.object(dist, "batch_isend_irecv", lambda ops: []),
    ):
        yield


def seconds_of(run: Callable[[], Any]) -> float:
    """From a common start to the later end."""
    dist.barrier()
    start = time.perf_counter()
    run()
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)
