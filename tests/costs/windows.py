"""What torch keeps for pieces of layers that are unlike, beside what helixpipe counts; runs inside a rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from benchmarks.accounting import SavedBytes
from helixpipe.costs.models import Chunk, Layout, ModelShape
from helixpipe.costs.piece_bytes import PieceBytes
from helixpipe.model import GPTOptions, PipelineModel
from helixpipe.model.attention.kv_store import KeyValueStore
from helixpipe.program.stages import Piece, layer_pieces
from tests.costs.layouts import BATCH, LLAMA, TOKENS, VOCABULARY
from tests.costs.pieces import CONTEXT, Compared, batch
from tests.model.common import make_config, set_parallel

PATTERN = {"window": 4, "windowed": (1, 0), "unrotated": (0, 1, 0)}
GATED = {"output_gate": True, "sinks": True}
MIXED = ModelShape("mixed", 3, 32, 4, 2, 40, True, VOCABULARY, False, *LLAMA, **PATTERN)


def saved(rank: int, world_size: int) -> list[Compared]:
    """(what, torch's count, ours) of the bytes that runs of pieces save, in whole sequences and in the later of two
    chunks."""
    set_parallel()
    return [
        *saved_by("mixed", MIXED),
        *saved_by("gated", replace(MIXED, **GATED)),
        *saved_by("gated", replace(MIXED, **GATED, qk_norm=True), qk_layernorm=True),
    ]


def saved_by(style: str, shape: ModelShape, **changes: Any) -> list[Compared]:
    layout = Layout(1, False, BATCH, element_bytes=4, fused_kernels=False)
    config = make_config(style, num_layers=3, params_dtype=torch.float32, **changes)
    options = GPTOptions(shape.padded_vocab(1), TOKENS, position_embedding_type="rope")
    model, own, found = PipelineModel(config, options, shape.pieces), PieceBytes(shape, layout), list[Compared]()
    data = batch()
    in_layers = [piece for piece in shape.pieces if piece.layer >= 0]
    assert sum(each.numel() for each in model.decoder.layers.parameters()) == own.parameters(in_layers)
    model.run(shape.pieces, (), data, CONTEXT)  # makes RoPE's table
    tables = model.constants()
    known = [*model.parameters(), *tables, data.tokens, data.labels, data.loss_mask]
    layers = [layer_pieces((kinds,), number) for number, kinds in enumerate(shape.kinds_of(3))]
    for run in [run for layer in layers for run in (layer, layer[:3], layer[1:3], layer[2:3])]:
        inputs = _inputs(model, shape, run[0], TOKENS)
        with SavedBytes(known) as account:
            outputs = model.run(run, inputs, data, CONTEXT)
            found.append((f"{run[0]}..{run[-1]}", account.now, sum(own.saved(run, Chunk(TOKENS)).values())))
        del outputs
    store, half = KeyValueStore(), TOKENS // 2
    for chunk in range(2):
        context = CONTEXT._replace(
            chunk=chunk, offset=chunk * half, length=half, keys_values=store.unit(0, chunk * half, half, TOKENS)
        )
        for layer in layers:
            inputs = _inputs(model, shape, layer[0], half)
            with SavedBytes([*known, *store.tensors()]) as account:
                outputs = model.run(layer[:3], inputs, data, context)
                ours = sum(own.saved(layer[:3], Chunk(half, chunk * half, stored=True)).values())
                if chunk:
                    found.append((f"chunk {layer[0]}", account.now, ours))
            del outputs
    return found


def _inputs(model: PipelineModel, shape: ModelShape, first: Piece, tokens: int) -> tuple[torch.Tensor, ...]:
    chain = shape.pieces
    shapes = model.payload_shapes(chain[chain.index(first) - 1], BATCH, tokens)
    return tuple(torch.randn(shape, requires_grad=True) for shape in shapes)
