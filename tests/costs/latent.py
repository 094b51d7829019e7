"""What torch keeps and counts for pieces of multi-latent attention, beside what helixpipe counts; run on one rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from benchmarks.accounting import SavedBytes
from helixpipe.costs.models import Chunk, Layout, ModelShape
from helixpipe.costs.piece_bytes import PieceBytes
from helixpipe.costs.piece_kinds import flops
from helixpipe.model import GPTOptions, PipelineModel
from helixpipe.model.attention.kv_store import KeyValueStore
from helixpipe.program.stages import Piece, layer_pieces
from tests.costs.layouts import BATCH, LLAMA, TOKENS, VOCABULARY
from tests.costs.pieces import CONTEXT, Compared, batch, counted
from tests.model.common import make_config, set_parallel

SIZES: dict[str, Any] = {
    "kv_rank": 12,
    "q_rank": 20,
    "own_channels": 6,
    "shared_channels": 4,
    "value_channels": 7,
    "qk_norm": True,
}
NORMED = ModelShape("latent", 2, 32, 4, 4, 40, True, VOCABULARY, False, *LLAMA, **SIZES)
BARE = replace(NORMED, q_rank=0, qk_norm=False)


def compare(rank: int, world_size: int) -> list[Compared]:
    """(what, torch's count, ours): bytes that runs of pieces save, in whole sequences and in the later of two chunks;
    weights; floating-point operations of what is no attention."""
    set_parallel()
    return [row for shape in (NORMED, BARE) for row in _compare(shape)]


def _compare(shape: ModelShape) -> list[Compared]:
    layout = Layout(1, False, BATCH, element_bytes=4, fused_kernels=False)
    changes: dict[str, Any] = {"params_dtype": torch.float32, "qk_layernorm": shape.qk_norm}
    config = make_config("latent", num_layers=2, q_lora_rank=shape.q_rank or None, **changes)
    options = GPTOptions(shape.padded_vocab(1), TOKENS, "rope", share_embeddings_and_output_weights=False)
    model, own, found = PipelineModel(config, options, shape.pieces), PieceBytes(shape, layout), list[Compared]()
    data, name = batch(), "normed" if shape.qk_norm else "bare"
    weights = sum(parameter.numel() for parameter in model.parameters())
    found.append((f"{name}: weights", weights, own.parameters(shape.pieces)))
    model.run(shape.pieces, (), data, CONTEXT)  # makes RoPE's table
    known = [*model.parameters(), *model.constants(), data.tokens, data.labels, data.loss_mask]
    layer = layer_pieces(shape.kinds_of(2)[:1], 0)
    for run in (layer, layer[:3], layer[1:3], layer[1:2], layer[2:3], layer[2:4]):
        inputs = _inputs(model, run[0], TOKENS)
        with SavedBytes(known) as account:
            outputs = model.run(run, inputs, data, CONTEXT)
            kept = sum(own.saved(run, Chunk(TOKENS)).values())
            found.append((f"{name}: {run[0]}..{run[-1]}", account.now, kept))
        shapes = model.payload_shapes(run[-1], BATCH, TOKENS)
        assert [tensor.shape for tensor in outputs] == list(shapes)
        following = shape.pieces[shape.pieces.index(run[-1]) + 1]
        sent = sum(each.numel() for each in shapes) * 4
        found.append((f"{name}: after {run[-1]}", sent, own.message(following, Chunk(TOKENS))))
        del outputs
    (qkv,) = run = layer[1:2]
    with counted() as counter:
        outputs = model.run(run, _inputs(model, qkv, TOKENS), data, CONTEXT)
    forward = counter.get_total_flops()
    found.append((f"{name}: forward of {qkv}", forward, flops(shape, layout, qkv.kind, "F", Chunk(TOKENS))))
    with counted() as counter:
        torch.autograd.backward(outputs[:-1], [torch.ones_like(tensor) for tensor in outputs[:-1]])
    found.append((f"{name}: backward", counter.get_total_flops(), flops(shape, layout, qkv.kind, "B", Chunk(TOKENS))))
    return found + _of_chunks(shape, model, own, known, name)


def _of_chunks(
    shape: ModelShape, model: PipelineModel, own: PieceBytes, known: list[torch.Tensor], name: str
) -> list[Compared]:
    store, half, found = KeyValueStore(), TOKENS // 2, list[Compared]()
    layer, data = layer_pieces(shape.kinds_of(2)[:1], 0), batch()
    for chunk in range(2):
        keys_values = store.unit(0, chunk * half, half, TOKENS)
        context = CONTEXT._replace(chunk=chunk, offset=chunk * half, length=half, keys_values=keys_values)
        inputs = _inputs(model, layer[0], half)
        with SavedBytes([*known, *store.tensors()]) as account:
            outputs = model.run(layer[:3], inputs, data, context)
            ours = sum(own.saved(layer[:3], Chunk(half, chunk * half, stored=True)).values())
            if chunk:
                found.append((f"{name}: chunk", account.now, ours))
        del outputs
    found.append((f"{name}: stored", store.bytes_alive(), own.keys_values(layer, TOKENS)))
    return found


def _inputs(model: PipelineModel, first: Piece, tokens: int) -> tuple[torch.Tensor, ...]:
    chain = model.pieces
    shapes = model.payload_shapes(chain[chain.index(first) - 1], BATCH, tokens)
    return tuple(torch.randn(shape, requires_grad=True) for shape in shapes)
