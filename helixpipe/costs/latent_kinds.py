"""What the costs know of multi-latent attention: `qkv.latent` and `attn.latent`.

Down-projections are computed by each tensor-parallel rank for its own rows, and what ranks gather is as narrow as the
latents. Attention makes every head's keys and values of the latents of all tokens that a chunk sees, in I once more.
The gradient of the weight that makes them is part of I.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import ClassVar

from helixpipe.costs.models import ModelShape
from helixpipe.costs.piece_kind import PieceKind, Tensors
from helixpipe.costs.sizes import ChunkSizes, Linear, OpKernels
from helixpipe.program.stages import LATENT, LATENT_QKV, role_of


class LatentQkv(PieceKind):
    name, inputs = LATENT_QKV, {"normed": "hidden", "into": "hidden"}
    textbook: ClassVar[Mapping[str, int]] = {"normed": 1}

    def saved(self, sizes: ChunkSizes, inside: Collection[str]) -> Tensors:
        model = sizes.model
        tensors = {"normed": sizes.bytes("hidden")}
        if model.q_rank:
            tensors["q latent"] = sizes.rows * model.q_rank * sizes.element
        if model.qk_norm:
            if model.q_rank:
                tensors |= _saved_by_norm(sizes, "q", model.q_rank, model.q_rank)
            tensors |= _saved_by_norm(sizes, "latent", model.kv_rank, model.kv_rank + model.shared_channels)
        return tensors

    def deferred(self, sizes: ChunkSizes) -> float:
        down, up = _projections(sizes)
        elements = sum(sizes.rows * (inputs + outputs) for inputs, outputs in down)
        return (elements + sizes.tokens * sum(up)) * sizes.element

    def work(self, kernels: OpKernels) -> None:
        sizes, model, op = kernels.sizes, kernels.sizes.model, kernels.op
        down, up = _projections(sizes)
        latent = model.kv_rank + model.shared_channels
        kernels.multiply(down, sizes.rows)
        if model.qk_norm and op != "W":
            kernels.move_elements((2 if op == "F" else 3) * sizes.rows * (model.q_rank + model.kv_rank))
        _gather(kernels, model.q_rank or model.hidden, again=True)
        kernels.multiply((up,))
        _gather(kernels, latent)
        if op != "W":  # as where all channels rotate, and queries are joined
            rotated = sizes.tokens * (model.heads / sizes.tp + 1) * model.shared_channels
            kernels.move_elements(7 * rotated + 2 * sizes.tokens * sizes.query)

    def workspace(self, sizes: ChunkSizes, op: str) -> float:
        return sizes.tokens * (sizes.model.hidden + 2 * sizes.query) * sizes.element

    def weights(self, model: ModelShape, tp: int, rows: int) -> int:
        latent = model.hidden * (model.kv_rank + model.shared_channels)
        norms = model.norm_vectors * (model.q_rank + model.kv_rank) if model.qk_norm else 0
        query = model.hidden * model.q_rank + (model.q_rank or model.hidden) * model.query_hidden // tp
        return query + latent + norms


def _projections(sizes: ChunkSizes) -> tuple[tuple[Linear, ...], Linear]:
    """Those of this rank's rows, and the one to the queries of its heads."""
    model = sizes.model
    to_queries = (model.hidden, model.q_rank), (model.q_rank, sizes.query)
    latent = model.hidden, model.kv_rank + model.shared_channels
    return ((to_queries[0], latent), to_queries[1]) if model.q_rank else ((latent,), (model.hidden, sizes.query))


def _gather(kernels: OpKernels, channels: int, again: bool = False) -> None:
    """Of so many channels over the tensor-parallel ranks; in I their gradients are summed. again: I gathers them once
    more, for W."""
    sizes = kernels.sizes
    part = sizes.tokens * channels * sizes.element * (sizes.tp - 1) / sizes.tp
    split = sizes.layout.sequence_parallel
    sent = {"F": part if split else 0.0, "I": part * (1 + again) if split else 2 * part, "W": 0.0}[kernels.op]
    if sent:
        kernels.add("network", 0.0, sent)


def _saved_by_norm(sizes: ChunkSizes, of: str, channels: int, given: int) -> Tensors:
    """given: channels of the tensor that it norms some of."""
    tensors = {f"{of} before its norm": sizes.rows * given * sizes.element, f"deviations for {of}": sizes.rows * 4.0}
    if sizes.model.norm == "LayerNorm":
        tensors[f"means for {of}"] = sizes.rows * 4
    elif not sizes.layout.fused_kernels:
        tensors[f"normalized for {of}"] = sizes.rows * channels * sizes.element
    if sizes.model.centered:
        tensors[f"scale for {of}"] = channels * sizes.element
    return tensors


class AttentionToLatents(PieceKind):
    name, module, kept_for_attention = LATENT, "", True
    saved_outputs = ("attention output",)
    inputs, in_store = {"q": "query", "k": "key", "v": "value", "into": "hidden"}, ("k", "v")
    textbook: ClassVar[Mapping[str, int]] = {"q": 1, "k": 1, "v": 1}

    def saved(self, sizes: ChunkSizes, inside: Collection[str]) -> Tensors:
        tensors = {
            "attention output": sizes.bytes("attention"),
            "log-sum": sizes.tokens * sizes.model.heads / sizes.tp * 4,
            "q": sizes.bytes("query"),
        }
        if not sizes.chunk.stored:
            # A view of what is normed or gathered, with the key beside it, unless its norm gives it or it crosses a cut
            joined = "qkv" in map(role_of, inside) and (sizes.tp > 1 or not sizes.model.qk_norm)
            tensors["k"] = sizes.bytes("key")
            tensors["v"] = sizes.bytes("value") + (sizes.bytes("key") if joined else 0.0)
        return tensors

    def work(self, kernels: OpKernels) -> None:
        if kernels.op != "W":
            self._attend(kernels)
        kernels.pause()

    def _attend(self, kernels: OpKernels) -> None:
        sizes, model, op = kernels.sizes, kernels.sizes.model, kernels.op
        heads, width = model.heads / sizes.tp, max(model.channels, model.value_channels)
        seen = sizes.chunk.seen * sizes.layout.micro_batch_size
        expansion = (model.kv_rank, heads * (model.own_channels + model.value_channels))
        kernels.multiply((expansion,), seen, "F")
        kernels.move_elements(2 * seen * heads * 2 * width)
        products = (1, 1) if op == "F" else (3, 2)  # with all channels of a key, with those of a value
        channels = products[0] * model.channels + products[1] * model.value_channels
        flops = 2 * channels * heads * sizes.chunk.pairs * sizes.layout.micro_batch_size
        moved = (2 if op == "F" else 4) * (sizes.tokens + seen) * heads * width
        kernels.add("attention", flops, moved * sizes.element)
        if op == "I":
            kernels.multiply((expansion,), seen, "I")
            kernels.multiply((expansion,), seen, "W")
            kernels.move_elements(2 * seen * heads * 2 * width)
        if sizes.chunk.stored:
            own = sizes.tokens * (model.kv_rank + model.shared_channels)
            earlier = max(seen - sizes.tokens, 0.0) * (model.kv_rank + model.shared_channels)
            kernels.move_elements(2 * own if op == "F" else 3 * own + sizes.layout.kv_passes * earlier)

    def workspace(self, sizes: ChunkSizes, op: str) -> float:
        """Every head's keys and values and, in float32, their gradients; those of queries."""
        model = sizes.model
        width = model.heads / sizes.tp * max(model.channels, model.value_channels)
        seen = sizes.chunk.seen * sizes.layout.micro_batch_size
        return 2 * seen * width * (sizes.element + 4) + sizes.tokens * width * (sizes.element + 4)

    def weights(self, model: ModelShape, tp: int, rows: int) -> int:
        sinks = model.heads if model.sinks else 0
        return (model.kv_rank * model.heads * (model.own_channels + model.value_channels) + sinks) // tp
