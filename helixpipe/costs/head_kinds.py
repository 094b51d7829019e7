"""The kinds of piece of the model's end: a head, and what it is made of where its vocabulary is divided over ranks."""

from __future__ import annotations

from collections.abc import Collection

from helixpipe.costs import further_tokens
from helixpipe.costs.further_tokens import Kinds
from helixpipe.costs.models import AUTOGRAD, FUSED, ModelShape
from helixpipe.costs.piece_kind import PieceKind, Tensors, saved_by_norm
from helixpipe.costs.sizes import ChunkSizes, Linear, OpKernels
from helixpipe.program.stages import HEAD_MTP, HEAD_NORM, HEAD_PART


class PlainHead(PieceKind):
    """The final norm, the output layer and the loss of the next token."""

    name, inputs, kept_for_attention, by_tokens = "head", {"last": "hidden"}, True, True

    def linears(self, sizes: ChunkSizes) -> tuple[Linear, ...]:
        return ((sizes.model.hidden, sizes.vocab),)

    def saved(self, sizes: ChunkSizes, inside: Collection[str]) -> Tensors:
        own = saved_by_norm(sizes, self) | {"head input": sizes.bytes("hidden")}
        if sizes.layout.loss_chunk:
            return own
        targets = {"targets": sizes.tokens * 8, "mask of targets": sizes.tokens}
        if sizes.layout.rings or sizes.layout.reorders_rows:  # runs joined
            targets["weights of targets"] = sizes.tokens * 4
        logits = sizes.tokens * sizes.vocab
        if sizes.layout.loss == FUSED:
            return own | targets | {"logits": logits * sizes.element}
        return own | targets | {"probabilities": logits * 4}

    def deferred(self, sizes: ChunkSizes) -> float:
        return 0.0 if sizes.layout.loss_chunk else super().deferred(sizes)

    def work(self, kernels: OpKernels) -> None:
        op, sliced = kernels.op, kernels.sizes.layout.loss_chunk > 0
        if sliced and op == "W":
            return
        kernels.normalize()
        if sliced and op == "F" and not kernels.alone:
            return
        self._output_layer(kernels)

    def _output_layer(self, kernels: OpKernels) -> None:
        """All but the norm."""
        sizes, op, sliced = kernels.sizes, kernels.op, kernels.sizes.layout.loss_chunk > 0
        (linear,) = self.linears(sizes)
        kernels.gather_input(linear, beside=not sliced)
        for tokens in sizes.layout.loss_slices(sizes.length):
            tokens *= sizes.layout.micro_batch_size
            for part in "FIW" if sliced and op == "I" else op:
                kernels.multiply((linear,), tokens, part)
                kernels.move(tokens * sizes.vocab * self._loss_bytes(sizes, part))

    def _loss_bytes(self, sizes: ChunkSizes, op: str) -> float:
        """Of device memory, for each logit."""
        if sizes.layout.loss == FUSED:  # read; read again, and its gradient written
            return {"F": 1, "I": 2, "W": 0}[op] * sizes.element
        if op == "F":  # cast to float32; then maximum, difference, exponential, sum, quotient
            return sizes.element + 4 + 4 + 8 + 8 + 4 + 8
        return 8 + 4 + sizes.element if op == "I" else 0.0  # softmax times the loss's gradient, cast back

    def workspace(self, sizes: ChunkSizes, op: str) -> float:
        """Of each logit; in a backward then of the linear layer, beside the gradients of logits, which have gone
        themselves. Over slices the logits of one, or of one the gradients and the weight's before it is added to its
        sum, and the gradient of the whole input."""
        if sizes.layout.loss_chunk:
            return max(self._sliced_workspace(sizes), 2 * sizes.bytes("hidden"))
        logits = sizes.tokens * sizes.vocab
        own = max(logits * self._loss_workspace(sizes), 2 * sizes.bytes("hidden"))
        if op == "F":
            return own
        saved = sizes.element if sizes.layout.loss == FUSED else 4
        product = sum(map(sizes.weight, self.linears(sizes))) if op == "B" else sizes.gathered
        return max(own, logits * (sizes.element - saved) + sizes.hidden + sizes.scattered + product)

    def _loss_workspace(self, sizes: ChunkSizes) -> int:
        """Of a logit."""
        if sizes.layout.loss == AUTOGRAD:
            return 8  # in float32 the gradients of logarithms of probabilities and of logits
        if sizes.layout.loss == FUSED:
            return sizes.element  # the gradient
        return sizes.element if sizes.element != 4 else 0  # what is cast to float32, and the gradient cast back

    def _sliced_workspace(self, sizes: ChunkSizes) -> float:
        """Of the output layer over slices."""
        whole = sizes.tokens * sizes.model.hidden * sizes.element
        logits = max(sizes.layout.loss_slices(sizes.length)) * sizes.layout.micro_batch_size * sizes.vocab
        cast = sizes.element if sizes.element != 4 else 0  # float32 logits become probabilities where they are
        weight = sizes.vocab * sizes.model.hidden * sizes.element
        return whole + max(logits * (4 + cast), logits * sizes.element + weight)

    def weights(self, model: ModelShape, tp: int, rows: int) -> int:
        return model.norm_parameters + rows * model.hidden


class Head(PlainHead):
    """The head of a model, with its predictions of further tokens where it has some, whatever a program calls it.
    kinds: of layers' pieces and `embed`, by name."""

    def __init__(self, kinds: Kinds):
        self._kinds = kinds
        self._once = PlainHead()

    def saved(self, sizes: ChunkSizes, inside: Collection[str]) -> Tensors:
        own = super().saved(sizes, inside)
        return own | further_tokens.saved(self._kinds, self._once, sizes) if sizes.model.further else own

    def deferred(self, sizes: ChunkSizes) -> float:
        own = super().deferred(sizes)
        return own + further_tokens.deferred(self._kinds, self._once, sizes) if sizes.model.further else own

    def work(self, kernels: OpKernels) -> None:
        super().work(kernels)
        if kernels.sizes.model.further:
            further_tokens.work(self._kinds, self._once, kernels)

    def workspace(self, sizes: ChunkSizes, op: str) -> float:
        own = super().workspace(sizes, op)
        return max(own, further_tokens.workspace(self._kinds, sizes, op)) if sizes.model.further else own

    def weights(self, model: ModelShape, tp: int, rows: int) -> int:
        own = super().weights(model, tp, rows)
        return own + further_tokens.weights(self._kinds, model, tp, rows) if model.further else own

    def expert_weights(self, model: ModelShape, tp: int) -> int:
        return further_tokens.expert_weights(self._kinds, model, tp) if model.further else 0


class HeadOfFurtherTokens(Head):
    """It has keys and values, of its layers."""

    name = HEAD_MTP

    def stored(self, sizes: ChunkSizes) -> float:
        return further_tokens.stored(self._kinds, sizes)


class HeadNorm(PieceKind):
    """The final norm of a head whose vocabulary is divided over ranks."""

    name, inputs, kept_for_attention = HEAD_NORM, {"last": "hidden"}, True

    def saved(self, sizes: ChunkSizes, inside: Collection[str]) -> Tensors:
        return saved_by_norm(sizes, self)

    def work(self, kernels: OpKernels) -> None:
        kernels.normalize()

    def workspace(self, sizes: ChunkSizes, op: str) -> float:
        return 2 * sizes.bytes("hidden")

    def weights(self, model: ModelShape, tp: int, rows: int) -> int:
        return model.norm_parameters


class HeadPart(PlainHead):
    """One part of such a head; `ChunkSizes.vocab` are its own rows. Over slices it makes its logits in F, for their
    sums, and again in I."""

    name, inputs = HEAD_PART, {"head input": "hidden"}

    def saved(self, sizes: ChunkSizes, inside: Collection[str]) -> Tensors:
        own = {"head input": sizes.bytes("hidden")}
        if sizes.layout.loss_chunk:
            joined = {"labels": sizes.tokens * 8} if sizes.layout.rings else {}  # of two runs
            return own | joined | {"maxima": sizes.tokens * 4}
        return own | {"targets": sizes.tokens * 8, "exponentials": sizes.tokens * sizes.vocab * 4}

    def work(self, kernels: OpKernels) -> None:
        if not kernels.sizes.layout.loss_chunk or kernels.op != "W":
            self._output_layer(kernels)

    def _loss_bytes(self, sizes: ChunkSizes, op: str) -> float:
        """Of device memory, for each logit."""
        if op == "F":  # cast to float32; then maximum, difference, exponential, sum
            return sizes.element + 4 + 4 + 8 + 8 + 4
        return 8 + 4 + sizes.element if op == "I" else 0.0  # exponentials times the gradient of their sum, cast back

    def workspace(self, sizes: ChunkSizes, op: str) -> float:
        """As the head's, without its norm."""
        return super().workspace(sizes, op) if not sizes.layout.loss_chunk else self._sliced_workspace(sizes)

    def weights(self, model: ModelShape, tp: int, rows: int) -> int:
        return rows * model.hidden
