"""Runs on the rank of test_attention_kernels.py: models on fakes of every library against models on torch alone."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.enums import AttnBackend

from helixpipe.model import PipelineModel
from helixpipe.model.backends import Kernels
from tests import fakes
from tests.model.chunks import ChunkedRun
from tests.model.common import (
    CHAIN,
    gradients_of,
    make_batch,
    make_config,
    make_options,
    run_parts,
    score,
    set_parallel,
    worst,
)

LIBRARIES = {
    "flash-attn": Kernels("flash-attn", "flash-attn", "torch"),
    "flash-attn-3": Kernels("flash-attn-3", "flash-attn-3", "torch"),
    "apex": Kernels("torch CPU", "torch CPU", "apex"),
    "transformer-engine": Kernels("transformer-engine", "torch math", "transformer-engine", "transformer-engine"),
}
LENGTHS = (5, 4, 3)


def compare(rank: int, world_size: int) -> dict[str, Any]:
    """Largest relative difference of gradients and where, what the libraries were asked, and names in checkpoints."""
    set_parallel(tp=1)
    results: dict[str, Any] = {}
    for style in ("gpt", "llama"):
        on_torch = make(style, Kernels("torch CPU", "torch CPU", "torch"))
        expected = gradients(on_torch)
        results[f"{style}-torch-state"] = state(on_torch)
        for name, kernels in LIBRARIES.items():
            flash, flash_3 = fakes.FlashAttention(), fakes.FlashAttention3()
            engine, apex = fakes.TransformerEngine(), fakes.FusedNorms()
            with fakes.installed(
                flash_attn=flash,
                flash_attn_interface=flash_3,
                **fakes.engine_modules(engine),
                **fakes.apex_modules(apex),
            ):
                model = make(style, kernels)
                found = gradients(model)
            for what, theirs in expected.items():
                results[f"{style}-{name}-{what}"] = worst(found[what], theirs)
            results[f"{style}-{name}-state"] = state(model)
            results[f"{style}-{name}-calls"] = {
                "flash-attn": len(flash.calls),
                "flash-attn-3": len(flash_3.calls),
                "apex": apex.made,
                "transformer-engine": (engine.attended, engine.normed, len(engine.rotated)),
            }[name]
    return results


def make(style: str, kernels: Kernels) -> PipelineModel:
    config = make_config(style, attention_backend=AttnBackend.auto)
    return PipelineModel(config, make_options(style, tied=True), CHAIN, seed=7, kernels=kernels)


def gradients(model: PipelineModel) -> dict[str, dict[str, Any]]:
    """Of a whole sequence, of one in chunks, and of one in chunks whose weight gradients come later."""
    found = {}
    run_parts([(model, CHAIN)], make_batch(), objective=score)
    found["whole"] = gradients_of(model)
    for what, split in (("chunks", False), ("split", True)):
        for parameter in model.parameters():
            parameter.grad = None
        ChunkedRun(model, LENGTHS, split=split).all()
        found[what] = gradients_of(model)
    return found


def state(model: PipelineModel) -> tuple[list[str], list[str], list[bool]]:
    """Names of the state, names in checkpoints, and which weights have partial gradients with sequence parallelism."""
    sequence_parallel = [hasattr(parameter, "sequence_parallel") for parameter in model.parameters()]
    return sorted(model.state_dict()), sorted(model.sharded_state_dict()), sequence_parallel
