"""Runs in each process of host_time.py: a model's layers, so small that their kernels take next to nothing.

python layer_steps.py CASE    (with the checkout that is measured in PYTHONPATH, whose `benchmarks` this does not need)
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig

from helixpipe.model import GPTOptions, Microbatch, PipelineModel, UnitContext
from helixpipe.model.attention.kv_store import KeyValueStore
from helixpipe.program.stages import model_pieces


class Case(NamedTuple):
    """llama: RMSNorm, SwiGLU, RoPE and grouped queries, without biases; else as GPT-2. chunks: of a sequence. split:
    whether weight gradients are put off."""

    llama: bool
    chunks: int = 1
    split: bool = False


CASES = MappingProxyType(
    {
        "gpt layer": Case(False),
        "llama layer": Case(True),
        "gpt layer, 4 chunks": Case(False, chunks=4),
        "llama layer, 4 chunks": Case(True, chunks=4),
        "gpt layer, split": Case(False, split=True),
        "llama layer, split": Case(True, split=True),
    }
)

LAYERS, HIDDEN, TOKENS = 4, 8, 2
"""TOKENS: of a chunk."""

ROUNDS = 10
"""Of a step: each chunk's time is the least of them."""

LLAMA: Any = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
    "num_query_groups": 1,
    "ffn_hidden_size": 16,
}

_run_backward: Any = torch.autograd.Variable._execution_engine.run_backward


def make_model(case: Case) -> PipelineModel:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    own: Any = LLAMA if case.llama else {}
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        **own,
    )
    positions: Any = {"position_embedding_type": "rope"} if case.llama else {}
    return PipelineModel(config, GPTOptions(48, TOKENS * case.chunks, **positions), model_pieces(LAYERS))


class Layers:
    """All layers of a model in one autograd graph a chunk, forward and backward."""

    def __init__(self, case: Case):
        self.case, self.model, self.store = case, make_model(case), KeyValueStore()
        self.pieces = tuple(piece for piece in self.model.pieces if piece.layer >= 0)
        tokens = torch.zeros(1, TOKENS * case.chunks, dtype=torch.int64)
        self.batch = Microbatch(tokens, tokens, torch.ones(tokens.shape))
        self.hidden = torch.randn(case.chunks, TOKENS, 1, HIDDEN)
        self.weight_gradients = self.model.weight_gradients() if case.split else None

    def unit(self, chunk: int) -> UnitContext:
        if self.case.chunks == 1:
            return UnitContext(step=0, microbatch=0, training=True)
        offset, whole = chunk * TOKENS, self.case.chunks * TOKENS
        keys_values = self.store.unit(0, offset, TOKENS, whole)
        return UnitContext(step=0, microbatch=0, training=True, offset=offset, keys_values=keys_values)

    def round(self) -> dict[str, list[int]]:
        """Nanoseconds of each chunk's ops, by kind."""
        clock, layers, kept, times = time.perf_counter_ns, range(LAYERS), [], dict[str, list[int]]()
        for chunk in range(self.case.chunks):
            given, unit = self.hidden[chunk].detach().requires_grad_(), self.unit(chunk)
            begin = clock()
            (output,) = self.model.run(self.pieces, (given,), self.batch, unit)
            times.setdefault("F", []).append(clock() - begin)
            kept.append((output, unit))
        while kept:
            output, unit = kept.pop()
            keys_values: Any = unit.keys_values
            if keys_values is not None:
                keys_values.begin_backward(layers)
            store = self.weight_gradients
            begin = clock()
            with nullcontext() if store is None else store.keep(len(kept)):
                _run_backward(
                    (output,), (self.hidden[0],), False, False, (), allow_unreachable=True, accumulate_grad=True
                )
            times.setdefault("B" if store is None else "I", []).append(clock() - begin)
            if store is not None:
                begin = clock()
                store.compute(len(kept))
                times.setdefault("W", []).append(clock() - begin)
            if keys_values is not None:
                keys_values.finish(layers)
        return times


def serve(name: str) -> None:
    """Answer each line of the input with microseconds of a layer and chunk."""
    torch.set_num_threads(1)
    layers = Layers(CASES[name])
    layers.round()
    gc.collect()
    gc.freeze()
    gc.disable()
    for _ in sys.stdin:
        rounds = [layers.round() for _ in range(ROUNDS)]
        least = {kind: map(min, zip(*(times[kind] for times in rounds), strict=True)) for kind in rounds[0]}
        print(json.dumps({kind: statistics.fmean(each) / LAYERS / 1e3 for kind, each in least.items()}), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
