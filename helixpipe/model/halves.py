"""Pieces over two halves of a chunk's tokens, so that one half computes while the other's ranks communicate.

Each half goes through the pieces in steps, which end where a collective of it has been started (`half_linear.py`). The
second half follows the first, and so the steps alternate: what one half has sent travels during the other's
next step. Autograd runs the backward in the reverse of that order, where the same holds. There is one stream of kernels
and one of collectives, as without halves, and nothing depends on time.

A half is a run of tokens; the second one's queries see the keys of the first. With sequence parallelism a rank's rows
outside attention and MLP are its part of the first half's and, below them, its part of the second's. So the tokens lie
in another order than where ranks share the whole chunk: embedding and head, which take no half, are given tokens and
targets in that order (`gathered_order`), and for all else between two attentions no order matters.

Context-parallel ranks that swap rows for heads share each half as they do a whole chunk, so that what comes of a swap
are the tokens of a half in their order. Attention is cut likewise; of a chunk of a sequence once the keys of both
halves are stored. What cannot be cut (a ring, keys and values in blocks, an MLP over slices) is done for both halves at
once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from helixpipe.common.alternate import alternate
from helixpipe.costs.halves import steps_behind
from helixpipe.model.attention.kv_store import Join, Stored
from helixpipe.model.experts.router import Half
from helixpipe.model.halving import Halving
from helixpipe.model.layers import Layer
from helixpipe.model.linear import WeightGradients
from helixpipe.model.options import Microbatch, State, UnitContext
from helixpipe.model.steps import BeforeDropout, SteppedRun, Steps
from helixpipe.program.stages import Piece

AtOnce = Callable[[State], tuple[State, State]]
"""From what both halves bring, joined, to what each of them takes."""


@dataclass
class _Meeting:
    """The place where both halves bring their share to a piece that is done for both, and take theirs from it."""

    brought: list[State] = field(default_factory=list)
    taken: tuple[State, State] | None = None


class HalvedRun(SteppedRun):
    """One run of consecutive pieces of layers on a chunk, over its halves."""

    def __init__(
        self,
        layers: torch.nn.ModuleDict,
        batch: Microbatch,
        context: UnitContext,
        halving: Halving,
        store: WeightGradients,
        before_dropout: BeforeDropout,
    ):
        super().__init__(layers, batch, context, store, before_dropout)
        self._halving, self._behind = halving, steps_behind(self._tensor_parallel)
        self._meetings: dict[tuple[Piece, str], _Meeting] = {}
        self._first_keys: dict[Piece, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
        self._wholes: list[tuple[Tensor, Tensor, Tensor]] = []

    def run(self, pieces: Sequence[Piece], inputs: State) -> State:
        """From what crosses the cut before the pieces to what crosses the one after them, of the whole chunk."""
        passing = pieces[0].role in ("qkv", "attn") and all(piece.role != "proj" for piece in pieces)
        halves = [self._split(tensor) for tensor in (inputs[:-1] if passing else inputs)]
        if passing:  # the residual, which may have no memory any more
            halves.append((inputs[-1:], inputs[-1:]))
        first, second = (tuple(tensor for pair in halves for tensor in pair[which]) for which in (0, 1))
        results = alternate(self.through(pieces, first, 0), self.through(pieces, second, 1), self._behind)
        return tuple(self._join(*pair) for pair in zip(*results, strict=True))

    # ------------------------------------------------------------------------------------------------------- the steps

    def _heads(self, layer: Layer, mixed: Tensor, which: int | None) -> State:
        assert which is not None
        context, halving = self._context, self._halving
        query, key, value = layer.heads(
            mixed, context.offset, self._batch.documents, halving.half(which), halving.tokens
        )
        return query, key, value

    def _half(self, which: int | None) -> Half | None:
        return None if which is None else Half(which, sum(self._halving.rows))

    def _sliced_mlp(self, piece: Piece, layer: Layer, hidden: Tensor, which: int | None) -> Steps:
        assert which is not None
        return (yield from self._together(piece, "", (hidden,), which, self._whole_mlp(piece, layer)))

    def _attn(self, piece: Piece, layer: Layer, state: State, which: int | None) -> Steps:
        assert which is not None
        query, key, value, residual = state
        if not layer.attends_by_rows(self._context.keys_values):
            at_once = self._whole_attention(piece, layer)
            (attention,) = yield from self._together(piece, "", (query, key, value), which, at_once)
            return attention, residual
        context, half, ranks = self._context, self._halving.half(which), layer.swapping_ranks
        stays = layer.config.attention_output_gate or ranks == 1  # else what is exchanged is copied in any case
        query, gate = layer.without_gate(query.contiguous() if stays else query)
        query, key, value = yield from layer.to_own_heads(query, key, value)
        if context.keys_values is None:
            key, value = self._keys_so_far(piece, key, value, which, self._halving.tokens * ranks)
        else:
            at_once = self._all_keys(layer)
            key, value = yield from self._together(piece, "keys", (key, value), which, at_once)
        self._seed(piece, which)
        attention = layer.attend(
            query.contiguous() if ranks > 1 else query,
            key,
            value,
            training=context.training,
            offset=context.offset + half.start * ranks,
            end=context.offset + (half.stop if context.keys_values is None else self._halving.tokens) * ranks,
            chunked=context.keys_values is not None,
            documents=self._batch.documents,
        )
        return layer.with_gate((yield from layer.to_own_rows(attention)), gate), residual

    def _keys_so_far(self, piece: Piece, key: Tensor, value: Tensor, which: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the first half, or of both; the first half does not wait for the second one's.
        Both lie in tensors of all tokens, of which there are so many, so that no row is kept twice."""
        given = self._whole_of(key, which), self._whole_of(value, which)
        if given[0] is not None and given[1] is not None:
            return (given[0], given[1]) if which else (key, value)
        if which == 0:
            keys, values = (each.new_empty((tokens, *each.shape[1:])) for each in (key, value))
            end = key.size(0)
            stored: tuple[Tensor, Tensor] = Stored.apply(key, value, *_copied((keys[:end], values[:end]), (key, value)))
            self._first_keys[piece] = *stored, keys, values
            return stored
        first_key, first_value, keys, values = self._first_keys.pop(piece)
        start = first_key.size(0)
        _copied((keys[start:], values[start:]), (key, value))
        joined: tuple[Tensor, Tensor] = Join.apply(first_key, first_value, key, value, keys, values)
        return joined

    def _together(self, piece: Piece, what: str, brought: State, which: int, work: AtOnce) -> Steps:
        """Give what `work` makes for this half from what both have brought, joined; the first half does it."""
        meeting = self._meetings.setdefault((piece, what), _Meeting())
        meeting.brought.append(brought)
        yield  # in this step of the first half the second one gets here, or in the next
        yield
        if which == 0:
            meeting.taken = work(tuple(self._join(*pair) for pair in zip(*meeting.brought, strict=True)))
            meeting.brought.clear()
            return meeting.taken[0]
        del self._meetings[piece, what]
        assert meeting.taken is not None
        return meeting.taken[1]

    # ------------------------------------------------------------------------------------------- pieces of both halves

    def _all_keys(self, layer: Layer) -> AtOnce:
        def work(brought: State) -> tuple[State, State]:
            (key, value), context = brought, self._context
            every = layer.all_keys(key, value, context.offset, context.keys_values, self._batch.documents)
            return every, every

        return work

    def _whole_attention(self, piece: Piece, layer: Layer) -> AtOnce:
        def work(brought: State) -> tuple[State, State]:
            self._seed(piece, 0)
            in_place_of_residual = brought[0]  # which stays in halves
            attention, _ = layer.attn((*brought, in_place_of_residual), self._batch, self._context)
            return self._split(attention)

        return work

    def _whole_mlp(self, piece: Piece, layer: Layer) -> AtOnce:
        def work(brought: State) -> tuple[State, State]:
            self._seed(piece, 0)
            return self._split(layer.ffn(brought, self._batch, self._context)[0])

        return work

    # -------------------------------------------------------------------------------------------------------- details

    def _split(self, whole: Tensor) -> tuple[State, State]:
        """A tensor of all tokens, or of this rank's rows of them."""
        rows = list(self._halving.rows)
        if whole.size(0) == self._halving.tokens:
            rows = [each * self._halving.ranks for each in rows]
        # Without a graph torch takes views of what requires a gradient to have one.
        first, second = (whole if torch.is_grad_enabled() else whole.detach()).split(rows)
        self._wholes.append((first, second, whole))
        return (first,), (second,)

    def _join(self, first: Tensor, second: Tensor) -> Tensor:
        """One tensor again: the very one, if it has only passed by."""
        if first is second:
            return first
        whole = self._whole_of(first, 0)
        return whole if whole is not None and self._whole_of(second, 1) is whole else torch.cat((first, second))

    def _whole_of(self, half: Tensor, which: int) -> Tensor | None:
        """Return what a half was split from."""
        return next((whole for *halves, whole in self._wholes if halves[which] is half), None)


def _copied(rows: tuple[Tensor, Tensor], tensors: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    for target, tensor in zip(rows, tensors, strict=True):
        target.copy_(tensor.detach())
    return rows
