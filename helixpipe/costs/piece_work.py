"""What a piece computes and moves: FLOPs, bytes of device memory, bytes between tensor-parallel ranks. No torch here.

Figures are those of one tensor-parallel rank and one chunk, for F (forward, also a recomputation R), I (gradient of the
input) and W (gradient of the weights); B is I and W. They follow the code of `helixpipe.model`, kernel by kernel:

- a linear layer of N tokens, i to o: 2 N i o FLOPs in each of F, I and W;
- causal attention of n tokens after c earlier ones: 4 n (c + n/2) h FLOPs in F (two products over half the square), and
  10 n (c + n/2) h in I, because flash attention computes the scores again (8 when only the mathematics is counted);
- all else (norms, RoPE, activation functions, residual sums, cross entropy, embedding) moves bytes; its arithmetic is
  not counted, as in torch's FLOP counter.

An MLP over slices multiplies slice by slice; its I computes the first linear layer again, and the weights' gradients,
so that it has no W.

Gradients of norms and biases are part of I. Weight gradients are added to float32 sums.
"""

from __future__ import annotations

from typing import NamedTuple

from helixpipe.costs.models import Chunk, Layout, ModelShape

GRADIENT_BYTES = 4
"""A weight's gradient is summed in float32."""


class Kernel(NamedTuple):
    """Work of one kind: `matmul`, `attention`, `memory`, or `network` between tensor-parallel ranks. bytes: of device
    memory read and written; for `network`, those that one rank sends."""

    kind: str
    flops: float
    bytes: float


def work(model: ModelShape, layout: Layout, piece: str, op: str, chunk: Chunk) -> list[Kernel]:
    """The kernels of one piece for an op of kind F, I, W, B or R (as F) on one chunk of a microbatch."""
    if op == "B":
        return work(model, layout, piece, "I", chunk) + work(model, layout, piece, "W", chunk)
    kernels = _Kernels(model, layout, chunk, "F" if op == "R" else op)
    getattr(kernels, piece)()
    return kernels.found


def flops(model: ModelShape, layout: Layout, piece: str, op: str, chunk: Chunk) -> float:
    """Floating-point operations, as executed, of one piece on one tensor-parallel rank."""
    return sum(kernel.flops for kernel in work(model, layout, piece, op, chunk))


def model_flops(model: ModelShape, layout: Layout, piece: str, chunk: Chunk) -> float:
    """Those that the mathematics needs, forward and backward: what utilization (MFU) counts. Causal attention counts
    the half of the square that is computed; recomputation, flash attention's too, does not count."""
    return 3 * flops(model, layout, piece, "F", chunk)


class _Kernels:
    """Collects the kernels of one (op, chunk); one method a piece. Elements are counted, then weighed."""

    def __init__(self, model: ModelShape, layout: Layout, chunk: Chunk, op: str):
        self.model, self.layout, self.chunk, self.op = model, layout, chunk, op
        self.found: list[Kernel] = []
        self.tp = layout.tensor_parallel
        self.element = layout.element_bytes
        self.tokens = chunk.tokens * layout.micro_batch_size
        # hidden state on this rank; sequence parallelism splits it outside attention and MLP
        self.hidden = self.tokens * model.hidden / (self.tp if layout.sequence_parallel else 1)

    def embed(self) -> None:
        model = self.model
        learned = model.positions == "learned_absolute"
        rows = model.padded_vocab(self.tp) / self.tp
        whole = self.tokens * model.hidden
        if self.op == "F":
            self._memory(2 * whole + (3 * whole if learned else 0))
        elif self.op == "I":  # a dense gradient is made and added, for the words and for the positions
            parameters = (rows + model.position_rows(self.tp)) * model.hidden
            self._memory(2 * whole + 2 * parameters)
            self._bytes(parameters * 2 * GRADIENT_BYTES)
        self._collective(forward="scatter", backward="gather")

    def norm(self) -> None:
        if self.op == "F":
            self._memory(2 * self.hidden)
        elif self.op == "I":  # input, gradient of the output, own gradient; then the residual's is added
            self._memory(3 * self.hidden + 3 * self.hidden)

    def qkv(self) -> None:
        model = self.model
        mixed = (model.hidden + 2 * model.kv_hidden) / self.tp
        self._collective(forward="gather", backward="scatter", again=True)
        self._linear(model.hidden, mixed)
        rotated = self.tokens * (model.hidden + model.kv_hidden) / self.tp
        rope = 9 * rotated if model.positions == "rope" else 0  # four products, two sums, one concatenation
        if self.op == "F":
            self._memory(rope + (2 * self.tokens * mixed if model.bias else 0))
        elif self.op == "I":
            self._memory(rope + 2 * self.tokens * mixed)  # gradients of q, k and v joined

    def attn(self) -> None:
        model, chunk = self.model, self.chunk
        pairs = self.layout.micro_batch_size * chunk.tokens * (chunk.earlier + chunk.tokens / 2)
        queries = self.tokens * model.hidden / self.tp
        keys = (chunk.earlier + chunk.tokens) * self.layout.micro_batch_size * model.kv_hidden / self.tp
        if self.op == "F":  # reads q, k, v; writes the output
            self._add("attention", 4 * pairs * model.hidden / self.tp, (2 * queries + 2 * keys) * self.element)
        elif self.op == "I":  # reads q, k, v, output and its gradient; writes three gradients
            self._add("attention", 10 * pairs * model.hidden / self.tp, (4 * queries + 4 * keys) * self.element)

    def proj(self) -> None:
        self._linear(self.model.hidden / self.tp, self.model.hidden)
        self._collective(forward="scatter", backward="gather")
        if self.op == "F":
            self._memory((5 if self.model.bias else 3) * self.hidden)

    def mlp(self) -> None:
        model, op = self.model, self.op
        if self.layout.mlp_chunk and op == "W":
            return
        self.norm()
        self._collective(forward="gather", backward="scatter", again=True)
        for tokens in self.layout.mlp_slices(self.chunk.tokens):
            tokens *= self.layout.micro_batch_size
            if self.layout.mlp_chunk and op == "I":
                self._first_half(tokens, "F")
                self._first_half(tokens, "W")
                self._linear(model.ffn / self.tp, model.hidden, tokens, "W")
            self._first_half(tokens, op)
            self._linear(model.ffn / self.tp, model.hidden, tokens)
        self._collective(forward="scatter", backward="gather")
        if op == "F":
            self._memory((5 if model.bias else 3) * self.hidden)

    def _first_half(self, tokens: float, op: str) -> None:
        """First linear layer and activation function of the MLP."""
        model, fused = self.model, self.layout.fused_kernels
        inner = tokens * model.ffn / self.tp
        first = 2 if model.gated else 1
        self._linear(model.hidden, first * model.ffn / self.tp, tokens, op)
        if op == "F":  # reads the first layer's output, writes the second's input; unfused: a pass a function
            self._memory(inner * ((first + 1) if fused else (7 if model.gated else 2 + 2 * model.bias)))
        elif op == "I":
            self._memory(inner * (2 * first + 1) * (1 if fused else 2))

    def head(self) -> None:
        model = self.model
        self.norm()
        self._collective(forward="gather", backward="scatter", again=True)
        columns = model.padded_vocab(self.tp) / self.tp
        self._linear(model.hidden, columns)
        if self.op == "F":  # cast to float32; then maximum, difference, exponential, sum, quotient
            self._bytes(self.tokens * columns * (self.element + 4 + 4 + 8 + 8 + 4 + 8))
        elif self.op == "I":  # softmax times the loss's gradient, cast back
            self._bytes(self.tokens * columns * (8 + 4 + self.element))

    def _linear(self, inputs: float, outputs: float, tokens: float | None = None, op: str | None = None) -> None:
        """tokens, op: all of the chunk and the one asked for, if not given."""
        tokens = self.tokens if tokens is None else tokens
        product = 2 * tokens * inputs * outputs
        activations = tokens * (inputs + outputs) * self.element
        weights = inputs * outputs
        if (op or self.op) == "W":
            self._add("matmul", product, activations + weights * 2 * GRADIENT_BYTES)
        else:
            self._add("matmul", product, activations + weights * self.element)

    def _collective(self, forward: str, backward: str, again: bool = False) -> None:
        """Collectives of a hidden state over the tensor-parallel ranks, at a linear layer or the embedding.

        With sequence parallelism parts are gathered or sums scattered; I gathers a column-parallel layer's input
        `again`, for W, which has no collective of its own. Without, `scatter` is an all-reduce (twice the bytes) and
        what would be gathered is there already.
        """
        if self.tp == 1 or self.op == "W":
            return
        split = self.layout.sequence_parallel
        part = self.tokens * self.model.hidden * self.element * (self.tp - 1) / self.tp
        for which in (forward,) if self.op == "F" else (backward, "gather" if again else ""):
            if which == "scatter":
                self._add("network", 0.0, part if split else 2 * part)
            elif which == "gather" and split:
                self._add("network", 0.0, part)

    def _memory(self, elements: float) -> None:
        self._bytes(elements * self.element)

    def _bytes(self, moved: float) -> None:
        if moved:
            self._add("memory", 0.0, moved)

    def _add(self, kind: str, flops: float, moved: float) -> None:
        self.found.append(Kernel(kind, flops, moved))
