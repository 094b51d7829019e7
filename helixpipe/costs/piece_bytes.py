"""Bytes that pieces keep and send: activations, messages, weights. No torch here.

Figures are those of one tensor-parallel rank and one chunk of a microbatch. They follow what `helixpipe.model` makes
autograd keep, tensor by tensor, which is more than the textbook's 16 b s h a layer (with GELU; flash attention):

- norms keep their input and float32 statistics of every token (LayerNorm two, RMSNorm one); without the GPU's fused
  RMSNorm the normalized input as well;
- with RoPE, queries and keys are new tensors, while values stay a view of the QKV layer's whole output, which is
  therefore kept too; without RoPE all three are views of it (queries are copied if several share each of several keys);
- attention keeps queries, keys, values, output and a float32 log-sum of every row; keys are not expanded;
- keys and values of a sequence that runs in chunks lie in buffers of the whole sequence, as do their gradients, and
  belong to no unit (`keys_values`, `key_value_gradients`); queries are then copied, and the QKV layer's output goes;
- a gated MLP keeps three times its inner size fused and five times unfused (SiLU, product, and a copy of the linear
  half), an ungated one twice;
- an MLP over slices keeps its input alone; its inner tensors are alive for one slice at a time (`mlp_slice`), in the
  backward, and from I to W nothing is kept, since I computes the weights' gradients too;
- the head keeps float32 probabilities of the whole vocabulary, a mask and an index of every token;
- residual sums and the embedding keep nothing (but a token's index, where tensor parallelism or learned positions make
  a new one). Dropout is taken to be 0: its masks are not counted.

Weights, the batch, and RoPE's table of cosines are kept anyway and not counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from helixpipe.costs.models import Chunk, Layout, ModelShape
from helixpipe.costs.saved import kept
from helixpipe.program.program import Piece, Segment

Tensors = dict[str, float]
"""Bytes of tensors by name. Pieces of one stage share tensors (the norm's output is the QKV layer's input): a name
appears once however many keep it."""


class PieceBytes:
    """Bytes of a model in a layout. All methods are of one tensor-parallel rank."""

    def __init__(self, model: ModelShape, layout: Layout):
        self.model, self.layout = model, layout
        self.tp = layout.tensor_parallel
        self.vocab = model.padded_vocab(self.tp) // self.tp

    def stash(self, pieces: Sequence[Piece], chunk: Chunk) -> float:
        """Kept by one unit of a stage from F to B or I: what autograd saves, and the stage's inputs, but for a residual
        that only passes by."""
        return self.segments_stash((Segment(tuple(pieces), False),), chunk, "F")

    def segments_stash(self, segments: Sequence[Segment], chunk: Chunk, kind: str) -> float:
        """Kept by one unit of a stage once its op of that kind has run; see `stash.kept`."""
        inputs = [self._kept_inputs(s.pieces[0], chunk, not s.passes_residual) for s in segments]
        saved = [self.saved(segment.pieces, chunk) for segment in segments]
        return kept(segments, [own | more for own, more in zip(inputs, saved, strict=True)], inputs, kind)

    def keys_values(self, pieces: Sequence[Piece], tokens: float) -> float:
        """Buffers of one microbatch's keys and values, from the forward of its first chunk to that chunk's backward, in
        all layers whose attention is among the pieces. tokens: of the whole sequence."""
        return 2 * self._attention_layers(pieces) * self._key(tokens) * self.layout.element_bytes

    def key_value_gradients(self, pieces: Sequence[Piece], tokens: float, in_float32: bool = False) -> float:
        """Buffers of their gradients, from the backward of the last chunk on. tokens: those before the last chunk."""
        element = max(self.layout.element_bytes, 4 if in_float32 else 0)
        return 2 * self._attention_layers(pieces) * self._key(tokens) * element

    def deferred_stash(self, pieces: Sequence[Piece], chunk: Chunk) -> float:
        """Kept from I to W: input and output gradient of every linear layer, whole sequences of both."""
        model, tokens = self.model, self._tokens(chunk)
        hidden, ffn, mixed = model.hidden, model.ffn / self.tp, (model.hidden + 2 * model.kv_hidden) / self.tp
        first = 2 if model.gated else 1
        mlp = 0.0 if self.layout.mlp_chunk else hidden + first * ffn + ffn + hidden
        elements = {
            "qkv": hidden + mixed,
            "proj": hidden / self.tp + hidden,
            "mlp": mlp,
            "head": hidden + self.vocab,
        }
        return sum(tokens * elements.get(piece.kind, 0.0) * self.layout.element_bytes for piece in pieces)

    def saved(self, pieces: Sequence[Piece], chunk: Chunk) -> Tensors:
        """What autograd saves in the forward of consecutive pieces."""
        tensors: Tensors = {}
        kinds = {(piece.kind, piece.layer) for piece in pieces}
        for piece in pieces:
            if piece.kind == "attn":
                name = str(piece.layer)
                inside = ("qkv", piece.layer) in kinds
                tensors |= (
                    self._queries_keys_values(name, chunk)
                    if inside
                    else self._kept_inputs(piece, chunk, residual=False)
                )
                tensors |= self._attention(name, chunk)
            elif piece.kind in ("norm", "mlp"):
                tensors |= self._norm(piece, chunk)
            if piece.kind == "qkv":
                tensors[f"normed {piece.layer}"] = self._hidden(chunk)
            elif piece.kind == "proj":
                copied = self.layout.fused_kernels and self.layout.micro_batch_size > 1  # flash-attn's is [b, s]
                name = "projected" if copied and ("attn", piece.layer) in kinds else "attention output"
                tensors[f"{name} {piece.layer}"] = self._attention_output(chunk)
            elif piece.kind == "mlp":
                tensors |= self._mlp(piece, chunk)
            elif piece.kind == "head":
                tensors |= self._norm(piece, chunk) | self._head(piece, chunk)
            elif piece.kind == "embed":
                tensors |= self._embedding(chunk)
        return tensors

    def inputs(self, first: Piece, chunk: Chunk, residual: bool = True) -> Tensors:
        """What crosses the cut before a piece, which its stage holds until the backward, and which the message weighs:
        before qkv the norm's output and the residual, before attn q, k, v and the residual, before proj the attention's
        output and the residual, elsewhere one hidden state. Keys and values are those of the chunk alone."""
        layer = first.layer
        if first.kind == "embed":
            return {}
        own: Tensors = {}
        hidden = self._hidden(chunk)
        if first.kind == "qkv":
            own = {f"normed {layer}": hidden}
        elif first.kind == "attn":
            key = self._key(chunk.tokens) * self.layout.element_bytes
            own = {f"q {layer}": self._attention_output(chunk), f"k {layer}": key, f"v {layer}": key}
        elif first.kind == "proj":
            own = {f"attention output {layer}": self._attention_output(chunk)}
        return {**own, self._input_name(first): hidden} if residual else own

    def message(self, first: Piece, chunk: Chunk) -> float:
        """Bytes of a message that brings a stage that begins with `first` its inputs, or takes their gradients back."""
        return sum(self.inputs(first, chunk).values())

    def workspace(self, pieces: Sequence[Piece], chunk: Chunk) -> float:
        """An estimate of what an op's largest kernel needs beside what is kept: in the head the logits and their
        gradients, in the MLP the gradients of its inner tensors (of a slice these tensors too), in attention those of
        q, k, v and a float32 sum."""
        tokens, element, model = self._tokens(chunk), self.layout.element_bytes, self.model
        first = 2 if model.gated else 1
        inner = tokens
        if self.layout.mlp_chunk:
            inner = max(self.layout.mlp_slices(chunk.tokens)) * self.layout.micro_batch_size
        bytes_of = {
            "embed": 2 * tokens * model.hidden * element,
            "norm": 2 * self._hidden(chunk),
            "qkv": tokens * (model.hidden + 2 * (model.hidden + 2 * model.kv_hidden) / self.tp) * element,
            "attn": tokens / self.tp * (2 * (model.hidden + model.kv_hidden) * element + 4 * model.hidden),
            "proj": 2 * tokens * model.hidden * element,
            "mlp": (2 * tokens * model.hidden + inner * (first + 1) * model.ffn / self.tp) * element
            + sum(self.mlp_slice(chunk).values()),
            "head": tokens * self.vocab * (4 + 2 * element),
        }
        return max((bytes_of[piece.kind] for piece in pieces), default=0.0)

    def mlp_slice(self, chunk: Chunk) -> Tensors:
        """What is kept during the backward of the largest slice of an MLP; nothing if it is not sliced."""
        slices = self.layout.mlp_slices(chunk.tokens) if self.layout.mlp_chunk else [0.0]
        return self._mlp_inner(max(slices))

    def parameters(self, pieces: Sequence[Piece]) -> int:
        """Weights of the pieces; a tied head beside the embedding has none of its own but its norm."""
        total = sum(self.model.piece_parameters(piece, self.tp, self.vocab * self.tp) for piece in pieces)
        kinds = {piece.kind for piece in pieces}
        shared = self.model.tied and {"embed", "head"} <= kinds
        return total - (self.vocab * self.model.hidden if shared else 0)

    # ---------------------------------------------------------------------------------------------- tensors of a piece

    def _tokens(self, chunk: Chunk) -> float:
        return chunk.tokens * self.layout.micro_batch_size

    def _key(self, tokens: float) -> float:
        """Elements of a microbatch's keys on this rank; tokens: of each of its sequences."""
        return tokens * self.layout.micro_batch_size * self.model.kv_hidden / self.tp

    @staticmethod
    def _attention_layers(pieces: Sequence[Piece]) -> int:
        return sum(piece.kind == "attn" for piece in pieces)

    def _kept_inputs(self, first: Piece, chunk: Chunk, residual: bool = True) -> Tensors:
        """Inputs but for keys and values of a chunk, which have moved to the sequence's buffers."""
        moved = () if chunk.whole or first.kind != "attn" else (f"k {first.layer}", f"v {first.layer}")
        return {name: size for name, size in self.inputs(first, chunk, residual).items() if name not in moved}

    def _rows(self, chunk: Chunk) -> float:
        """Tokens that this rank holds outside attention and MLP."""
        return self._tokens(chunk) / (self.tp if self.layout.sequence_parallel else 1)

    def _hidden(self, chunk: Chunk) -> float:
        return self._rows(chunk) * self.model.hidden * self.layout.element_bytes

    def _attention_output(self, chunk: Chunk) -> float:
        return self._tokens(chunk) * self.model.hidden / self.tp * self.layout.element_bytes

    @staticmethod
    def _input_name(first: Piece) -> str:
        """The hidden state a piece starts from or that passes it by as the residual."""
        kind = {"mlp": "after attention", "head": "last"}.get(first.kind, "into")
        return f"{kind} {first.layer}"

    def _norm(self, piece: Piece, chunk: Chunk) -> Tensors:
        statistics = (2 if self.model.norm == "LayerNorm" else 1) * 4
        tensors = {
            self._input_name(piece): self._hidden(chunk),
            f"statistics {piece}": self._rows(chunk) * statistics,
        }
        if self.model.norm == "RMSNorm" and not self.layout.fused_kernels:
            tensors[f"normalized {piece}"] = self._hidden(chunk)
        return tensors

    def _queries_keys_values(self, layer: str, chunk: Chunk) -> Tensors:
        """As the QKV layer of the same stage leaves them."""
        if not chunk.whole:
            return {f"q {layer}": self._attention_output(chunk)}
        model = self.model
        mixed = self._tokens(chunk) * (model.hidden + 2 * model.kv_hidden) / self.tp * self.layout.element_bytes
        tensors = {f"qkv {layer}": mixed}
        rope = model.positions == "rope"
        if rope or self.tp < model.groups < model.heads:  # with one group here, or one a head, queries stay a view
            tensors[f"q {layer}"] = self._attention_output(chunk)
        if rope:
            tensors[f"k {layer}"] = self._key(chunk.tokens) * self.layout.element_bytes
        return tensors

    def _attention(self, layer: str, chunk: Chunk) -> Tensors:
        return {
            f"attention output {layer}": self._attention_output(chunk),
            f"log-sum {layer}": self._tokens(chunk) * self.model.heads / self.tp * 4,
        }

    def _mlp(self, piece: Piece, chunk: Chunk) -> Tensors:
        tensors = {f"mlp input {piece.layer}": self._hidden(chunk)}
        if not self.layout.mlp_chunk:
            tensors |= {f"{name} {piece.layer}": size for name, size in self._mlp_inner(chunk.tokens).items()}
        return tensors

    def _mlp_inner(self, tokens: float) -> Tensors:
        """What tokens of each sequence keep inside the MLP."""
        rows = tokens * self.layout.micro_batch_size
        inner = rows * self.model.ffn / self.tp * self.layout.element_bytes
        copies = (2 if self.layout.fused_kernels else 4) if self.model.gated else 1
        return {"mlp product": inner, "mlp inner": copies * inner}

    def _head(self, piece: Piece, chunk: Chunk) -> Tensors:
        tokens = self._tokens(chunk)
        return {
            "head input": self._hidden(chunk),
            "probabilities": tokens * self.vocab * 4,
            "targets": tokens * (1 + 8),
        }

    def _embedding(self, chunk: Chunk) -> Tensors:
        split = 0 < self.model.position_rows(self.tp) < self.model.seq_length
        positions = chunk.tokens * (8 + split) if self.model.positions == "learned_absolute" else 0
        words = self._tokens(chunk) * (8 + 1) if self.tp > 1 else 0
        return {"indices": positions + words}
