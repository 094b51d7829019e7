"""Defines what a kind of piece is to the costs; the kinds there are, and the rules that they follow, are in
`piece_kinds`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import ClassVar

from helixpipe.costs.models import ModelShape
from helixpipe.costs.sizes import ChunkSizes, Linear, OpKernels

Tensors = dict[str, float]
"""Bytes of tensors by name. Pieces of one layer share tensors (the norm's output is the QKV layer's input): a name
appears once however many keep it."""


class PieceKind:
    """A kind of piece.

    inputs: what crosses the cut before it, by name, each with its shape (`ChunkSizes.bytes`); the last is the residual.
    in_store: those of them that lie in the document's buffers where its sequence runs in chunks.
    textbook: what it keeps from F to backward, in elements of b·s·h, with flash attention and no dropout (HelixPipe;
    Korthikanti et al., 2022). module: its name in `--recompute-modules`. kept_for_attention: whether recomputation
    `without-attention` keeps it. saved_outputs: what of its output it saves. by_tokens: whether its kernels depend on
    how many tokens a chunk has and whether it is stored, and not on what these see; layers inside a head aside.
    """

    name: ClassVar[str]
    inputs: ClassVar[Mapping[str, str]]
    in_store: ClassVar[tuple[str, ...]] = ()
    textbook: ClassVar[Mapping[str, int]] = MappingProxyType({})
    module: ClassVar[str] = ""
    kept_for_attention: ClassVar[bool] = False
    saved_outputs: ClassVar[tuple[str, ...]] = ()
    by_tokens: ClassVar[bool] = False

    def linears(self, sizes: ChunkSizes) -> tuple[Linear, ...]:
        return ()

    def stored(self, sizes: ChunkSizes) -> float:
        """Bytes of `in_store`."""
        return sum(sizes.bytes(self.inputs[name]) for name in self.in_store)

    def saved(self, sizes: ChunkSizes, inside: Collection[str]) -> Tensors:
        """Return what autograd saves in the forward. inside: the kinds of its layer that have one graph with it."""
        return {}

    def deferred(self, sizes: ChunkSizes) -> float:
        """Bytes from I to W: input and output gradient of every linear layer, whole sequences of both."""
        return sum(sizes.tokens * (inputs + outputs) * sizes.element for inputs, outputs in self.linears(sizes))

    def work(self, kernels: OpKernels) -> None:
        """Add the kernels of `kernels.op`."""
        raise NotImplementedError

    def workspace(self, sizes: ChunkSizes, op: str) -> float:
        """The most, in bytes, that its F, B or I has at any moment beside what it and the pieces before it save and the
        gradients that have come to it; what it has freed by then is taken off."""
        raise NotImplementedError

    def outside_pauses(self, sizes: ChunkSizes, op: str) -> float:
        """The same where it pauses in a pair, before the first pause of F, or after the last of B or I."""
        return self.workspace(sizes, op)

    def weights(self, model: ModelShape, tp: int, rows: int) -> int:
        """Of a tensor-parallel rank with that many rows of the vocabulary. A tied head counts its copy."""
        return 0

    def expert_weights(self, model: ModelShape, tp: int) -> int:
        """Return those of them that are experts', which expert-parallel ranks share out."""
        return 0


def saved_by_norm(sizes: ChunkSizes, kind: PieceKind) -> Tensors:
    """Return what a norm at the start of a piece saves."""
    (own,) = kind.inputs
    tensors = {own: sizes.bytes("hidden"), f"deviations for {kind.name}": sizes.rows * 4}
    if sizes.model.norm == "LayerNorm":
        tensors[f"means for {kind.name}"] = sizes.rows * 4
    if sizes.model.norm == "RMSNorm" and not sizes.layout.fused_kernels:
        tensors[f"normalized for {kind.name}"] = sizes.bytes("hidden")
    if sizes.model.centered:
        tensors[f"scale for {kind.name}"] = sizes.model.hidden * sizes.element
    return tensors
