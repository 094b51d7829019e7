"""Pieces of layers in steps, each of which ends where a collective has been started: what runs beside other work.

A run through the pieces is a generator. It yields after each start of a collective, and in the middle of what computes
longest (after core attention, between the MLP's layers), so that of two runs in turns what one has sent travels during
the other's products. In the backward it pauses at the same places: autograd runs the other half of the tokens there
(`halves.py`), or a forward of another unit takes a step (`collectives.ForwardBeside`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import cast

import torch
from torch import Tensor

from helixpipe.model.chunked_mlp import ChunkedMLP, FirstHalf
from helixpipe.model.collectives import Begun, ForwardBeside, pause
from helixpipe.model.experts.router import Half
from helixpipe.model.half_linear import begin_column, begin_row, column, end_row
from helixpipe.model.layers import Layer
from helixpipe.model.linear import WeightGradients
from helixpipe.model.options import Microbatch, State, UnitContext
from helixpipe.program.stages import EXPERTS, LATENT_QKV, Piece

Steps = Generator[None, None, State]

BeforeDropout = Callable[[Piece, UnitContext, int | None], None]
"""Seeds the draw of a piece's dropout in a half, or for all tokens."""


class SteppedRun:
    """One run of consecutive pieces of layers on a chunk, all of its tokens. beside: takes steps in its backward."""

    def __init__(
        self,
        layers: torch.nn.ModuleDict,
        batch: Microbatch,
        context: UnitContext,
        store: WeightGradients,
        before_dropout: BeforeDropout,
        beside: ForwardBeside | None = None,
    ):
        self._layers, self._batch, self._context = layers, batch, context
        self._store, self._before_dropout, self._beside = store, before_dropout, beside
        self._tensor_parallel: int = cast(Layer, next(iter(layers.values()))).tp_group.size()
        self._beside_linear = beside if self._tensor_parallel > 1 else None

    def through(self, pieces: Sequence[Piece], state: State, which: int | None = None) -> Steps:
        """From what crosses the cut before the pieces to what crosses the one after them. which: of the halves."""
        for piece in pieces:
            layer = cast(Layer, self._layers[str(piece.layer)])
            if piece.role == "norm":
                state = layer.norm(state, self._batch, self._context)
            elif piece.kind == LATENT_QKV:
                state = layer.qkv(state, self._batch, self._context)
            elif piece.role == "qkv":
                begun = begin_column(layer.self_attention.linear_qkv, state[0], self._beside_linear)
                yield from self._started()
                mixed, _ = column(layer.self_attention.linear_qkv, begun, self._store)
                state = (*self._heads(layer, mixed, which), state[1])
            elif piece.role == "attn":
                state = yield from self._attn(piece, layer, state, which)
            elif piece.role == "proj":
                summing = begin_row(layer.self_attention.linear_proj, state[0], self._store, self._beside_linear)
                yield from self._started()
                state = (self._add(piece, layer, end_row(layer.self_attention.linear_proj, summing), state[1], which),)
            elif piece.kind == EXPERTS:
                state = yield from self._experts(piece, layer, state[0], which)
            elif isinstance(layer.mlp, ChunkedMLP):
                state = yield from self._sliced_mlp(piece, layer, state[0], which)
            else:
                state = yield from self._mlp(piece, layer, state[0], which)
        return state

    def _started(self) -> Generator[None, None, None]:
        """Pause for a collective of tensor-parallel ranks, where there are some."""
        if self._tensor_parallel > 1:
            yield

    def _mlp(self, piece: Piece, layer: Layer, hidden: Tensor, which: int | None) -> Steps:
        begun = begin_column(layer.mlp.linear_fc1, layer.pre_mlp_layernorm(hidden), self._beside_linear)
        yield from self._started()
        inner = FirstHalf(layer.mlp, _BegunLinear(layer.mlp.linear_fc1, begun, self._store))(begun.rows)
        if which is not None or layer.pauses:
            inner = pause(inner, self._beside)
            yield
        summing = begin_row(layer.mlp.linear_fc2, inner, self._store, self._beside_linear)
        yield from self._started()
        return (self._add(piece, layer, end_row(layer.mlp.linear_fc2, summing), hidden, which),)

    def _experts(self, piece: Piece, layer: Layer, hidden: Tensor, which: int | None) -> Steps:
        normed = layer.pre_mlp_layernorm(hidden)
        half = self._half(which)
        real = layer.real_rows(normed, self._batch, self._context, half)
        output = yield from layer.mlp.steps(normed, self._context, self._beside, half, real)
        return (self._add(piece, layer, output, hidden, which),)

    def _half(self, which: int | None) -> Half | None:
        """Of the tokens outside attention and MLP; None: all of them."""
        return None

    def _add(
        self, piece: Piece, layer: Layer, output: tuple[Tensor, Tensor | None], residual: Tensor, which: int | None
    ) -> Tensor:
        self._seed(piece, which)
        return layer.add(output, residual, self._context.training)

    def _seed(self, piece: Piece, which: int | None) -> None:
        self._before_dropout(piece, self._context, which)

    # --------------------------------------------------------------------------------------- what halves do otherwise

    def _heads(self, layer: Layer, mixed: Tensor, which: int | None) -> State:
        rows = mixed.size(0)
        return layer.heads(mixed, self._context.offset, self._batch.documents, range(rows), rows)

    def _attn(self, piece: Piece, layer: Layer, state: State, which: int | None) -> Steps:
        self._seed(piece, which)
        query, key, value, residual = state
        attention = yield from layer.attn_in_steps(query, key, value, self._batch, self._context, self._beside)
        return attention, residual

    def _sliced_mlp(self, piece: Piece, layer: Layer, hidden: Tensor, which: int | None) -> Steps:
        yield from ()
        self._seed(piece, which)
        return layer.ffn((hidden,), self._batch, self._context)


class _BegunLinear(torch.nn.Module):
    """Stands for an MLP's first linear layer, whose collective is under way."""

    def __init__(self, layer: torch.nn.Module, begun: Begun, store: WeightGradients):
        super().__init__()
        self._given = layer, begun, store  # in a tuple, so that its parameters are not those of a second module

    def __call__(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        return column(*self._given)
