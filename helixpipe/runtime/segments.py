"""Holds what a unit keeps for its backward: one autograd graph for each segment of its stage, from F to B or I."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from helixpipe.program.stages import Segment


@dataclass
class SegmentGraph:
    """One segment of a unit, between its F and its backward: the ends of its autograd graph.

    roots: for each output the edge its gradient enters by, or the number of the input that it is (a residual passing
    by); None while the segment is still to be recomputed.
    """

    segment: Segment
    inputs: tuple[Tensor, ...]
    roots: tuple[GradientEdge | int, ...] | None


def leaves(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the inputs of a separate graph. A view of a larger tensor is copied, so that the rest of
    it can be freed.
    """
    return tuple([
        (tensor.detach().clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor.detach())
        .requires_grad_()
        for tensor in tensors
    ])  # fmt: skip


def roots(inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> tuple[GradientEdge | int, ...]:
    """Return the edges of the outputs, not tensors: a backward needs no output's data, which can be freed once it is
    sent.
    """
    numbers = {id(tensor): index for index, tensor in enumerate(inputs)}
    return tuple([numbers[id(each)] if id(each) in numbers else get_gradient_edge(each) for each in outputs])


def split(
    roots: tuple[GradientEdge | int, ...], gradients: tuple[Tensor, ...]
) -> tuple[tuple[GradientEdge, ...], tuple[Tensor, ...], dict[int, Tensor]]:
    """Return (edges, the gradients that enter there, the gradients that pass by, by the number of the input)."""
    if int not in map(type, roots):
        return cast(tuple[GradientEdge, ...], roots), gradients, {}
    pairs = list(zip(roots, gradients, strict=True))
    passed = {root: given for root, given in pairs if isinstance(root, int)}
    edges, given = zip(*[pair for pair in pairs if not isinstance(pair[0], int)], strict=True)
    return edges, given, passed


def gradient(tensor: Tensor, passed: Tensor | None) -> Tensor:
    """Return the gradient of an input: what autograd accumulated in it, plus what passed by the segment."""
    own, tensor.grad = tensor.grad, None
    if own is None:
        return passed if passed is not None else tensor.new_zeros(tensor.shape)
    return own if passed is None else own + passed


def release_inputs(graph: SegmentGraph) -> None:
    """Free, after F, the inputs' data that the backward does not need, or receives again."""
    segment = graph.segment
    if segment.passes_residual:
        residual = graph.inputs[-1]
        residual.data = residual.new_empty(1).expand(residual.shape)  # autograd asks for the shape
        residual.untyped_storage().resize_(0)
    if segment.inputs_again:
        for tensor in graph.inputs[:-1]:
            if tensor.untyped_storage().nbytes() == tensor.nbytes:  # not a chunk's rows in the store
                tensor.untyped_storage().resize_(0)  # what autograd saved of it are views of this storage


def fill_inputs(inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
    """Give inputs their data back from the recomputed outputs before them, all but the residual's, which is not
    needed."""
    for tensor, output in zip(inputs[:-1], outputs[:-1], strict=True):
        if tensor.untyped_storage().nbytes() == 0:
            tensor.untyped_storage().resize_(tensor.nbytes)
            tensor.data.copy_(output.detach())  # .data: autograd's version of what it saved stays
