"""Runs on each of experts.py's two ranks: layers whose experts both share out, one unit after another and in pairs."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from statistics import fmean
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
from helixpipe.costs.models import OFF, PAIRS, ModelShape
from helixpipe.model import GPTOptions, Microbatch, PipelineModel, UnitContext
from helixpipe.model.experts import exchange
from helixpipe.model.options import layers_of
from helixpipe.program.stages import model_pieces
from netlab.tp_overlap_ranks import seconds_of

EXCHANGES = 5
"""Timed in a round, of each size."""


def measure(shape: dict[str, Any], units: int, rounds: int, flops: float) -> dict[str, Any]:
    """Seconds of forward and backward of so many units, by `off` and `pairs`, over the link and with exchanges that
    move nothing; and of an all-to-all by its bytes, on average over all rounds: one takes either of two times, as what
    goes both ways over the link overlaps or does not. gradient_difference: of pairs from off, relative to the largest
    gradient. flops: a second, at which matrix products are waited for instead of computed; 0: they are computed."""
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(1, 1, expert_model_parallel_size=2, create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1)
    model = ModelShape.from_json(**shape)
    steps = {way: Step(way, model, units) for way in (OFF, PAIRS)}
    gradients = {way: step.gradients() for way, step in steps.items()}  # also the warm-up
    largest = max(float(each.abs().max()) for each in gradients[OFF])
    difference = max(float((a - b).abs().max()) for a, b in zip(*gradients.values(), strict=True))
    sizes = 4 * model.seq_length * model.topk * model.hidden // 2, 4
    exchanges = {f"{size} bytes": all_to_all(size) for size in sizes}

    def timed(name: str) -> float:
        if name in exchanges:
            return fmean(seconds_of(exchanges[name]) for _ in range(EXCHANGES))
        way, _, where = name.partition(" ")
        waiting = Waiting(flops, model.experts) if flops else nullcontext()
        with moving_nothing() if where else nullcontext(), waiting:
            return seconds_of(steps[way].run)

    names = [way + where for way in (OFF, PAIRS) for where in ("", " alone")]
    seconds = in_turn([*names, *exchanges], rounds, timed, warm_up=1)
    return {
        "seconds": {name: seconds[name] for name in names},
        "all_to_all": [[size, fmean(seconds[name])] for size, name in zip(sizes, exchanges, strict=True)],
        "gradient_difference": difference / largest,
    }


class Step:
    """Layers of a model on several units, forward and backward, from random hidden states to the mean of squares."""

    def __init__(self, way: str, shape: ModelShape, units: int):
        config = TransformerConfig(
            num_layers=shape.layers,
            hidden_size=shape.hidden,
            ffn_hidden_size=shape.expert_ffn,
            num_attention_heads=shape.heads,
            num_moe_experts=shape.experts,
            moe_ffn_hidden_size=shape.expert_ffn,
            moe_router_topk=shape.topk,
            moe_token_dispatcher_type="alltoall",
            expert_model_parallel_size=2,
            add_bias_linear=False,
            use_cpu_initialization=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            transformer_impl="local",
            cuda_graph_scope=[],
        )
        self.pieces = model_pieces(layers_of(config))[1:-1]
        options = GPTOptions(64, shape.seq_length, "rope", overlap_tp_comm=way)
        self.model = PipelineModel(config, options, self.pieces)
        self.model.weight_gradients()
        self.paired, self.units = way == PAIRS, units
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        self.hidden = torch.randn(shape.seq_length, 1, shape.hidden, generator=generator)
        nothing = torch.zeros(1, shape.seq_length)
        self.batch = Microbatch(nothing, nothing, nothing)

    def run(self) -> None:
        self.model.zero_grad()
        before: Tensor | None = None
        for unit in range(self.units):
            outputs = list[Tensor]()
            forward = self._forward(unit, outputs)
            if self.paired and before is not None:
                self.model.beside.begin(forward)
                before.backward()
                self.model.beside.finish()
            else:
                if before is not None:
                    before.backward()
                for _ in forward:
                    pass
            before = outputs[0]
        assert before is not None
        before.backward()

    def _forward(self, unit: int, outputs: list[Tensor]) -> Generator[None, None, None]:
        hidden = self.hidden.detach().requires_grad_()
        (output,) = yield from self.model.steps(self.pieces, (hidden,), self.batch, UnitContext(0, unit))
        outputs.append(output.square().mean())

    def gradients(self) -> list[Tensor]:
        self.run()
        found = [parameter.grad for parameter in self.model.parameters()]
        return [gradient.clone() for gradient in found if gradient is not None]


class Waiting(TorchDispatchMode):
    """Waits for matrix products instead of computing them, which leaves the cores to what moves tensors; but for the
    routers', which say where tokens go."""

    def __init__(self, flops: float, experts: int):
        super().__init__()
        self._flops, self._experts = flops, experts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.mm.default or self._experts in args[1].shape:
            return func(*args, **(kwargs or {}))
        first, second = args
        time.sleep(2 * first.numel() * second.size(1) / self._flops)
        return first.new_zeros(first.size(0), second.size(1))


class _Nothing:
    """torch.distributed, whose exchanges end at once and change nothing."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda output, *unused, **others: _Done(output.zero_())


class _Done:
    def __init__(self, output: Tensor): ...

    def wait(self) -> None: ...


@contextmanager
def moving_nothing() -> Iterator[None]:
    """Let tokens travel in no time."""
    with patch.object(exchange, "dist", _Nothing()):
        yield


def all_to_all(nbytes: int) -> Callable[[], Any]:
    """An exchange in which each of two ranks sends the other so many bytes."""
    tensor = torch.zeros(2, max(nbytes // 4, 1))
    group = parallel_state.get_expert_model_parallel_group()
    return lambda: dist.all_to_all_single(torch.empty_like(tensor), tensor, group=group)
