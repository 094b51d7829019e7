"""What the costs know of core attention: to all tokens or to a window, with sinks or without."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import ClassVar

from helixpipe.costs.attention_kernels import UNFUSED
from helixpipe.costs.context_parallel import keys_read, on_its_way, ring, saved_of_own_heads, swap
from helixpipe.costs.models import ModelShape
from helixpipe.costs.piece_kind import PieceKind, Tensors
from helixpipe.costs.sizes import TO_HEADS, TO_ROWS, ChunkSizes, OpKernels
from helixpipe.program.stages import NO_ROPE, SINKS, WINDOW, WINDOW_SINKS, role_of


def copies_queries(sizes: ChunkSizes) -> bool:
    """Whether heads that lie group by group are copied to lie side by side: with one group here, or one a head, they
    stay a view."""
    return sizes.tp < sizes.model.groups < sizes.model.heads


def copies_values(sizes: ChunkSizes, rotates: bool) -> bool:
    """Whether queries, keys and values are tensors of their own, and the QKV layer's output goes."""
    model = sizes.model
    return rotates and model.positions == "rope" and not model.qk_norm and not sizes.layout.views_of_qkv


FUSED_SOFTMAX = 4096
"""Keys up to which Megatron-LM's scaled, masked softmax is one kernel."""

_SQUARE_PASSES = {"F": 6, "I": 11}
"""How often unfused attention reads or writes the scores of all heads, in 16 bits: F writes them, softmax reads and
writes, dropout reads and writes, the second product reads. I: a product writes the gradient; dropout, and softmax with
its output, read and write; two products read scores and gradients; masks are half as large."""

_LONG_SOFTMAX_PASSES = 14
"""What they are more where softmax is not one kernel: cast to float32, scaled, masked, normalized and cast back."""

_SQUARE_BYTES = 5
"""Kept of each score by unfused attention: the output of softmax and of dropout in 16 bits, and dropout's mask
(Korthikanti et al., 2022: 5 b a s^2)."""


def _square(sizes: ChunkSizes) -> float:
    """Elements of the scores of all heads: each query with each key so far, those it does not see as well."""
    return sizes.tokens * sizes.chunk.seen * sizes.model.heads / sizes.tp


UNGATED = "ungated attention output"


def _output(sizes: ChunkSizes) -> str:
    """The name of what attention gives, and keeps: another tensor than the layer's, where that is gated."""
    return UNGATED if sizes.gate else "attention output"


def copies_output(sizes: ChunkSizes) -> bool:
    """Whether attention's output is copied: flash-attn's is [b, s]; a ring's is not, and rows for heads are copied
    anyway."""
    layout = sizes.layout
    return layout.fused_kernels and layout.micro_batch_size > 1 and not layout.batch_first and sizes.cp == 1


class Attention(PieceKind):
    name, module, kept_for_attention = "attn", "core_attn", True
    saved_outputs = ("attention output",)
    inputs, in_store = {"q": "query", "k": "key", "v": "value", "into": "hidden"}, ("k", "v")
    textbook: ClassVar[Mapping[str, int]] = {"q": 1, "k": 1, "v": 1}

    def saved(self, sizes: ChunkSizes, inside: Collection[str]) -> Tensors:
        tensors = {_output(sizes): sizes.bytes("attention"), "log-sum": sizes.tokens * sizes.model.heads / sizes.tp * 4}
        if sizes.layout.attention_kernel == UNFUSED:
            tensors["log-sum"] = 0.0
            tensors["scores"] = _SQUARE_BYTES * _square(sizes)
        model, stored = sizes.model, sizes.chunk.stored
        if sizes.layout.swaps:
            gate = {"q": sizes.bytes("query"), UNGATED: sizes.bytes("attention")} if sizes.gate else {}
            return saved_of_own_heads(sizes) | gate
        if sizes.gate and copies_output(sizes):
            tensors["ungated rows"] = sizes.bytes("attention")
        rotates, apart = NO_ROPE not in inside, stored or sizes.layout.halves or "qkv" not in map(role_of, inside)
        if apart or copies_values(sizes, rotates):
            names = ("q",) if stored else ("q", "k", "v")
            return tensors | {name: sizes.bytes(self.inputs[name]) for name in names}
        tensors["qkv"] = sizes.tokens * sizes.mixed * sizes.element  # as the QKV layer leaves them
        new = (model.positions == "rope" and rotates) or model.qk_norm
        if new or sizes.gate or copies_queries(sizes):
            tensors["q"] = sizes.bytes("query")
        if new:
            tensors["k"] = sizes.bytes("key")
        return tensors

    def work(self, kernels: OpKernels) -> None:
        layout = kernels.sizes.layout
        swap(kernels, TO_HEADS)
        if kernels.halved and kernels.sizes.chunk.stored:  # keys of both halves are stored before either attends
            kernels.end_step()
            kernels.end_step()
        if kernels.stepped and layout.rings:
            kernels.end_step()
        if kernels.op != "W":
            self._attend(kernels)
        if not layout.swaps:
            kernels.pause()
        swap(kernels, TO_ROWS)
        # F reads the output and the gate, I a gradient as well, of which it writes two.
        kernels.move_elements({"F": 3, "I": 5, "W": 0}[kernels.op] * kernels.sizes.tokens * kernels.sizes.gate)

    def _attend(self, kernels: OpKernels) -> None:
        sizes, chunk, op = kernels.sizes, kernels.sizes.chunk, kernels.op
        flops = (4 if op == "F" else 10) * chunk.pairs * sizes.layout.micro_batch_size * sizes.query / sizes.cp
        if sizes.layout.attention_kernel == UNFUSED:
            self._attend_unfused(kernels)
        else:
            queries, keys = sizes.tokens * sizes.query, keys_read(sizes)
            # F reads q, k, v and writes the output; I reads those four and a gradient and writes three.
            kernels.add("attention", flops, (2 if op == "F" else 4) * (queries + keys) * sizes.element)
        if chunk.stored:
            self._store(kernels)
        elif kernels.halved:  # those of both halves are copied side by side, and gradients of the first half's summed
            kernels.move_elements((2 if op == "F" else 3) * 2 * sizes.tokens * sizes.kv)
        ring(kernels, flops)

    def _attend_unfused(self, kernels: OpKernels) -> None:
        """Products over the whole square, of which causality leaves half to be used, and passes over it."""
        sizes = kernels.sizes
        square, passes = _square(sizes), _SQUARE_PASSES[kernels.op]
        if sizes.chunk.seen > FUSED_SOFTMAX:
            passes += _LONG_SOFTMAX_PASSES
        kernels.add("matmul", (4 if kernels.op == "F" else 8) * square * sizes.model.channels, 0.0)
        kernels.move_elements(passes * square)

    def _store(self, kernels: OpKernels) -> None:
        """Keys and values go to their buffers; what later chunks have summed up joins a chunk's own gradients, and what
        it finds for earlier ones the sums there (`helixpipe/model/attention/kv_store.py`)."""
        sizes = kernels.sizes
        own, seen = 2 * sizes.tokens * sizes.kv, 2 * keys_read(sizes)
        if kernels.op == "F":
            kernels.move_elements(2 * own)
        else:
            kernels.move_elements(3 * own + sizes.layout.kv_passes * max(seen - own, 0.0))

    def workspace(self, sizes: ChunkSizes, op: str) -> float:
        """Gradients of q, k, v, and a float32 sum; what is on its way between context-parallel ranks."""
        own = 0.0 if op == "F" else sizes.tokens * ((sizes.query + 2 * sizes.kv) * sizes.element + 4 * sizes.query)
        if sizes.layout.attention_kernel == UNFUSED:
            own += 2 * sizes.element * _square(sizes)
        return own + on_its_way(sizes)

    def weights(self, model: ModelShape, tp: int, rows: int) -> int:
        return model.heads // tp if model.sinks else 0


class AttentionWithSinks(Attention):
    """Attention whose softmax has a logit more, which costs and keeps nothing of note."""

    name = SINKS


class AttentionToWindow(Attention):
    """Attention to a window, which keeps what attention to all tokens keeps, and computes and reads less."""

    name = WINDOW

    def work(self, kernels: OpKernels) -> None:
        super().work(kernels.in_window())

    def workspace(self, sizes: ChunkSizes, op: str) -> float:
        return super().workspace(sizes.in_window(), op)


class AttentionToWindowWithSinks(AttentionToWindow):
    name = WINDOW_SINKS
