"""What test_compiled.py runs in a process of its own, where megatron-core's functions are compiled as on a GPU.

They are imported before `helixpipe.model`, which would leave them as they are on a machine without CUDA. Dropout goes
through the backend that is the argument, the gated activation only through what decides when to compile (dynamo), which
is quicker.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from functools import partial
from typing import Any
from unittest import mock

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    with mock.patch.object(torch, "compile", partial(torch.compile, backend=sys.argv[1])):
        importlib.import_module("megatron.core.fusions.fused_bias_dropout")
    with mock.patch.object(torch, "compile", partial(torch.compile, backend="eager")):
        gated = importlib.import_module("megatron.core.fusions.fused_bias_swiglu")

import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters

from helixpipe.model import PipelineModel, UnitContext
from helixpipe.model.device import _compile_every_variant
from helixpipe.program.stages import Piece
from tests.model.common import BATCH, make_batch, make_config, make_options, set_parallel

LENGTHS = (5, 4, 3, 7, 12)
"""Of chunks: the second is another than the first, and those after it need nothing new."""


def main() -> None:
    torch.set_num_threads(1)
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch does not say that it exports it
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    set_parallel(tp=1)
    fused = {"bias_dropout_fusion": True, "bias_activation_fusion": True}
    config = make_config("llama", hidden_dropout=0.3, params_dtype=torch.float32, **fused)
    model = PipelineModel(config, make_options("llama", True), (Piece("mlp", 0),), seed=7)
    compiled, differences, kept = [], [], []
    for length in LENGTHS:
        found = forward_and_recompute(model, length)
        differences.append(found[0])
        kept.append(found[1])
        compiled.append(counters["stats"]["unique_graphs"])
    before = counters["stats"]["unique_graphs"]
    _compile_every_variant()
    asked = variants()
    print(
        json.dumps(
            {
                "differences": differences,
                "kept": kept,
                "compiled": compiled,
                "asked": asked,
                "variants": counters["stats"]["unique_graphs"] - before,
            }
        )
    )
    dist.destroy_process_group()


def forward_and_recompute(model: PipelineModel, length: int) -> tuple[list[float], float]:
    """(largest difference of an R from its F, in two microbatches, and between these; share of what dropout kept)."""
    generator = torch.Generator().manual_seed(length)
    hidden = torch.randn(length, BATCH, 32, generator=generator)
    outputs: list[Tensor] = []
    for microbatch in range(2):
        context = UnitContext(step=1, microbatch=microbatch, length=length)
        leaf = hidden.clone().requires_grad_()
        with torch.no_grad():
            (forward,) = run(model, leaf, context)
        torch.rand(17)  # what the generator is used for in between does not matter
        (again,) = run(model, leaf, context)
        again.sum().backward()
        assert leaf.grad is not None and leaf.grad.isfinite().all()
        outputs += [forward, again.detach()]
    first, first_again, second, second_again = outputs
    pairs = ((first, first_again), (second, second_again), (first, second))
    return [(a - b).abs().max().item() for a, b in pairs], ((first - hidden) != 0).double().mean().item()


def run(model: PipelineModel, hidden: Tensor, context: UnitContext) -> tuple[Tensor, ...]:
    return model.run((Piece("mlp", 0),), (hidden,), make_batch(), context)


def variants() -> int:
    """Ask for variants of a function that it has not had yet; how many."""
    types: tuple[Any, ...] = (torch.float64, torch.bfloat16, torch.float16)
    cases = [(dtype, rank, needs) for dtype in types for rank in (1, 2, 3) for needs in (False, True)]
    for dtype, rank, needs in cases:
        gated.swiglu(torch.ones((2,) * (rank - 1) + (6,), dtype=dtype, requires_grad=needs))
    return len(cases)


if __name__ == "__main__":
    main()
