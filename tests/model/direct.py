"""Pieces that compute without calling modules, beside the same model whose modules are called; runs inside a rank."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import torch

from helixpipe.model import PipelineModel, direct, layers_of
from helixpipe.program.program import Unit
from helixpipe.program.stages import model_pieces
from tests.model.common import CONTEXT, make_batch, make_config, make_options, set_parallel

CASES: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "gpt": ("gpt", True, {}),
    "gpt, fused": ("gpt", False, {"bias_activation_fusion": True}),
    "gpt, bfloat16": ("gpt", False, {"params_dtype": torch.bfloat16}),
    "gpt, centered": ("gpt", False, {"layernorm_zero_centered_gamma": True}),
    "llama": ("llama", False, {"params_dtype": torch.float32}),
    "llama, fused": ("llama", True, {"bias_activation_fusion": True}),
    "llama, biases": ("llama", False, {"add_bias_linear": True, "qk_layernorm": True}),
    "llama, fused biases": ("llama", False, {"add_bias_linear": True, "bias_activation_fusion": True}),
    "llama, clamped": ("llama", False, {"activation_func_clamp_value": 0.1, "glu_linear_offset": 1.0}),
    "llama, offset": ("llama", False, {"glu_linear_offset": 1.0}),
    "windows": ("mixed", False, {}),
}
"""By name (style, whether the embedding is tied, changes)."""


def compare(rank: int, world_size: int) -> dict[tuple[str, bool], tuple[list[str], Counter[str]]]:
    """For each case, with and without weight gradients put off: what differs in any bit from the model whose modules
    have hooks; and what of a layer's modules is called."""
    set_parallel()
    results = {}
    for case, (style, tied, changes) in CASES.items():
        for deferred in (False, True):
            ours, theirs = (_model(style, tied, changes, deferred) for _ in range(2))
            theirs.load_state_dict(ours.state_dict())
            called = _watch(theirs)
            expected, found = _run(theirs, deferred), _run(ours, deferred)
            wrong = [name for name in expected if not torch.equal(found[name], expected[name])]
            results[case, deferred] = wrong + sorted(expected.keys() ^ found.keys()), called
    return results


def _model(style: str, tied: bool, changes: dict[str, Any], deferred: bool) -> PipelineModel:
    config = make_config(style, **changes)
    model = PipelineModel(config, make_options(style, tied), model_pieces(layers_of(config)))
    if deferred:
        model.weight_gradients()
    return model


def _watch(model: PipelineModel) -> Counter[str]:
    """Count calls of modules in layers."""
    called = Counter[str]()
    for name, module in model.decoder.layers.named_modules():
        if not list(module.children()) or name.endswith("mlp"):
            module.register_forward_hook(lambda *_, name=name: called.update([name]))
    return called


def _run(model: PipelineModel, deferred: bool) -> dict[str, torch.Tensor]:
    batch, unit = make_batch(), Unit(0, 0)
    (loss,) = model.run(model.pieces, (), batch, CONTEXT)
    if deferred:
        with model.weight_gradients().keep(unit):
            loss.backward()
        model.weight_gradients().compute(unit)
    else:
        loss.backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {"loss": loss.detach(), **gradients}


def products(rank: int, world_size: int) -> dict[str, tuple[str, bool]]:
    """(autograd's node of a linear layer's product, whether that keeps the weight's memory) as made, of a weight that
    moves between ops, with weight gradients put off, and of a layer that calls a function of its own."""
    set_parallel()
    results = {}
    for case in ("as made", "moves", "put off", "its own"):
        model = _model("llama", False, {}, deferred=case == "put off")
        module: Any = next(iter(model.decoder.layers.values())).self_attention.linear_qkv
        if case == "moves":
            module.weight.whole_shape = module.weight.shape
        if case == "its own":
            module._forward_impl = lambda input, weight, **_: 2 * (input @ weight.t())
        rows = torch.randn(3, 2, module.weight.size(1), dtype=module.weight.dtype, requires_grad=True)
        storage = module.weight.untyped_storage()._cdata
        before = torch._C._storage_Use_Count(storage)
        output, _ = direct.column(module, rows)
        results[case] = output.grad_fn.name(), torch._C._storage_Use_Count(storage) > before
    return results


def watched(rank: int, world_size: int) -> dict[str, list[str]]:
    """The kinds of modules of an MLP that a hook of all modules sees, and whether a forward that somebody has put into
    a class runs."""
    set_parallel()
    model, seen = _model("llama", False, {}, deferred=False), list[str]()
    mlp, normed = (
        next(iter(model.decoder.layers.values())).mlp,
        torch.randn(3, 2, model.config.hidden_size, dtype=torch.float64),
    )
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    direct.mlp(mlp, normed)
    handle.remove()
    with mock.patch.object(type(mlp), "forward", lambda *_: ("replaced", None)):
        replaced = direct.mlp(mlp, normed)
    return {"seen": seen, "replaced": [str(replaced[0])]}
