"""What the costs know of a head's layers that predict tokens after the next (multi-token prediction, DeepSeek-V3).

Each norms what the layer before gave and the embedding of a later token, joins both in a linear layer, and has a
transformer layer such as the model's last, a final norm, and the output layer again.
"""

from __future__ import annotations

from collections.abc import Mapping

from helixpipe.costs.models import ModelShape
from helixpipe.costs.piece_kind import PieceKind, Tensors, saved_by_norm
from helixpipe.costs.sizes import ChunkSizes, Linear, OpKernels

Kinds = Mapping[str, PieceKind]
"""The kinds of piece that layers may have, and `embed`, by name."""


def joining(sizes: ChunkSizes) -> Linear:
    """The linear layer that joins hidden states and embeddings."""
    return 2 * sizes.model.hidden, sizes.model.hidden / sizes.tp


def _layer(kinds: Kinds, model: ModelShape) -> list[PieceKind]:
    return [kinds[kind] for kind in model.kinds_of(model.layers)[-1]]


def saved(kinds: Kinds, head: PieceKind, sizes: ChunkSizes) -> Tensors:
    """Return what autograd saves of them, beside what the head saves for the next token."""
    layer = _layer(kinds, sizes.model)
    inside = [kind.name for kind in layer]
    moved = {"words": sizes.tokens * 8, "weights of targets": sizes.tokens * 4}
    every = kinds["embed"].saved(sizes, ()) | moved | {"joined": 2 * sizes.bytes("hidden")}
    own = saved_by_norm(sizes, head)
    every |= {f"embedding: {tensor}": size for tensor, size in own.items()}
    # the hidden states are what the output layer before keeps
    every |= {f"hidden: {tensor}": size for tensor, size in own.items() if tensor not in head.inputs}
    for kind in layer:
        every |= kind.saved(sizes, inside)
    every |= {f"end: {tensor}": size for tensor, size in head.saved(sizes, ()).items()}
    return {f"token {number}: {name}": size for number in range(sizes.model.further) for name, size in every.items()}


def stored(kinds: Kinds, sizes: ChunkSizes) -> float:
    """Bytes of their keys and values."""
    return sizes.model.further * sum(kind.stored(sizes) for kind in _layer(kinds, sizes.model))


def deferred(kinds: Kinds, head: PieceKind, sizes: ChunkSizes) -> float:
    inputs, outputs = joining(sizes)
    own = sizes.tokens * (inputs + outputs) * sizes.element + head.deferred(sizes)
    return sizes.model.further * (own + sum(kind.deferred(sizes) for kind in _layer(kinds, sizes.model)))


def work(kinds: Kinds, head: PieceKind, kernels: OpKernels) -> None:
    """Add the kernels of all. An evaluation leaves them out, which is not counted here."""
    sizes = kernels.sizes
    for _ in range(sizes.model.further):
        kinds["embed"].work(kernels)
        kernels.normalize()
        kernels.normalize()
        kernels.gather_input(joining(sizes))
        kernels.multiply((joining(sizes),))
        kernels.scatter_output()
        for kind in _layer(kinds, sizes.model):
            kind.work(kernels)
        head.work(kernels)


def workspace(kinds: Kinds, sizes: ChunkSizes, op: str) -> float:
    return max((kind.workspace(sizes, op) for kind in _layer(kinds, sizes.model)), default=0.0)


def weights(kinds: Kinds, model: ModelShape, tp: int, rows: int) -> int:
    """Of all of them, without the embedding that they share with the model's."""
    layer = sum(kind.weights(model, tp, rows) for kind in _layer(kinds, model))
    own = 3 * model.norm_parameters + 2 * model.hidden * model.hidden // tp + layer
    return model.further * own


def expert_weights(kinds: Kinds, model: ModelShape, tp: int) -> int:
    return model.further * sum(kind.expert_weights(model, tp) for kind in _layer(kinds, model))
