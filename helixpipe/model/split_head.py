"""Output layer and cross entropy whose vocabulary is divided over pipeline ranks, each of which has some of its rows.

Every rank computes its logits, and of each token three numbers (`SUMS`): the largest logit, the sum of the exponentials
of the others relative to it, and the target's logit, 0 where that is on another rank. The numbers of all ranks together
give the loss, and the gradient of a rank's own three, from which that of its logits follows with nothing more from
others. So there is one exchange between forward and backward, of three numbers a token and rank (Yeung et al.,
"Balancing Pipeline Parallelism with Vocabulary Parallelism", 2024, which has the derivation with one barrier).

With M the largest of all maxima m_r, and S the sum of s_r exp(m_r - M), a token's loss is log S + M - t. As s_r is made
of exp(x - m_r), its derivative to s_r is exp(m_r - M) / S, and with m_r taken as a constant that gives every logit its
probability exp(x - M) / S; the derivative to the target's logit is -1.

Tensor-parallel ranks divide the vocabulary first, and pipeline ranks the rows of each tensor-parallel rank: sums over
the former are part of the forward. Over slices (`--loss-chunk-size`) the forward keeps the input alone, and the
backward computes the logits again, slice by slice, with the weight's gradient.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from torch import Tensor

from helixpipe.model.ends import Targets
from helixpipe.model.linear import add_weight_gradient
from helixpipe.model.slices import Slices

SUMS = 3
"""Numbers of a token that the parts of a head exchange."""


def sums_dtype(hidden: torch.dtype) -> torch.dtype:
    """The type of the sums for hidden states of a type: float32, in which losses are computed, or a wider one."""
    return torch.promote_types(hidden, torch.float32)


def part_of_weight(whole: torch.nn.Parameter, rows: slice) -> torch.nn.Parameter:
    """A copy of some rows of a weight, with the attributes that megatron-core gave it."""
    part = torch.nn.Parameter(whole.detach()[rows].clone())
    vars(part).update(vars(whole))
    return part


class VocabularyRows(NamedTuple):
    """The rows of the vocabulary that logits are of: from `first` on, as many as there are logits. group: of the
    tensor-parallel ranks."""

    first: int
    group: dist.ProcessGroup


def part_sums(logits: Tensor, labels: Tensor, rows: VocabularyRows) -> Tensor:
    """[3, s, b] of logits [s, b, rows] and labels [s, b], in `sums_dtype`. May overwrite the logits."""
    sums: Tensor = _PartSums.apply(logits, labels, rows)
    return sums


def joined(sums: Tensor) -> tuple[Tensor, Tensor]:
    """(losses [s, b], the largest logit plus the logarithm of the sum of exponentials [s, b]) of the sums of all parts,
    [parts, 3, s, b]."""
    maxima, exponentials, targets = sums.unbind(1)
    maximum = maxima.amax(0)
    total = maximum + torch.log(torch.sum(exponentials * torch.exp(maxima - maximum), 0))
    return total - targets.sum(0), total


def sums_gradient(own: Tensor, total: Tensor, weights: Tensor) -> Tensor:
    """The gradient of one part's sums [3, s, b]. total: as `joined` gives it. weights: [s, b], the gradient of each
    token's loss."""
    weights = weights.to(own.dtype)
    return torch.stack([torch.zeros_like(total), weights * torch.exp(own[0] - total), -weights])


class SlicedSums:
    """The sums of a part of a head, over slices of the sequence. weight: [rows, h]. fused: as in
    `add_weight_gradient`."""

    def __init__(self, slices: Slices, weight: torch.nn.Parameter, rows: VocabularyRows, fused: bool):
        self.slices, self.weight, self.rows, self.fused = slices, weight, rows, fused

    def sums(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """[3, s, b]. hidden: the normed hidden states [s, b, h], with sequence parallelism [s / tp, b, h]."""
        sums: Tensor = _SumsOverSlices.apply(hidden, self, labels)
        return sums

    def logits(self, tokens: Tensor) -> Tensor:
        return torch.matmul(tokens, self.weight.detach().t())


def _sums(logits: Tensor, labels: Tensor, rows: VocabularyRows) -> tuple[Tensor, Tensor, Tensor]:
    """(sums; exponentials of the logits relative to the maximum, where they or a copy were; index of each token's
    target among the rows, -1 where that is none of them)."""
    values = logits.to(sums_dtype(logits.dtype))
    maximum = values.amax(-1)
    if rows.group.size() > 1:
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group=rows.group)
    index = _target_index(labels, rows.first, values.size(-1))
    target = values.gather(-1, index.clamp(min=0)[..., None])[..., 0].masked_fill(index < 0, 0.0)
    values.sub_(maximum[..., None]).exp_()
    added = torch.stack([values.sum(-1), target])
    if rows.group.size() > 1:
        dist.all_reduce(added, group=rows.group)
    return torch.cat([maximum[None], added]), values, index


def _target_index(labels: Tensor, first: int, count: int) -> Tensor:
    index = labels - first
    return index.masked_fill((index < 0) | (index >= count), -1)


def _logit_gradient(exponentials: Tensor, index: Tensor, gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of the logits from that of the sums; overwrites the exponentials."""
    own = exponentials.mul_(gradient[1][..., None])
    own.scatter_add_(-1, index.clamp(min=0)[..., None], gradient[2].masked_fill(index < 0, 0.0)[..., None])
    return own.to(dtype)


class _PartSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, rows: VocabularyRows) -> Tensor:
        sums, exponentials, index = _sums(logits.detach(), labels, rows)
        ctx.save_for_backward(exponentials, index)
        ctx.dtype = logits.dtype
        return sums

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        exponentials, index = ctx.saved_tensors
        return _logit_gradient(exponentials, index, gradients[0], ctx.dtype), None, None


class _SumsOverSlices(torch.autograd.Function):
    """The weight's gradient is added to its sum directly, slice by slice."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, part: SlicedSums, labels: Tensor) -> Tensor:
        whole = part.slices.gathered(hidden)
        slices = part.slices.rows(whole.size(0))
        sums = torch.cat([_sums(part.logits(whole[own]), labels[own], part.rows)[0] for own in slices], 1)
        ctx.save_for_backward(hidden, labels, sums[0].clone())
        ctx.part = part
        return sums

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (hidden, labels, maximum), part, (gradient,) = ctx.saved_tensors, ctx.part, gradients
        slices: Slices = part.slices
        whole = slices.gathered(hidden)
        # A slice of the gathered input is not needed once its gradient is there, which takes its place.
        input_gradient = whole if slices.sequence_parallel else torch.empty_like(whole)
        for own in slices.rows(whole.size(0)):
            logits = part.logits(whole[own])
            exponentials = logits.to(maximum.dtype).sub_(maximum[own][..., None]).exp_()
            index = _target_index(labels[own], part.rows.first, logits.size(-1))
            of_logits = _logit_gradient(exponentials, index, gradient[:, own], logits.dtype)
            del logits, exponentials
            add_weight_gradient(part.weight, whole[own], of_logits, part.fused)
            torch.mm(of_logits.flatten(0, 1), part.weight.detach(), out=input_gradient[own].flatten(0, 1))
        return slices.summed(input_gradient), None, None


def part_loss(sums: Tensor, own: int, targets: Targets) -> tuple[Tensor, Tensor]:
    """(the loss sum, a scalar; the gradient of sums[own], [3, s, b], where that of the loss sum is 1). sums:
    [parts, 3, s, b], of all parts in any order."""
    losses, total = joined(sums)
    return torch.sum(losses * targets.weights), sums_gradient(sums[own], total, targets.weights)


def shard_rows(model: Any, state: ShardedStateDict, prefix: str, first_row: int) -> None:
    """Let the entry of the output layer be this rank's rows of the whole weight: of the embedding's, where they are
    tied, whose rank writes all of it. Parts need not be equal, so that rows have offsets and no number of parts; all
    entries of one weight alike. model: a `PipelineModel` with a part of the head. first_row: in the whole vocabulary.
    """
    name, words = f"{prefix}output_layer.weight", f"{prefix}embedding.word_embeddings.weight"
    weight, tied = model.output_layer.weight, model.share_embeddings_and_output_weights
    state[name] = replace(
        state[name],
        key=words if tied else name,
        global_shape=(model.gpt.vocab_size, weight.size(1)),
        global_offset=(first_row, 0),
        axis_fragmentations=None,
        replica_id=(1 + model.head_part.part[0], *state[name].replica_id[1:]) if tied else state[name].replica_id,
        allow_shape_mismatch=True,  # vocabulary padding, as for the embedding
    )
    if tied and words in state:
        state[words] = replace(state[words], axis_fragmentations=None)
