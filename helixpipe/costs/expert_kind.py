"""What the costs know of a layer's MLP that is a mixture of experts: `mlp.moe`.

Expert-parallel ranks have as many tokens after their exchange as before it where experts are used alike; else all wait
for the rank that has most (`Layout.expert_load`), whose time and memory these are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import ClassVar

from helixpipe.costs.models import ModelShape
from helixpipe.costs.piece_kind import PieceKind, Tensors, saved_by_norm
from helixpipe.costs.sizes import ARRIVED, GRADIENT_BYTES, SENT, ChunkSizes, Kernel, Linear, OpKernels
from helixpipe.program.stages import EXPERTS


class ExpertMlp(PieceKind):
    """The norm, the router, the tokens' way to the experts and back, the experts, shared experts, the residual."""

    name, inputs = EXPERTS, {"after attention": "hidden"}
    textbook: ClassVar[Mapping[str, int]] = {"after attention": 1, "mlp input": 1, "mlp inner": 4, "mlp product": 4}

    def linears(self, sizes: ChunkSizes) -> tuple[Linear, ...]:
        return _two(sizes, sizes.model.expert_ffn, sizes.layout.expert_tensor_parallel)

    def saved(self, sizes: ChunkSizes, inside: Collection[str]) -> Tensors:
        model, element = sizes.model, sizes.element
        routed = _routed(sizes)
        scores = sizes.rows * model.experts
        tensors = saved_by_norm(sizes, self) | {
            "mlp input": sizes.bytes("hidden"),
            "scores of experts": scores * 3 * 4,
            "where tokens go": scores,
            "tokens of experts": routed * model.hidden * element,
        }
        tensors |= _inner(sizes, "expert", routed * _own_width(sizes))
        if model.shared_ffn:
            tensors |= _inner(sizes, "shared expert", sizes.tokens * model.shared_ffn / sizes.tp)
        return tensors

    def deferred(self, sizes: ChunkSizes) -> float:
        own = sum(_routed(sizes) * (inputs + outputs) for inputs, outputs in self.linears(sizes))
        shared = _two(sizes, sizes.model.shared_ffn, sizes.tp) if sizes.model.shared_ffn else ()
        return (own + sum(sizes.tokens * (inputs + outputs) for inputs, outputs in shared)) * sizes.element

    def work(self, kernels: OpKernels) -> None:
        sizes, model, op = kernels.sizes, kernels.sizes.model, kernels.op
        kernels.normalize()
        if op != "W":  # the router's weight has its gradient in I
            kernels.multiply(((model.hidden, model.experts),) * (1 if op == "F" else 2), sizes.rows)
            kernels.move(10 * 4 * sizes.rows * model.experts)  # scores, the best of them, and where tokens go
        shared = _shared(kernels, op)
        _travel(kernels, shared, (*shared, *(_shared(kernels, "W") if kernels.joined and op == "I" else ())))
        tokens = _routed(sizes)
        kernels.list += [_of_each(sizes, linear, tokens, op) for linear in self.linears(sizes)]
        _activate(kernels, tokens * _own_width(sizes))
        _travel(kernels)
        if op != "W":
            kernels.move_elements(3 * sizes.rows * model.hidden)

    def workspace(self, sizes: ChunkSizes, op: str) -> float:
        """Tokens that come and go; in a backward, the gradients of one expert after another as well. By the time of
        shared experts' what the others kept has gone."""
        tokens = _routed(sizes) * sizes.model.hidden * sizes.element
        if op == "F":
            return 2 * tokens
        experts = sizes.model.experts / sizes.layout.expert_parallel
        product = _routed(sizes) * _own_width(sizes) * sizes.element / experts
        inner = sizes.first * product
        activation = 0.0 if sizes.layout.fused_kernels else product
        if op == "I":  # what each expert multiplies stays for W
            return tokens + max(2 * tokens, tokens - tokens / experts + product + activation + inner)
        first, second = map(sizes.weight, self.linears(sizes))
        saved = sum(_inner(sizes, "expert", _routed(sizes) * _own_width(sizes)).values()) / experts
        of_first = inner + tokens / experts + first - saved
        return tokens + max(tokens, product + second, activation + inner, of_first)

    def weights(self, model: ModelShape, tp: int, rows: int) -> int:
        """All experts'; see `expert_weights`."""
        router = (model.hidden + model.bias) * model.experts
        shared = _weights(model, model.shared_ffn, tp)
        return model.norm_parameters + router + shared + self.expert_weights(model, tp)

    def expert_weights(self, model: ModelShape, tp: int) -> int:
        return model.experts * _weights(model, model.expert_ffn, tp)


def _two(sizes: ChunkSizes, ffn: int, tp: int) -> tuple[Linear, Linear]:
    """The linear layers of an MLP of that inner size, split over so many ranks."""
    inner, hidden = ffn / tp, sizes.model.hidden
    return (hidden, sizes.first * inner), (inner, hidden)


def _weights(model: ModelShape, ffn: int, tp: int) -> int:
    if not ffn:
        return 0
    first = (model.hidden + model.bias) * ffn * (2 if model.gated else 1) // tp
    return first + ffn * model.hidden // tp + model.bias * model.hidden


def _routed(sizes: ChunkSizes) -> float:
    """Tokens that the experts of a rank get, counting one for each of its experts: those of as many ranks as each
    expert is split over, times the load of the busiest."""
    layout = sizes.layout
    return sizes.tokens * sizes.model.topk * layout.expert_tensor_parallel / sizes.tp * layout.expert_load


def _own_width(sizes: ChunkSizes) -> float:
    """Inner channels of an expert on one rank."""
    return sizes.model.expert_ffn / sizes.layout.expert_tensor_parallel


def _inner(sizes: ChunkSizes, of: str, inner: float) -> Tensors:
    """What so many inner elements keep between the linear layers."""
    inner *= sizes.element
    tensors = {f"{of} product": inner, f"{of} inner": sizes.first * inner}
    if sizes.model.gated and not sizes.layout.fused_kernels:
        tensors |= {f"{of} activated": inner, f"{of} linear half": inner}
    return tensors


def _of_each(sizes: ChunkSizes, linear: Linear, tokens: float, op: str) -> Kernel:
    """The products of a linear layer of each expert here with its share of the tokens, as one kernel."""
    inputs, outputs = linear
    experts = sizes.model.experts / sizes.layout.expert_parallel
    of_weights = inputs * outputs * experts * (2 * GRADIENT_BYTES if op == "W" else sizes.element)
    moved = tokens * (inputs + outputs) * sizes.element + of_weights
    return Kernel("matmul", 2 * tokens * inputs * outputs, moved, rows=tokens / experts)


def _activate(kernels: OpKernels, inner: float) -> None:
    """The activation function, and the product with the router's probability."""
    first = kernels.sizes.first
    if kernels.op == "F":
        kernels.move_elements(inner * (first + 3))
    elif kernels.op == "I":
        kernels.move_elements(inner * (2 * first + 4))


def _shared(kernels: OpKernels, op: str) -> tuple[Kernel, ...]:
    """Of the experts that all tokens go to."""
    sizes = kernels.sizes
    if not sizes.model.shared_ffn:
        return ()
    own = OpKernels(sizes, op, kernels.alone, kernels.joined, kernels.halved)
    first, second = _two(sizes, sizes.model.shared_ffn, sizes.tp)
    own.gather_input(first)
    own.multiply((first, second))
    _activate(own, sizes.tokens * sizes.model.shared_ffn / sizes.tp)
    own.scatter_output()
    return tuple(own.list)


def _travel(kernels: OpKernels, between: tuple[Kernel, ...] = (), beside: tuple[Kernel, ...] = ()) -> None:
    """Tokens, or their gradients, from their rows to the experts, or back: sorted on either side, sent to the
    expert-parallel rank that has the expert, and gathered by or summed over tensor-parallel ranks. between: what this
    op runs while they are on their way; beside: with what follows at once."""
    sizes, sent = kernels.sizes, sent_to_experts(kernels.sizes)
    sorted_elements = 2 * sizes.rows * sizes.model.topk * sizes.model.hidden if kernels.op != "W" else 0.0
    kernels.move_elements(sorted_elements)
    if kernels.stepped:
        kernels.end_step(SENT)
    elif sent and kernels.op != "W":
        kernels.add("experts", 0.0, sent, beside)
    kernels.list += between
    if kernels.stepped:
        kernels.end_step(ARRIVED)
    kernels.move_elements(sorted_elements)
    parts = sizes.layout.expert_tensor_parallel
    if parts > 1 and kernels.op != "W":
        kernels.add("network", 0.0, _routed(sizes) * sizes.model.hidden * sizes.element * (parts - 1) / parts)


def sent_to_experts(sizes: ChunkSizes) -> float:
    """Bytes of an exchange of a chunk's tokens with the ranks of experts: what each rank sends or, where some are used
    more, the busiest one gets; nothing if it has all experts."""
    ranks, load = sizes.layout.expert_parallel, sizes.layout.expert_load
    return sizes.rows * sizes.model.topk * sizes.model.hidden * sizes.element * (ranks - 1) / ranks * load
