"""Blocks of keys and values in a step: made for other ranks, sent and taken in, let go of when the graph says so."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from helixpipe.model.attention.kv_blocks import KeyValueBlocks
from helixpipe.model.attention.kv_store import KeyValueStore
from helixpipe.program.transfer import Transfer
from helixpipe.runtime.step import Incoming, Model, PlannedOp, PlanOnRank, Step


class BlockTransfers:
    """Handles the blocks of keys and values that messages carry in a step on one rank; without blocks it is idle."""

    def __init__(self, store: KeyValueStore | KeyValueBlocks, plan: PlanOnRank, step: Step, model: Model):
        self._any_store, self._plan, self._step, self._model = store, plan, step, model

    @property
    def _store(self) -> KeyValueBlocks:
        assert isinstance(self._any_store, KeyValueBlocks)
        return self._any_store

    def expected(self, message: Transfer, incoming: Incoming | None) -> tuple[Sequence[torch.Size], torch.dtype]:
        """Return the shapes and type of a message's tensors, whose hidden states have the type of `incoming`."""
        assert incoming is not None
        of_gradients = message.kind == "kv_gradients"
        return incoming.shapes, self._store.gradient_type(incoming.dtype) if of_gradients else incoming.dtype

    def carried(self, message: Transfer) -> tuple[Sequence[Tensor], None]:
        """Return the tensors that a message takes to another rank; sums of gradients leave the store."""
        get = self._store.get if message.kind == "keys_values" else self._store.take_gradients
        return tuple(tensor for place in self._places(message) for tensor in get(*place) or ()), None

    def take_in(self, message: Transfer, tensors: Sequence[Tensor]) -> None:
        """Store the blocks, or add up the gradients, that a message has brought."""
        put = self._store.put if message.kind == "keys_values" else self._store.add_gradients
        for number, place in enumerate(self._places(message)):
            put(*place, tensors[2 * number], tensors[2 * number + 1])

    def _places(self, message: Transfer) -> list[tuple[int, int, int]]:
        """Return the (microbatch, layer, first row) of the blocks, or sums of gradients, that a message carries."""
        unit = message.unit
        first = self._plan.first_row(unit, self._step.seq_length)
        return [(unit.microbatch, layer, first) for layer in self._layers(unit.stage)]

    def _layers(self, stage: int) -> Sequence[int]:
        """Return the layers whose attention is in a stage."""
        return self._model.attention_layers(self._plan.program.stages[stage].pieces, self._step.training)

    def make(self, op: PlannedOp, outputs: tuple[Tensor, ...]) -> None:
        """Keep the keys and values that an F has computed for the attention of the next stage, which other ranks wait
        for.
        """
        if op.makes_blocks >= 0 and op.row_length is not None:
            unit = self._store.unit(op.op.microbatch, op.offset, op.length, op.row_length)
            unit.keep(op.makes_blocks, outputs[1].detach(), outputs[2].detach())

    def with_others(self, op: PlannedOp, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the gradients of what such an F has computed, plus those that other ranks have summed."""
        if op.makes_blocks < 0:
            return gradients
        sums = self._store.take_gradients(op.op.microbatch, op.makes_blocks, op.offset)
        if sums is None:
            return gradients
        query, key, value, residual = gradients
        return query, key + sums[0].to(key.dtype), value + sums[1].to(value.dtype), residual

    def end(self) -> None:
        """End the step. In an evaluation other ranks may still need the blocks of chunks until then."""
        if self._plan.program.forward_only and isinstance(self._any_store, KeyValueBlocks):
            self._any_store.clear()

    def drop(self, op: PlannedOp) -> None:
        """Free the blocks that no rank needs after the op."""
        for first in op.drops:
            self._store.drop(op.op.microbatch, self._layers(op.op.stage), first)
