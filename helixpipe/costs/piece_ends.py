"""The kinds of piece at the two ends of the model: embedding, and output layer with the loss. See `piece_kinds`."""

from __future__ import annotations

from collections.abc import Collection

from helixpipe.costs.models import ModelShape
from helixpipe.costs.piece_kind import PieceKind, Tensors, saved_by_norm
from helixpipe.costs.sizes import GRADIENT_BYTES, ChunkSizes, Linear, OpKernels


class Embed(PieceKind):
    name, inputs, kept_for_attention = "embed", {}, True

    def saved(self, sizes: ChunkSizes, inside: Collection[str]) -> Tensors:
        model = sizes.model
        split = 0 < model.position_rows(sizes.tp) < model.seq_length
        positions = sizes.length if model.positions == "learned_absolute" else 0
        words = sizes.tokens if sizes.tp > 1 or sizes.layout.rings else 0
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
        kernels.exchange(forward="scatter", backward="gather")

    def workspace(self, sizes: ChunkSizes) -> float:
        return 2 * sizes.tokens * sizes.model.hidden * sizes.element

    def weights(self, model: ModelShape, tp: int, rows: int) -> int:
        return (rows + model.position_rows(tp)) * model.hidden


class Head(PieceKind):
    name, inputs, kept_for_attention = "head", {"last": "hidden"}, True

    def linears(self, sizes: ChunkSizes) -> tuple[Linear, ...]:
        return ((sizes.model.hidden, sizes.vocab),)

    def saved(self, sizes: ChunkSizes, inside: Collection[str]) -> Tensors:
        own = saved_by_norm(sizes, self) | {"head input": sizes.bytes("hidden")}
        if sizes.layout.loss_chunk:
            return own
        targets = {"targets": sizes.tokens * 8, "mask of targets": sizes.tokens}
        if sizes.layout.rings:  # two runs joined
            targets["weights of targets"] = sizes.tokens * 4
        return own | targets | {"probabilities": sizes.tokens * sizes.vocab * 4}

    def deferred(self, sizes: ChunkSizes) -> float:
        return 0.0 if sizes.layout.loss_chunk else super().deferred(sizes)

    def work(self, kernels: OpKernels) -> None:
        sizes, op, sliced = kernels.sizes, kernels.op, kernels.sizes.layout.loss_chunk > 0
        if sliced and op == "W":
            return
        kernels.normalize()
        if sliced and op == "F" and not kernels.alone:
            return
        kernels.exchange(forward="gather", backward="scatter", again=True)
        for tokens in sizes.layout.loss_slices(sizes.length):
            tokens *= sizes.layout.micro_batch_size
            for part in "FIW" if sliced and op == "I" else op:
                kernels.multiply(self.linears(sizes), tokens, part)
                kernels.move(tokens * sizes.vocab * self._loss_bytes(sizes, part))

    def _loss_bytes(self, sizes: ChunkSizes, op: str) -> float:
        """Of device memory, for each logit."""
        if op == "F":  # cast to float32; then maximum, difference, exponential, sum, quotient
            return sizes.element + 4 + 4 + 8 + 8 + 4 + 8
        return 8 + 4 + sizes.element if op == "I" else 0.0  # softmax times the loss's gradient, cast back

    def workspace(self, sizes: ChunkSizes) -> float:
        """The logits and their gradients; over slices those of one, or of one the gradients and the weight's before it
        is added to its sum, and the gradient of the whole input."""
        if not sizes.layout.loss_chunk:
            return sizes.tokens * sizes.vocab * (4 + 2 * sizes.element)
        whole, norm = sizes.tokens * sizes.model.hidden * sizes.element, 2 * sizes.bytes("hidden")
        logits = max(sizes.layout.loss_slices(sizes.length)) * sizes.layout.micro_batch_size * sizes.vocab
        cast = sizes.element if sizes.element != 4 else 0  # float32 logits become probabilities where they are
        weight = sizes.vocab * sizes.model.hidden * sizes.element
        return max(whole + max(logits * (4 + cast), logits * sizes.element + weight), norm)

    def weights(self, model: ModelShape, tp: int, rows: int) -> int:
        return model.norm_parameters + rows * model.hidden
