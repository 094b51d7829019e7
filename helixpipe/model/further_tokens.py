"""Layers that predict tokens after the next (multi-token prediction; DeepSeek-V3 Technical Report, 2024, section 2.2).

Layer n joins what the layer before gave, at first the model's normed hidden states, with the embedding of the token
n + 1 after each, and its output is the head's input for that token's successor. Names are megatron-core's
(`MultiTokenPredictionLayer`), whose modules tell no chunk, document or unit to the transformer layer inside them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from helixpipe.model.device import device
from helixpipe.model.layers import DrawWeights, Layer
from helixpipe.model.norms import make_norm
from helixpipe.model.options import Microbatch, UnitContext, layers_of
from helixpipe.program.stages import role_of


class FurtherToken(MegatronModule):
    """One of the layers. layer: the transformer layer, made of all its pieces."""

    def __init__(
        self,
        config: TransformerConfig,
        norm: str,
        tp_group: torch.distributed.ProcessGroup,
        draw: AbstractContextManager[None],
        layer: Callable[[], Layer],
    ):
        super().__init__(config)
        self.tp_group = tp_group
        self.enorm = make_norm(config, norm)
        self.hnorm = make_norm(config, norm)
        assert config.init_method is not None  # TransformerConfig fills it in
        with draw:
            self.eh_proj = ColumnParallelLinear(
                2 * config.hidden_size,
                config.hidden_size,
                config=config,
                init_method=config.init_method,
                bias=False,
                gather_output=False,
                skip_bias_add=False,
                tp_group=tp_group,
            )
        self.transformer_layer = layer()
        self.final_layernorm = make_norm(config, norm)

    def join(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """Hidden states and the embeddings of later tokens, each [s, b, h], with sequence parallelism [s / tp, b, h],
        to what the transformer layer works on, of the same shape."""
        joined, _ = self.eh_proj(torch.cat((self.enorm(embedding), self.hnorm(hidden)), -1))
        joined = gather_from_tensor_model_parallel_region(joined, group=self.tp_group)
        if self.config.sequence_parallel:
            joined = scatter_to_sequence_parallel_region(joined, group=self.tp_group)
        result: Tensor = joined
        return result


class FurtherTokens(MegatronModule):
    """All of them, in order. make_layer: makes a transformer layer from its number and its kinds by their roles."""

    def __init__(
        self,
        config: TransformerConfig,
        norm: str,
        tp_group: torch.distributed.ProcessGroup,
        draw: DrawWeights,
        make_layer: Callable[[int, Mapping[str, str]], Layer],
    ):
        super().__init__(config)
        kinds = {role_of(kind): kind for kind in layers_of(config)[-1]}
        numbers = range(config.num_layers, config.num_layers + (config.mtp_num_layers or 0))
        self.layers = torch.nn.ModuleList(
            FurtherToken(config, norm, tp_group, draw(f"mtp[{number}]"), partial(make_layer, number, kinds))
            for number in numbers
        )

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Keys with the layers' numbers, as megatron-core's block of them has."""
        state: ShardedStateDict = {}
        for number, layer in enumerate(self.layers):
            state.update(layer.sharded_state_dict(f"{prefix}layers.{number}.", (), metadata))  # type: ignore[operator]
        return state


def further(batch: Microbatch, steps: int, positions: bool) -> Microbatch:
    """The batch with the tokens, labels and weights of so many tokens further on in each place; 0 where the document
    ends before. positions: whether those are asked for, which are learned."""
    length = batch.tokens.size(1)
    own = None if batch.documents is None else batch.documents.positions().t()
    counted = torch.arange(length, device=batch.tokens.device).expand_as(batch.tokens) if own is None else own

    def moved(tensor: Tensor) -> Tensor:
        result = torch.zeros_like(tensor)
        result[:, : length - steps] = tensor[:, steps:]
        if own is not None:
            same = own[:, steps:] == own[:, : length - steps] + steps  # in the same document
            result[:, : length - steps].masked_fill_(~same, 0)
        return result

    places = counted if batch.position_ids is None else batch.position_ids
    return replace(
        batch,
        tokens=moved(batch.tokens),
        labels=moved(batch.labels),
        loss_mask=moved(batch.loss_mask),
        position_ids=moved(places) if positions else batch.position_ids,
    )


def cut(batch: Microbatch, unit: UnitContext) -> tuple[Microbatch, UnitContext]:
    """A chunk's own tokens, so that what is kept of them is not the whole sequence's."""
    if unit.length is None:
        return batch, unit
    tokens, labels, mask = (each[:, unit.tokens].contiguous() for each in (batch.tokens, batch.labels, batch.loss_mask))
    positions = None if batch.position_ids is None else batch.position_ids[:, unit.tokens]
    return Microbatch(tokens, labels, mask, positions), unit._replace(offset=0, length=None)


class _WithFurtherLosses(torch.autograd.Function):
    """A loss sum, whose gradient is also that of other loss sums, each times a factor."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, factors: Sequence[Tensor], *others: Tensor) -> Tensor:
        ctx.factors = factors
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None, *(gradients[0] * factor for factor in ctx.factors)


def _factor(config: TransformerConfig, batch: Microbatch, moved: Microbatch) -> Tensor:
    """What the gradient of a later token's loss sum is of that of the next token's: with a mean over tokens, each is
    one over its own tokens in the microbatch, as in megatron-core."""
    scale = (config.mtp_loss_scaling_factor or 0.0) / (config.mtp_num_layers or 1)
    if config.calculate_per_token_loss:
        return torch.tensor(scale, device=batch.loss_mask.device)
    return scale * batch.loss_mask.sum().clamp(min=1.0) / moved.loss_mask.sum().clamp(min=1.0)


class FurtherLosses:
    """The losses of further tokens that a rank's head finds in a training step, by unit. A forward that is run again
    writes the same again. count: of the losses of a token."""

    def __init__(self, count: int):
        self._count, self._step = count, -1
        self._of: dict[tuple[int, int], Tensor] = {}

    def beside(
        self,
        loss: Tensor,
        others: Sequence[tuple[Tensor, Microbatch]],
        config: TransformerConfig,
        batch: Microbatch,
        unit: UnitContext,
    ) -> Tensor:
        """A unit's loss sum of the next token, which takes a gradient of others along, those of further tokens. others:
        each with the batch moved as far."""
        factors = [_factor(config, batch, moved) for _, moved in others]
        weights = [moved.loss_mask[:, unit.tokens].sum() for _, moved in others]
        self.write(unit, [each for each, _ in others], weights)
        result: Tensor = _WithFurtherLosses.apply(loss, factors, *(each for each, _ in others))
        return result

    def write(self, unit: UnitContext, losses: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        """Keep a unit's loss sums, and the sums of its loss masks.

        Args:
            unit: The unit that has run.
            losses: The sum of each loss over this rank's tokens of the unit.
            weights: The sum of the loss mask of each loss over all tokens of the unit.
        """
        if unit.step != self._step:
            self._step, self._of = unit.step, {}
        self._of[unit.microbatch, unit.chunk] = torch.stack([*losses, *weights]).detach().double()

    def forget(self) -> None:
        """Leave out what has run so far: it was no part of a step."""
        self._step = -1

    def sums(self, step: int) -> Tensor:
        """Return [2, count] float64: the sum of each loss over all units here, and the sum of its loss mask."""
        if step != self._step or not self._of:
            return torch.zeros(2, self._count, dtype=torch.float64, device=device())
        return torch.stack(list(self._of.values())).sum(dim=0).view(2, self._count)
