"""Runs in each process of host_time.py: a model's layers, so small that their kernels take next to nothing.

python layer_steps.py CASE    (with the checkout that is measured in PYTHONPATH, whose `benchmarks` this does not need)
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from torch import Tensor

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

ROUNDS, FLOOR_ROUNDS = 10, 1000
"""Of a step, and in all of the floor: each chunk's time is the least of them."""

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


class PlainLayers:
    """The same layers on the same weights, of one chunk, in as few of torch's own functions as they can be written in:
    what is left of a layer's time is torch's. Biases are added within the products, and nothing is seen to for a later
    W, tensor-parallel ranks or documents."""

    def __init__(self, layers: Layers):
        self.given = layers.hidden[0]
        self.norm: Any = torch.rms_norm if layers.case.llama else torch.layer_norm
        self.weights: list[dict[str, Tensor]] = [{} for _ in range(LAYERS)]
        for name, parameter in layers.model.decoder.layers.named_parameters():
            number, _, rest = name.partition(".")
            self.weights[int(number)][rest] = parameter
        config = layers.model.config
        self.groups, channels = config.num_query_groups, config.kv_channels
        assert self.groups is not None and channels is not None  # TransformerConfig fills them in
        self.parts = [config.num_attention_heads // self.groups * channels, channels, channels]
        angles = torch.outer(torch.arange(TOKENS), torch.ones(channels // 2)).repeat(1, 2)[:, None, None]
        self.turned = (angles.cos(), angles.sin()) if layers.case.llama else None

    def round(self) -> dict[str, list[int]]:
        """As of `Layers`, of which the times of whole sequences are to be compared with these."""
        clock, given = time.perf_counter_ns, self.given.detach().requires_grad_()
        begin, output = clock(), given
        for weights in self.weights:
            output = self.layer(weights, output)
        forward, middle = clock() - begin, clock()
        _run_backward((output,), (self.given,), False, False, (), allow_unreachable=True, accumulate_grad=True)
        return {"F": [forward], "B": [clock() - middle]}

    def layer(self, weights: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
        """[s, b, h] to the same."""
        mixed = self.linear(weights, "self_attention.linear_qkv", self.normed(weights, "input_layernorm", hidden))
        query, key, value = mixed.unflatten(-1, (self.groups, -1)).split(self.parts, -1)
        query = query.reshape(*query.shape[:2], -1, key.size(-1))
        if self.turned is not None:
            query, key = self.rotated(query), self.rotated(key)
        query, key, value = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        attention = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=query.size(1) != key.size(1)
        )
        attention = attention.permute(2, 0, 1, 3).flatten(2)
        hidden = hidden + self.linear(weights, "self_attention.linear_proj", attention)
        inner = self.linear(weights, "mlp.linear_fc1", self.normed(weights, "pre_mlp_layernorm", hidden))
        if self.turned is not None:
            gate, linear = inner.chunk(2, -1)
            inner = F.silu(gate) * linear
        else:
            inner = F.gelu(inner)
        return hidden + self.linear(weights, "mlp.linear_fc2", inner)

    def normed(self, weights: Mapping[str, Tensor], name: str, hidden: Tensor) -> Tensor:
        own = [weights[f"{name}.{each}"] for each in ("weight", "bias") if f"{name}.{each}" in weights]
        normed: Tensor = self.norm(hidden, (HIDDEN,), *own, 1e-5)
        return normed

    @staticmethod
    def linear(weights: Mapping[str, Tensor], name: str, rows: Tensor) -> Tensor:
        return F.linear(rows, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def rotated(self, heads: Tensor) -> Tensor:
        assert self.turned is not None
        first, second = heads.chunk(2, -1)
        return heads * self.turned[0] + torch.cat((-second, first), -1) * self.turned[1]


def serve(name: str) -> None:
    """Answer each line of the input with microseconds of a layer and chunk; the line `floor` with those of the same
    layer in plain torch, where there is one chunk and no split."""
    torch.set_num_threads(1)
    layers = Layers(CASES[name])
    plain = None if layers.case.chunks > 1 or layers.case.split else PlainLayers(layers)
    for each in (layers, plain):
        if each is not None:
            each.round()
    gc.collect()
    gc.freeze()
    gc.disable()
    for line in sys.stdin:
        measured = plain if line.strip() == "floor" else layers
        if measured is None:
            print("{}", flush=True)
            continue
        rounds = [measured.round() for _ in range(FLOOR_ROUNDS if measured is plain else ROUNDS)]
        least = {kind: map(min, zip(*(times[kind] for times in rounds), strict=True)) for kind in rounds[0]}
        print(json.dumps({kind: statistics.fmean(each) / LAYERS / 1e3 for kind, each in least.items()}), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
