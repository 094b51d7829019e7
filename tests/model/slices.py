"""Runs on the ranks of test_chunked_mlp.py: models whose MLP runs over slices against models whose MLP is whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.activations import squared_relu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import layers, mappings

from helixpipe.model import PipelineModel
from helixpipe.program.stages import Piece
from tests.model.common import (
    BATCH,
    CHAIN,
    CONTEXT,
    SEQUENCE,
    gradients_of,
    make_batch,
    make_config,
    make_options,
    run_parts,
    score,
    set_parallel,
    worst,
)
from tests.model.equality import expected_of, whole
from tests.model.state import entries

SIZES = {1: (1, 4, 5, 12, 50), 2: (1, 5)}
"""Tokens of a slice, by the number of tensor-parallel ranks. Some divide the sequence's 12, one does not, and one is
more."""

STYLES = ("gpt", "llama")
PARALLEL = {"tp1": (1, False), "tp2": (2, False), "tp2-sp": (2, True)}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gated-gelu-with-bias": ("gpt", {"gated_linear_unit": True, "ffn_hidden_size": 40}),
    "squared-relu": ("gpt", {"activation_func": squared_relu}),
    "squared-relu-without-bias": ("llama", {"activation_func": squared_relu, "gated_linear_unit": False}),
    "dropout": ("gpt", {"hidden_dropout": 0.3}),
}

COLLECTIVES = {
    "all_gather_into_tensor": "dist_all_gather_func",
    "reduce_scatter_tensor": "dist_reduce_scatter_func",
    "all_reduce": "",
}
"""torch's names, and those under which megatron-core has them."""


def make_model(style: str, size: int, tp: int = 1, tied: bool = True, **changes: Any) -> PipelineModel:
    options = replace(make_options(style, tied), chunk_size=size)
    return PipelineModel(make_config(style, tp, **changes), options, CHAIN, seed=7)


def compare(rank: int, world_size: int) -> dict[str, Any]:
    """Results of every check, by name; errors of gradients are (largest relative difference, parameter)."""
    results: dict[str, Any] = {}
    set_parallel(tp=1)
    expected = {style: expected_of(style, tied=True) for style in STYLES}
    for layout, (tp, split) in PARALLEL.items():
        set_parallel(tp=tp)
        changes = {"tp": tp, "sequence_parallel": split}
        for style in STYLES:
            for size in SIZES[tp]:
                found = gradients(make_model(style, size, **changes), rank if tp > 1 else 0)
                results[f"{layout}-{style}-{size}"] = worst(found, expected[style][1])
            results[f"{layout}-{style}-split"] = worst(split_backward(style, rank, changes), expected[style][1])
            results[f"{layout}-{style}-collectives"] = collectives(style, changes)
        for name, (style, more) in VARIANTS.items():
            ours, theirs = (gradients(make_model(style, size, **changes, **more), rank) for size in (5, 0))
            results[f"{layout}-{name}"] = worst(ours, theirs)
    buffers = get_global_memory_buffer().buffer
    results["buffers"] = sorted((name, buffer.numel()) for (name, _), buffer in buffers.items())
    set_parallel(tp=1)
    for style in STYLES:
        results[f"{style}-entries"] = entries(make_model(style, 5)) ^ entries(make_model(style, 0))
        results[f"{style}-evaluation"] = evaluation(style)
        results[f"{style}-bf16"] = {size: half_precision(style, size) for size in (0, 1, 5)}
    return results


def gradients(model: PipelineModel, rank: int) -> dict[str, torch.Tensor]:
    """Of every parameter, whole; each piece of the model is a graph of its own."""
    parts = [(model, (piece,)) for piece in CHAIN]
    run_parts(parts, make_batch(), objective=lambda logits: score(logits, rank))
    return joined(model)


def joined(model: PipelineModel) -> dict[str, torch.Tensor]:
    return gradients_of(model) if model.tp_group.size() == 1 else whole(model, gradients_of(model), partial_sums=True)


def split_backward(style: str, rank: int, changes: dict[str, Any]) -> dict[str, torch.Tensor]:
    """As op I and, after it, op W do it. Nothing of the MLPs waits in between."""
    model = make_model(style, 5, **changes)
    store = model.weight_gradients()
    with store.keep("unit"):
        logits = model.logits(*model.run(CHAIN[:-1], (), make_batch(), CONTEXT))
        score(logits, rank if model.tp_group.size() > 1 else 0).backward()
    mlps = {parameter for name, parameter in model.named_parameters() if ".mlp." in name}
    assert all(parameter.grad is not None for parameter in mlps)
    assert not any(put_off.weight in mlps for put_off in store._waiting["unit"])
    store.compute("unit")
    return joined(model)


def collectives(style: str, changes: dict[str, Any]) -> dict[int, list[list[str]]]:
    """For each size of slices, what tensor-parallel ranks exchange in an MLP's forward and in its backward."""
    found = {}
    for size in (0, 1, 5):
        model = make_model(style, size, **changes)
        rows = SEQUENCE // 2 if changes["sequence_parallel"] else SEQUENCE
        hidden = torch.ones(rows, BATCH, 32, dtype=torch.float64, requires_grad=True)
        with counted() as forward:
            (output,) = model.run((Piece("mlp", 0),), (hidden,), make_batch(), CONTEXT)
        with counted() as backward:
            output.sum().backward()
        found[size] = [forward, backward]
    return found


@contextmanager
def counted() -> Iterator[list[str]]:
    """Names of torch's collectives of tensors, as they are called here or by megatron-core's own functions."""
    calls: list[str] = []
    patches = ExitStack()
    for name, alias in COLLECTIVES.items():
        original = getattr(dist, name)

        def call(*args: Any, _name: str = name, _original: Any = original, **arguments: Any) -> Any:
            calls.append(_name)
            return _original(*args, **arguments)

        patches.enter_context(mock.patch.object(dist, name, call))
        for module in (layers, mappings) if alias else ():
            patches.enter_context(mock.patch.object(module, alias, call))
    with patches:
        yield calls


def evaluation(style: str) -> tuple[float, bool]:
    """How much losses differ, and whether a graph was kept."""
    with torch.no_grad():
        losses = [make_model(style, size).run(CHAIN, (), make_batch(), CONTEXT)[0] for size in (5, 0)]
    return abs(losses[0].item() / losses[1].item() - 1), losses[0].requires_grad


def half_precision(style: str, size: int) -> tuple[float, str]:
    """In bfloat16, with the gradients summed in DistributedDataParallel's float32 buffers, against float64: the largest
    difference of the MLPs' gradients relative to the parameter's largest, and the parameter."""
    reference = make_model(style, 0)
    model = make_model(style, size, params_dtype=torch.bfloat16, bf16=True)
    with torch.no_grad():
        for ours, theirs in zip(reference.parameters(), model.parameters(), strict=True):
            ours.copy_(theirs)
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    ddp = DistributedDataParallel(model.config, config, model, pg_collection=groups)
    ddp.zero_grad_buffer()
    generator = torch.Generator().manual_seed(2)
    hidden, gradient = torch.randn(2, SEQUENCE, BATCH, 32, generator=generator).bfloat16().unbind()
    for each in (model, reference):
        dtype = each.payload_dtype
        inputs = hidden.detach().to(dtype).requires_grad_()
        (output,) = each.run((Piece("mlp", 0),), (inputs,), make_batch(), CONTEXT)
        output.backward(gradient.to(dtype))
    expected = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    found = {name: p.main_grad.double() for name, p in model.named_parameters() if name in expected}
    assert any("linear_fc2.weight" in name for name in found)
    return worst(found, expected)
