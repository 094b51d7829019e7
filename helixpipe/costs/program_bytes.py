"""What a program keeps and sends in bytes, from the bytes of a model's pieces: the memory half of `Costs`. No torch."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

from helixpipe.costs.by_hand import chunk_share
from helixpipe.costs.models import Chunk
from helixpipe.costs.piece_bytes import PieceBytes
from helixpipe.costs.piece_work import GRADIENT_BYTES
from helixpipe.program.message import Message
from helixpipe.program.program import Op, Program


class ProgramBytes:
    """Base of costs that know a model; figures are those of one tensor-parallel rank.

    bytes: of its pieces. seq_length: tokens of a sequence, which the program's chunks share. fp32_kv_gradients: see
    `ModelCosts`.
    """

    memory_unit: ClassVar[str] = "bytes"

    @property
    def bytes(self) -> PieceBytes:
        raise NotImplementedError

    def _sequence(self) -> tuple[int, bool]:
        """(tokens of a sequence, whether gradients of keys and values are summed in float32)."""
        raise NotImplementedError

    def stash(self, program: Program, op: Op) -> float:
        stage, chunk = program.stages[op.stage], self.chunk(program, op.chunk)
        key = (stage.pieces, stage.recompute, chunk, op.kind)
        if key not in self._stashes:
            self._stashes[key] = self.bytes.segments_stash(stage.segments, chunk, op.kind)
        return self._stashes[key]

    def deferred_stash(self, program: Program, op: Op) -> float:
        return self.bytes.deferred_stash(program.stages[op.stage].pieces, self.chunk(program, op.chunk))

    def keys_values(self, program: Program, stage: int) -> tuple[float, float]:
        if program.num_chunks == 1:
            return 0.0, 0.0
        pieces, last = program.stages[stage].pieces, self.chunk(program, program.num_chunks - 1)
        seq_length, in_float32 = self._sequence()
        gradients = self.bytes.key_value_gradients(pieces, last.earlier, in_float32)
        return self.bytes.keys_values(pieces, seq_length), gradients

    def copy_memory(self, program: Program, stage: int) -> tuple[float, float]:
        placed = program.stages[stage]
        parameters = self.bytes.parameters(placed.pieces)
        gradient = program.ring.gradient_bytes if placed.placement == "ring" else GRADIENT_BYTES
        return parameters * self.bytes.layout.element_bytes, parameters * gradient

    def chunk(self, program: Program, number: int) -> Chunk:
        """A chunk's place in the sequence."""
        seq_length, _ = self._sequence()
        if program.num_chunks == 1:
            return Chunk(seq_length)
        shares = [chunk_share(program, chunk) for chunk in range(program.num_chunks)]
        earlier, tokens = sum(shares[:number]) * seq_length, shares[number] * seq_length
        return Chunk(tokens, earlier, sum(shares[number + 1 :]) * seq_length)

    def message_bytes(self, program: Program, message: Message) -> float:
        """What crosses the cut, or its gradient, in the same shapes; or a stage's weights, or their gradients."""
        if message.ships:
            weights, gradients = self.copy_memory(program, message.producer.stage)
            return weights if message.kind == "weights" else gradients
        stage = message.consumer.stage if message.kind == "activation" else message.producer.stage
        first, chunk = program.stages[stage].pieces[0], self.chunk(program, message.producer.chunk)
        key = (first.kind, chunk)
        if key not in self._message_sizes:
            self._message_sizes[key] = self.bytes.message(first, chunk)
        return self._message_sizes[key]

    @cached_property
    def _message_sizes(self) -> dict[tuple[str, Chunk], float]:
        return {}  # schedules that search ask again and again

    @cached_property
    def _stashes(self) -> dict[tuple[Any, ...], float]:
        return {}
