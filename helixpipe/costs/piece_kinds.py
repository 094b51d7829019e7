"""Everything that is known of each kind of piece: all tables elsewhere come from here.

A kind says what crosses the cut before it, what autograd saves, which linear layers it has (their weights' gradients
may wait from I to W), its kernels and collectives, its weights, and what recomputation calls it. A layer is a sequence
of kinds (`stages.LAYER_PIECES`).

Kernels, for F (also a recomputation R), I (gradient of the input) and W (of the weights); B is I and W:

- a linear layer of N tokens, i to o: 2 N i o FLOPs in each of F, I and W;
- causal attention of n tokens after c earlier ones: 4 n (c + n/2) h FLOPs in F (two products over half the square), and
  10 n (c + n/2) h in I, because flash attention computes the scores again (8 when only the mathematics is counted); of
  attention to a window of w tokens as many as there are pairs of a query and one of the last w keys up to its own;
- all else (norms, RoPE, activation functions, residual sums, cross entropy, embedding) moves bytes; its arithmetic is
  not counted, as in torch's FLOP counter.

Gradients of norms and biases are part of I. Weight gradients are added to float32 sums.
What is saved follows what `helixpipe.model` makes autograd keep, tensor by tensor, which is more than the textbook's
16 b s h a layer (with GELU; flash attention):

- norms keep their input and float32 statistics of every token (LayerNorm two, RMSNorm one); without the GPU's fused
  RMSNorm the normalized input as well;
- with RoPE, queries and keys are new tensors and values a copy, so that the QKV layer's output goes; without RoPE all
  three are views of it (queries are copied if several share each of several keys);
- norms of queries and keys keep what the QKV layer gave, of which values are a view, and statistics of every head, and
  give new tensors; norms whose weights are centered around zero keep the sum of theirs and one;
- attention keeps queries, keys, values, output and a float32 log-sum of every row; keys are not expanded;
- keys and values of a microbatch that runs in chunks lie in buffers of all of it, as do their gradients, and
  belong to no unit; queries are then copied, and the QKV layer's output goes;
- a gated MLP keeps three times its inner size fused and five times unfused (SiLU, product, and a copy of the linear
  half), an ungated one twice;
- an MLP over slices keeps its input alone; its inner tensors are alive for one slice at a time, in the backward, which
  computes the first linear layer again; from I to W nothing is kept, since I computes the weights' gradients too;
- the head keeps float32 probabilities of the whole vocabulary, a mask and an index of every token; over slices its
  linear layer's input alone, since all but the norm is computed in the backward, in I with the weight's gradient (in F
  where no backward follows); a part of one whose vocabulary is divided over ranks keeps its share of that, and over
  slices a float32 maximum of every token, since it computes its logits in F as well;
- residual sums and the embedding keep nothing (but a token's index, where tensor parallelism or learned positions make
  a new one). Dropout is taken to be 0. Weights, the batch, and RoPE's table of cosines are kept anyway, not counted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import groupby, pairwise
from types import MappingProxyType
from typing import ClassVar

from helixpipe.costs.attention_kinds import (
    Attention,
    AttentionToWindow,
    AttentionToWindowWithSinks,
    AttentionWithSinks,
    copies_output,
    copies_queries,
    copies_values,
)
from helixpipe.costs.expert_kind import ExpertMlp
from helixpipe.costs.head_kinds import Head, HeadNorm, HeadOfFurtherTokens, HeadPart
from helixpipe.costs.latent_kinds import AttentionToLatents, LatentQkv
from helixpipe.costs.models import Chunk, Layout, ModelShape
from helixpipe.costs.piece_kind import PieceKind, Tensors, saved_by_norm
from helixpipe.costs.sizes import GRADIENT_BYTES, ChunkSizes, Kernel, Linear, OpKernels
from helixpipe.program.stages import (
    HEAD_NORM,
    HEAD_PART,
    LAYER_PIECES,
    NO_ROPE,
    model_pieces,
    role_of,
)


class Embed(PieceKind):
    name, inputs, kept_for_attention, by_tokens = "embed", {}, True, True

    def saved(self, sizes: ChunkSizes, inside: Collection[str]) -> Tensors:
        model = sizes.model
        split = 0 < model.position_rows(sizes.tp) < model.seq_length
        positions = sizes.length if model.positions == "learned_absolute" else 0
        joined = sizes.layout.rings or sizes.layout.reorders_rows  # of several runs
        words = sizes.tokens if sizes.tp > 1 or joined else 0
        masks = {"mask of positions": positions * split, "mask of words": sizes.tokens if sizes.tp > 1 else 0}
        return {"positions": positions * 8, "words": words * 8} | masks

    def work(self, kernels: OpKernels) -> None:
        sizes, model = kernels.sizes, kernels.sizes.model
        hidden = sizes.tokens * model.hidden
        if kernels.op == "F":
            kernels.move_elements(2 * hidden + (3 * hidden if model.positions == "learned_absolute" else 0))
        elif kernels.op == "I":  # a dense gradient is made and added, for the words and for the positions
            weights = (sizes.vocab + model.position_rows(sizes.tp)) * model.hidden
            kernels.move_elements(2 * hidden + 2 * weights)
            kernels.move(weights * 2 * GRADIENT_BYTES)
        kernels.scatter_output()

    def workspace(self, sizes: ChunkSizes, op: str) -> float:
        """In a backward the gradient of a table, which no W waits for, and that of the rows, gathered and masked."""
        if op == "F":
            return 2 * sizes.hidden
        rows = max(sizes.vocab, sizes.model.position_rows(sizes.tp))
        return rows * sizes.model.hidden * sizes.element + (sizes.hidden if sizes.tp > 1 else 0)

    def weights(self, model: ModelShape, tp: int, rows: int) -> int:
        return (rows + model.position_rows(tp)) * model.hidden


def _head_norms(sizes: ChunkSizes) -> Tensors:
    """Return what the norms of each head's query and key save."""
    tensors = {"qkv": sizes.tokens * sizes.mixed * sizes.element}
    if copies_queries(sizes):
        tensors["q before its norm"] = sizes.bytes("attention")
    for name, shape, heads in (("q", "attention", sizes.model.heads), ("k", "key", sizes.model.groups)):
        tensors[f"deviations for {name}"] = sizes.tokens * heads / sizes.tp * 4
        if sizes.model.norm == "LayerNorm":
            tensors[f"means for {name}"] = sizes.tokens * heads / sizes.tp * 4
        elif not sizes.layout.fused_kernels:
            tensors[f"normalized for {name}"] = sizes.bytes(shape)
        if sizes.model.centered:
            tensors[f"scale for {name}"] = sizes.model.channels * sizes.element
    return tensors


class Norm(PieceKind):
    name, inputs, textbook, by_tokens = "norm", {"into": "hidden"}, {"into": 1}, True

    def saved(self, sizes: ChunkSizes, inside: Collection[str]) -> Tensors:
        return saved_by_norm(sizes, self)

    def work(self, kernels: OpKernels) -> None:
        kernels.normalize()

    def workspace(self, sizes: ChunkSizes, op: str) -> float:
        return 2 * sizes.bytes("hidden")

    def weights(self, model: ModelShape, tp: int, rows: int) -> int:
        return model.norm_parameters


class Qkv(PieceKind):
    """rotates: where the model has RoPE."""

    name, inputs, textbook = "qkv", {"normed": "hidden", "into": "hidden"}, {"normed": 1}
    rotates: ClassVar[bool] = True
    by_tokens = True

    def linears(self, sizes: ChunkSizes) -> tuple[Linear, ...]:
        return ((sizes.model.hidden, sizes.mixed),)

    def saved(self, sizes: ChunkSizes, inside: Collection[str]) -> Tensors:
        return {"normed": sizes.bytes("hidden")} | (_head_norms(sizes) if sizes.model.qk_norm else {})

    def work(self, kernels: OpKernels) -> None:
        sizes, model = kernels.sizes, kernels.sizes.model
        (linear,) = self.linears(sizes)
        kernels.gather_input(linear)
        kernels.multiply((linear,))
        rotated = sizes.tokens * (sizes.query + sizes.kv)
        # Four products, two sums, one concatenation; eager in float32, with casts.
        passes = {"F": 24, "I": 28, "W": 0}[kernels.op] if sizes.layout.eager else 9
        rope = passes * rotated if self.rotates and model.positions == "rope" else 0
        if kernels.op in "FI" and copies_values(sizes, self.rotates):  # two products, and a sum half by half
            kernels.move_elements(7 * rotated + 2 * sizes.tokens * (sizes.kv + sizes.gate))
            rope = 0
        elif kernels.op == "F":  # queries and gates are joined
            kernels.move_elements(4 * sizes.tokens * sizes.gate)
        if model.qk_norm and kernels.op in "FI":  # F reads and writes; I reads two and writes one
            kernels.move_elements((2 if kernels.op == "F" else 3) * rotated)
        if kernels.op == "F":
            kernels.move_elements(rope + (2 * sizes.tokens * sizes.mixed if model.biased_qkv else 0))
        elif kernels.op == "I":
            joined = 0 if copies_values(sizes, self.rotates) else 2 * sizes.tokens * sizes.mixed
            kernels.move_elements(rope + joined)  # gradients of q, k and v

    def workspace(self, sizes: ChunkSizes, op: str) -> float:
        """In F its output, and queries, keys and values; in a backward those joined, then the linear layer's."""
        mixed = sizes.tokens * sizes.mixed * sizes.element
        rotated = sizes.bytes("query") * (self.rotates and sizes.model.positions == "rope")
        if op == "F":
            return 2 * mixed + rotated
        weight = sum(map(sizes.weight, self.linears(sizes))) if op == "B" else sizes.gathered
        return max(mixed + rotated, sizes.hidden + sizes.scattered + weight)

    def weights(self, model: ModelShape, tp: int, rows: int) -> int:
        linear = (model.hidden + model.biased_qkv) * model.mixed_hidden // tp
        return linear + (2 * model.norm_vectors * model.channels if model.qk_norm else 0)


class UnrotatedQkv(Qkv):
    name, rotates = NO_ROPE, False


class Proj(PieceKind):
    name, inputs = "proj", {"attention output": "attention", "into": "hidden"}
    by_tokens = True
    textbook, kept_for_attention = {"attention output": 1}, True  # its output is as large as the residual kept instead

    def linears(self, sizes: ChunkSizes) -> tuple[Linear, ...]:
        return ((sizes.attention, sizes.model.hidden),)

    def saved(self, sizes: ChunkSizes, inside: Collection[str]) -> Tensors:
        copied = copies_output(sizes) and not sizes.gate and "attn" in map(role_of, inside)
        return {"projected" if copied else "attention output": sizes.bytes("attention")}

    def work(self, kernels: OpKernels) -> None:
        kernels.multiply(self.linears(kernels.sizes))
        _leave(kernels)

    def workspace(self, sizes: ChunkSizes, op: str) -> float:
        if op == "F":
            return sizes.hidden + sizes.bytes("hidden")  # its product, and the sum over ranks or with the residual
        weight = sum(map(sizes.weight, self.linears(sizes))) if op == "B" else 0.0
        return sizes.gathered + sizes.bytes("attention") + weight

    def weights(self, model: ModelShape, tp: int, rows: int) -> int:
        return model.attention_hidden * model.hidden // tp + model.bias * model.hidden


def _leave(kernels: OpKernels) -> None:
    """After a row-parallel layer: its sum over ranks, bias and residual."""
    kernels.scatter_output()
    if kernels.op == "F":
        kernels.move_elements((5 if kernels.sizes.model.bias else 3) * kernels.sizes.rows * kernels.sizes.model.hidden)


class Mlp(PieceKind):
    name, inputs, module, by_tokens = "mlp", {"after attention": "hidden"}, "mlp", True
    textbook: ClassVar[Mapping[str, int]] = {"after attention": 1, "mlp input": 1, "mlp inner": 4, "mlp product": 4}

    def linears(self, sizes: ChunkSizes) -> tuple[Linear, ...]:
        return (sizes.model.hidden, sizes.first * sizes.ffn), (sizes.ffn, sizes.model.hidden)

    def saved(self, sizes: ChunkSizes, inside: Collection[str]) -> Tensors:
        whole = {} if sizes.layout.mlp_chunk else self.inner(sizes, sizes.length)
        return saved_by_norm(sizes, self) | {"mlp input": sizes.bytes("hidden")} | whole

    def inner(self, sizes: ChunkSizes, tokens: float) -> Tensors:
        """Return what so many tokens of each sequence keep between the linear layers."""
        inner = tokens * sizes.layout.micro_batch_size * sizes.ffn * sizes.element
        tensors = {"mlp product": inner, "mlp inner": (2 if sizes.model.gated else 1) * inner}
        if sizes.model.gated and not sizes.layout.fused_kernels:
            tensors |= {"mlp activated": inner, "mlp linear half": inner}
        return tensors

    def slice(self, sizes: ChunkSizes) -> Tensors:
        """Return what is kept during the backward of the largest slice; nothing if it is not sliced."""
        return self.inner(sizes, max(sizes.layout.mlp_slices(sizes.length)) if sizes.layout.mlp_chunk else 0.0)

    def deferred(self, sizes: ChunkSizes) -> float:
        return 0.0 if sizes.layout.mlp_chunk else super().deferred(sizes)

    def work(self, kernels: OpKernels) -> None:
        sizes, op, (first, second) = kernels.sizes, kernels.op, self.linears(kernels.sizes)
        if sizes.layout.mlp_chunk and op == "W":
            return
        kernels.normalize()
        kernels.gather_input(first, beside=not sizes.layout.mlp_chunk)
        for tokens in sizes.layout.mlp_slices(sizes.length):
            tokens *= sizes.layout.micro_batch_size
            if sizes.layout.mlp_chunk and op == "I":
                self._first_half(kernels, tokens, "F")
                self._first_half(kernels, tokens, "W")
                kernels.multiply((second,), tokens, "W")
            self._first_half(kernels, tokens, op)
            kernels.pause()
            if not kernels.again:
                kernels.multiply((second,), tokens)
        if not kernels.again:
            _leave(kernels)

    def _first_half(self, kernels: OpKernels, tokens: float, op: str) -> None:
        """First linear layer and activation function."""
        sizes, model, layout = kernels.sizes, kernels.sizes.model, kernels.sizes.layout
        fused = layout.fused_kernels and not layout.eager
        kernels.multiply(self.linears(sizes)[:1], tokens, op)
        inner = tokens * sizes.ffn
        if op == "F":  # reads the first layer's output, writes the second's input; unfused: a pass a function
            kernels.move_elements(inner * ((sizes.first + 1) if fused else (7 if model.gated else 2 + 2 * model.bias)))
        elif op == "I":
            kernels.move_elements(inner * (2 * sizes.first + 1) * (1 if fused else 2))

    def workspace(self, sizes: ChunkSizes, op: str) -> float:
        if sizes.layout.mlp_chunk:
            return self._sliced_workspace(sizes)
        if op == "F":
            return sizes.hidden + sizes.bytes(
                "hidden"
            )  # the second product, and the sum over ranks or with the residual
        return max(self._moments(sizes, op))

    def outside_pauses(self, sizes: ChunkSizes, op: str) -> float:
        """In F what is between its layers has yet to come; in a backward the first layer's gradients are left."""
        if sizes.layout.mlp_chunk:
            return self.workspace(sizes, op)
        return -sum(self.inner(sizes, sizes.length).values()) if op == "F" else self._moments(sizes, op)[-1]

    def _sliced_workspace(self, sizes: ChunkSizes) -> float:
        """What is gathered and what is to be summed; a slice's inner tensors and their gradients."""
        layout = sizes.layout
        inner = max(layout.mlp_slices(sizes.length)) * layout.micro_batch_size * sizes.ffn * sizes.element
        return 2 * sizes.hidden + inner * (sizes.first + 1) + sum(self.slice(sizes).values())

    def _moments(self, sizes: ChunkSizes, op: str) -> tuple[float, ...]:
        """What there is in a backward, as allocations of the real one show: at the second layer's products, at the
        activation function's gradient, and at the first layer's products. I keeps for W what layers multiply."""
        saved = sum(self.inner(sizes, sizes.length).values())
        product = sizes.tokens * sizes.ffn * sizes.element
        inner = sizes.first * product
        sums = sizes.hidden + sizes.scattered
        if op == "I":
            activation = product if sizes.layout.fused_kernels else 2 * product
            of_first = sizes.gathered + inner + sizes.gathered + sums - (saved - product)
            return sizes.gathered + product, sizes.gathered + activation + inner, of_first
        first, second = map(sizes.weight, self.linears(sizes))
        activation = 0.0 if sizes.layout.fused_kernels else product  # the product itself has gone
        return sizes.gathered + product + second, activation + inner, inner + sums + first - saved

    def weights(self, model: ModelShape, tp: int, rows: int) -> int:
        first = (model.hidden + model.bias) * model.ffn * (2 if model.gated else 1) // tp
        return model.norm_parameters + first + model.ffn * model.hidden // tp + model.bias * model.hidden


_BODY: Mapping[str, PieceKind] = {
    kind.name: kind
    for kind in (
        *(Embed(), Norm(), Qkv(), UnrotatedQkv(), LatentQkv()),
        *(Attention(), AttentionToWindow(), AttentionToLatents(), AttentionWithSinks(), AttentionToWindowWithSinks()),
        *(Proj(), Mlp(), ExpertMlp()),
    )
}

_HEADS = (Head(_BODY), HeadOfFurtherTokens(_BODY), HeadNorm(), HeadPart())

KINDS: Mapping[str, PieceKind] = MappingProxyType({**_BODY, **{kind.name: kind for kind in _HEADS}})
"""Every kind by its name in a `Piece`."""

MODULES = {kind.module: role_of(kind.name) for kind in KINDS.values() if kind.module}
"""Values of `--recompute-modules` and the role of the pieces that each means."""

WITHOUT_CORE_ATTENTION = tuple(
    tuple(run) for core, run in groupby(LAYER_PIECES, key=lambda name: name == MODULES["core_attn"]) if not core
)
"""The runs of a layer that are not core attention."""


def inputs_after(kind: str) -> tuple[str, ...]:
    """Shapes of what crosses the cut after a piece that is not the last, in the order of the tensors."""
    if kind == HEAD_NORM:
        return tuple(KINDS[HEAD_PART].inputs.values())
    chain = [piece.kind for piece in model_pieces(1)]
    return tuple(KINDS[chain[chain.index(role_of(kind)) + 1]].inputs.values())


def num_parameters(model: ModelShape) -> int:
    """All weights, unpadded, a tied one once."""
    total = sum(KINDS[piece.kind].weights(model, 1, model.vocab) for piece in model.pieces)
    return total - (model.vocab * model.hidden if model.tied else 0)


def work(
    model: ModelShape, layout: Layout, piece: str, op: str, chunk: Chunk, alone: bool = False, shares: int = 1
) -> list[Kernel]:
    """The kernels of one piece for an op of kind F, I, W, B or R (as F) on one chunk of a microbatch. alone: whether no
    backward follows an F. shares: `Piece.shares`."""
    sizes, found = ChunkSizes(model, layout, chunk, shares), list[Kernel]()
    for part in {"B": "IW", "R": "F"}.get(op, op):
        again = op == "R" and layout.stops_recomputing
        kernels = OpKernels(sizes, part, alone, joined=op == "B", again=again)
        KINDS[piece].work(kernels)
        found += kernels.list
    return found


def steps(
    model: ModelShape, layout: Layout, piece: str, op: str, chunk: Chunk, halved: bool
) -> tuple[list[list[Kernel]], list[str]]:
    """The kernels of one piece for an op of kind F, I or W on a chunk, step by step, and what ends each step but the
    last. halved: whether the chunk is half of what an op works on."""
    kernels = OpKernels(ChunkSizes(model, layout, chunk), op, halved=halved, stepped=True)
    KINDS[piece].work(kernels)
    places = [0, *(place for place, _ in kernels.ends), len(kernels.list)]
    return [kernels.list[start:stop] for start, stop in pairwise(places)], [what for _, what in kernels.ends]


def flops(model: ModelShape, layout: Layout, piece: str, op: str, chunk: Chunk) -> float:
    """Floating-point operations, as executed, of one piece on one tensor-parallel rank."""
    return sum(kernel.flops for kernel in work(model, layout, piece, op, chunk))


def model_flops(model: ModelShape, layout: Layout, piece: str, chunk: Chunk, shares: int = 1) -> float:
    """Return the FLOPs that the mathematics needs, forward and backward: what utilization (MFU) counts. Causal
    attention counts the half of the square that is computed; recomputation, flash attention's too, does not count."""
    layout = replace(layout, expert_load=1.0)
    return 3 * sum(kernel.flops for kernel in work(model, layout, piece, "F", chunk, True, shares))
