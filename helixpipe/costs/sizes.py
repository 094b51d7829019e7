"""Sizes of one chunk's tensors on one tensor-parallel rank, and the kernels that work on them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from helixpipe.costs.models import Chunk, Layout, ModelShape

COLUMN, ROW, TO_HEADS, TO_ROWS = "column", "row", "to heads", "to rows"
"""Where a step ends for a collective: before a column-parallel layer, after a row-parallel one, and where
context-parallel ranks swap rows for heads and back."""

SENT, ARRIVED = "sent", "arrived"
"""Where a step ends for an exchange of tokens with experts: where it starts, which is no pause, and where its result is
needed. What is between the two runs while tokens travel."""

GRADIENT_BYTES = 4
"""A weight's gradient is summed in float32."""

Linear = tuple[float, float]
"""Input and output channels of a linear layer on one tensor-parallel rank."""


class ChunkSizes:
    """A chunk of a microbatch of a model in a layout.

    length: of each of its sequences, the tokens that this context-parallel rank has; tokens: those of all of them;
    rows: those of them that this rank holds outside attention and MLP. query, gate, kv, attention, mixed, ffn, vocab:
    channels on this rank. first: halves of the MLP's first layer. shares: parts that the vocabulary is divided into
    over pipeline ranks.
    """

    def __init__(self, model: ModelShape, layout: Layout, chunk: Chunk, shares: int = 1):
        self.shares = shares
        self.model, self.layout, self.chunk = model, layout, chunk
        self.tp, self.cp, self.element = layout.tensor_parallel, layout.context_parallel, layout.element_bytes
        self.length = chunk.tokens / self.cp
        self.tokens = self.length * layout.micro_batch_size
        self.rows = self.tokens / (self.tp if layout.sequence_parallel else 1)
        self.query, self.kv = model.query_hidden / self.tp, model.kv_hidden / self.tp
        self.attention = model.attention_hidden / self.tp
        self.gate = self.query * model.output_gate
        self.mixed = model.mixed_hidden / self.tp
        self.ffn, self.first = model.ffn / self.tp, 2 if model.gated else 1
        self.vocab = model.padded_vocab(self.tp) / self.tp / shares

    @property
    def hidden(self) -> float:
        """Bytes of the hidden states of all its tokens."""
        return self.tokens * self.model.hidden * self.element

    @property
    def gathered(self) -> float:
        """The same where a linear layer gathers them from the tensor-parallel ranks; else nothing is made."""
        return self.hidden if self.layout.sequence_parallel else 0.0

    @property
    def scattered(self) -> float:
        """Bytes of this rank's part of a sum over the ranks, where the sum is scattered; else it is made in place."""
        return self.bytes("hidden") if self.layout.sequence_parallel else 0.0

    def weight(self, linear: Linear) -> float:
        """Bytes of a linear layer's weight, or of its gradient before that is added to its sum."""
        return linear[0] * linear[1] * self.element

    def in_window(self) -> ChunkSizes:
        """The same where attention sees the model's window alone."""
        return ChunkSizes(self.model, self.layout, replace(self.chunk, window=self.model.window), self.shares)

    def bytes(self, shape: str) -> float:
        """Of a tensor of a shape that crosses cuts: `hidden`, `query` (with its gate beside it), `key`, `value` or
        `attention` (the heads joined); with multi-latent attention key and value are the key that heads share and the
        latent."""
        latent = self.model.kv_rank
        elements = {
            "hidden": self.rows * self.model.hidden,
            "query": self.tokens * (self.query + self.gate),
            "key": self.tokens * (self.model.shared_channels if latent else self.kv),
            "value": self.tokens * (latent or self.kv),
            "attention": self.tokens * self.attention,
        }
        return elements[shape] * self.element


class Kernel(NamedTuple):
    """Work of one kind: `matmul`, `attention`, `memory`, or `network` between tensor-parallel ranks; between
    context-parallel ranks `all-to-all` or `ring`, between expert-parallel ones `experts`. bytes: of device memory read
    and written; for the last four, those that one rank sends. behind: of these, the kernels of the same op that run at
    the same time, whose own times are counted where they are. rows: of a product, the tokens it multiplies."""

    kind: str
    flops: float
    bytes: float
    behind: tuple[Kernel, ...] = ()
    rows: float = 0.0


class OpKernels:
    """Collects the kernels of an op, F, I or W, on a chunk. alone: whether no backward follows an F. joined: whether
    each layer's W follows its I at once, in a B. halved: whether the chunk is half of what an op works on.
    stepped: where its collectives are, steps end instead, in whatever op (`costs/steps.py`). again: whether an F is run
    for what its backward needs alone, which the last product's output is not.

    ends: of each step but the last, how many kernels were there before its end, and what ends it.
    """

    def __init__(
        self, sizes: ChunkSizes, op: str, alone: bool = False, joined: bool = False, halved: bool = False,
        stepped: bool = False, again: bool = False,
    ):  # fmt: skip
        self.sizes, self.op, self.alone, self.joined = sizes, op, alone, joined
        self.halved, self.stepped, self.again = halved, stepped, again
        self.list: list[Kernel] = []
        self.ends: list[tuple[int, str]] = []

    def in_window(self) -> OpKernels:
        """The same list for a chunk whose attention sees the model's window alone."""
        sizes = self.sizes.in_window()
        made = OpKernels(sizes, self.op, self.alone, self.joined, self.halved, self.stepped, self.again)
        made.list, made.ends = self.list, self.ends
        return made

    def add(self, kind: str, flops: float, moved: float, behind: tuple[Kernel, ...] = ()) -> None:
        self.list.append(Kernel(kind, flops, moved, behind))

    def move(self, count: float) -> None:
        """Read or write that many bytes of device memory."""
        if count:
            self.add("memory", 0.0, count)

    def move_elements(self, count: float) -> None:
        self.move(count * self.sizes.element)

    def normalize(self) -> None:
        """A norm; in I it reads its input and the output's gradient and writes its own, to which the residual's is
        added. Eager: a pass to read and one or two to write for each function; float32 counts twice."""
        passes = {"F": 18, "I": 41, "W": 0} if self.sizes.layout.eager else {"F": 2, "I": 3 + 3, "W": 0}
        self.move_elements(passes[self.op] * self.sizes.rows * self.sizes.model.hidden)

    def multiply(self, linears: Iterable[Linear], tokens: float | None = None, op: str | None = None) -> None:
        """Linear layers. tokens, op: all of the chunk and the one asked for, if not given."""
        self.list += [self._product(linear, tokens, op or self.op) for linear in linears]

    def _product(self, linear: Linear, tokens: float | None, op: str) -> Kernel:
        """The matrix product of a linear layer. tokens: all of the chunk, if not given."""
        tokens = self.sizes.tokens if tokens is None else tokens
        inputs, outputs = linear
        weight_bytes = 2 * GRADIENT_BYTES if op == "W" else self.sizes.element
        moved = tokens * (inputs + outputs) * self.sizes.element + inputs * outputs * weight_bytes
        return Kernel("matmul", 2 * tokens * inputs * outputs, moved, rows=tokens)

    def gather_input(self, layer: Linear, beside: bool = True) -> None:
        """Collectives of the hidden state that a column-parallel linear layer multiplies; those of its gradient in I.

        I gathers the input again, for W, which has no collective of its own. beside: the layer is computed whole, and
        its backward runs this collective beside the input gradient's product, and where W follows at once the sum of
        input gradients beside the weight gradient's (`helixpipe/model/linear.py`, and megatron-core alike).
        """
        if self.stepped:
            self._end_step_between_ranks(COLUMN)
        elif self.op == "F":
            self._collective("gather")
        elif self.op == "I":
            self._collective("gather", (self._product(layer, None, "I"),) if beside else ())
            self._collective("scatter", (self._product(layer, None, "W"),) if beside and self.joined else ())

    def scatter_output(self) -> None:
        """Collectives of the hidden state that a row-parallel linear layer, or the embedding, gives; those of its
        gradient in I."""
        if self.stepped:
            self._end_step_between_ranks(ROW)
        elif self.op != "W":
            self._collective("scatter" if self.op == "F" else "gather")

    def _end_step_between_ranks(self, what: str) -> None:
        if self.sizes.tp > 1:
            self.end_step(what)

    def pause(self) -> None:
        """End a step in the middle of what computes longest."""
        if self.stepped and (self.halved or self.sizes.layout.pauses):
            self.end_step()

    def end_step(self, what: str = "") -> None:
        """End a step: at a collective, one of the four above, or at none (the other half's next step comes first)."""
        self.ends.append((len(self.list), what))

    def _collective(self, which: str, behind: tuple[Kernel, ...] = ()) -> None:
        """Of a hidden state over the tensor-parallel ranks. With sequence parallelism parts are gathered or sums
        scattered; without, `scatter` is an all-reduce (twice the bytes) and what would be gathered is there already."""
        moved = exchanged(self.sizes, which)
        if moved:
            self.add("network", 0.0, moved, behind)


def exchanged(sizes: ChunkSizes, which: str) -> float:
    """Bytes that a rank sends in a collective of the hidden state of a chunk, `gather` or `scatter`."""
    split = sizes.layout.sequence_parallel
    if which == "gather" and not split:
        return 0.0
    part = sizes.tokens * sizes.model.hidden * sizes.element * (sizes.tp - 1) / sizes.tp
    return part if split else 2 * part
