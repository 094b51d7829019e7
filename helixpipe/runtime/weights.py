"""Weights behind one interface: who holds them, brings them to an op, and sums their gradients.

The executor, the weights that travel and the training loops talk to a `StageWeights` or a `WeightStore`, and know
nothing of how weights are kept: whole on their rank, as megatron-core's DDP has them
(`megatron.pretrain.step.weights`), or in shards that are gathered around an op. A stage is named by its pieces, which
mean the same under every program.

During a step, on every rank, in the order of its instructions:

    zero_gradients                    the loop, before the first backward
      gather, op, release             the executor, around each op of a stage whose weights are here
      start_gathering,                the executor, where the one order of tasks has them, before and after such ops, in
      start_scattering,               a program whose weights are in parts over data-parallel ranks
      finish_scattering
      complete                        the executor, after the last backward of a stage here
      sum_replicas                    the executor, where the one order of tasks has the sum over a stage's replicas
    reduce                            the loop, after the last op: what has not been started, and waits for all
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from helixpipe.program.stages import Piece


class StageWeights(Protocol):
    """The weights of this rank's own stages, as the executor uses them; borrowed weights are not among them."""

    def begin(self) -> None:
        """Prepare a step: nothing is in progress, also if the last one failed or its opening is run again."""
        ...

    def gather(self, pieces: Sequence[Piece], kind: str) -> None:
        """Gather the weights of these pieces before an op, and what their gradients are added to, as far as an op of
        that kind needs them. Also called without an op: with F to read the weights, with W to add to the gradients.
        """
        ...

    def release(self, pieces: Sequence[Piece], kind: str, keeps: bool = False, scatters: bool = False) -> None:
        """Release the weights after that op. What it saved for its backward must be right when the backward comes,
        which gathers again.

        keeps: the next op of the stage needs the weights too, and they stay. scatters: `start_scattering` will be
        called for the gradients that the op has made.
        """
        ...

    def start_gathering(self, pieces: Sequence[Piece]) -> None:
        """Start what the next `gather` of a stage waits for."""
        ...

    def start_scattering(self, pieces: Sequence[Piece]) -> None:
        """Start to sum up, over the ranks that have parts of a stage's weights, the gradients that the oldest op that
        `release` left them of has made."""
        ...

    def finish_scattering(self, pieces: Sequence[Piece]) -> None:
        """Wait for the oldest scatter in progress."""
        ...

    def leave_to_w(self, pieces: Sequence[Piece]) -> None:
        """Pass on, at the end of an I whose weight gradients are deferred, gradients that it has summed already, for
        its W to add, if I has no sum to add to.
        """
        ...

    def complete(self, pieces: Sequence[Piece]) -> None:
        """Announce that the last backward of a stage has run here: nothing of this step will add to its gradients.

        A collective may start among ranks that run the same stream, as data-parallel ranks do; not among pipeline
        ranks, which complete stages in different orders (`sum_replicas` is for those). Not called for stages whose
        gradients other ranks send (shipped, ring), or that no op ran here.
        """
        ...

    def sum_replicas(self, pieces: Sequence[Piece]) -> None:
        """Start, and do not wait for, the sum of the gradients of a replicated stage's weights over the pipeline ranks
        that hold it: all of them call this, at the same place of the one order, after the stage's last backward on any.

        A weight that several stages use, as embedding and head may, is summed with the last of them.
        """
        ...


class WeightStore(StageWeights, Protocol):
    """The interface of weights to a training loop, besides their update (`megatron.pretrain.step.update`)."""

    def holders(self, pieces: Sequence[Piece]) -> tuple[int, ...]:
        """Return the pipeline ranks that hold weights of one of these pieces."""
        ...

    def counts_here(self, weight: torch.nn.Parameter) -> bool:
        """Whether a weight, or its part, counts on this rank when the whole model's are counted: in the norm of
        gradients, in that of weights, and in their number.
        """
        ...

    def count(self) -> tuple[int, int]:
        """Return (weights on this rank, weights of the whole model); collective over a model copy."""
        ...

    def norm(self) -> float:
        """Return the L2 norm of the whole model's weights; collective over a model copy."""
        ...

    def zero_gradients(self) -> None: ...

    def reduce(self, tokens: Tensor | None) -> None:
        """Finish the step's gradients, for the update: sum over tensor-parallel ranks where each has a part, over
        replicas and over data-parallel ranks. Collective over all ranks.

        tokens: with per-token loss, the unmasked tokens of the whole batch over all data-parallel ranks, by which the
        summed gradients are divided; else unused, since every microbatch's gradient was divided by its own tokens.
        """
        ...


class WholeWeights:
    """The `StageWeights` of weights that are always whole on their rank, and whose gradients are not summed before the
    step's end."""

    def begin(self) -> None: ...

    def gather(self, pieces: Sequence[Piece], kind: str) -> None: ...

    def release(self, pieces: Sequence[Piece], kind: str, keeps: bool = False, scatters: bool = False) -> None: ...

    def start_gathering(self, pieces: Sequence[Piece]) -> None: ...

    def start_scattering(self, pieces: Sequence[Piece]) -> None: ...

    def finish_scattering(self, pieces: Sequence[Piece]) -> None: ...

    def leave_to_w(self, pieces: Sequence[Piece]) -> None: ...

    def complete(self, pieces: Sequence[Piece]) -> None: ...

    def sum_replicas(self, pieces: Sequence[Piece]) -> None: ...
