"""megatron-core's router, with auxiliary losses that do not depend on how a microbatch is cut.

The load-balancing loss (Fedus et al., "Switch Transformers", JMLR 2022) multiplies the share of a microbatch's tokens
that each expert gets by its mean score. megatron-core computes it in each forward, from the tokens that this one sees.
Here a microbatch may run in chunks, and the shares are those of all of it. They are constants to the gradient, the loss
is linear in the scores, and all forwards of a microbatch on a stage end before its first backward there. So a forward
leaves its counts in a table, and the backward takes the sum over all chunks from there: the gradient is that of the
whole microbatch, to rounding. The z-loss (Zoph et al., "ST-MoE", 2022) is a mean over tokens, of which each chunk adds
its share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import compute_routing_scores_for_aux_loss
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from helixpipe.common.errors import UserError
from helixpipe.model.experts.checks import SINKHORN
from helixpipe.model.experts.counts import Counts, StepCounts
from helixpipe.model.options import UnitContext
from helixpipe.model.real_tokens import RealRows

AUX_LOSS, SEQUENCE_LOSS, GLOBAL_LOSS = "aux_loss", "seq_aux_loss", "global_aux_loss"
"""Values of `--moe-router-load-balancing-type`: experts are to be used alike over a microbatch, over each row, and over
the microbatches of all data-parallel ranks in a step (Qiu et al., "Demons in the Detail", 2025), of which megatron-core
takes the mean of those up to the microbatch's own number, as is done here."""


Scale = Callable[[], float | Tensor]
"""Says what the gradients of a unit's auxiliary losses are multiplied by (`UnitContext.auxiliary_gradient`)."""


class Half(NamedTuple):
    """Of a unit's tokens. which: 0 or 1; rows: of both halves on this rank."""

    which: int
    rows: int


class Router(TopKRouter):
    """megatron-core's, which is told the unit it routes.

    layer_of_experts: the number of its layer. counts, and `expert_bias` where there are biases: `counts.Routing` has
    them.
    """

    def __init__(self, config: Any, pg_collection: Any, **newer: Any):
        """newer: what later releases of megatron-core say, for layers that predict further tokens and for names."""
        super().__init__(config=config, pg_collection=pg_collection, **newer)
        self.layer_of_experts = 0
        self.counts = StepCounts()
        self._unit: UnitContext | None = None
        self._half: Half | None = None
        self._real: RealRows | None = None
        self._rows: tuple[int, int] = (0, 0)
        self._square: Tensor | None = None

    def route(
        self, hidden: Tensor, unit: UnitContext, half: Half | None = None, real: RealRows | None = None
    ) -> tuple[Tensor, Tensor]:
        """Hidden states [s, b, h] of a unit, or of a half of it, to (probabilities [s b, experts], where tokens go,
        bool of that shape). Padding goes nowhere. real: the other rows; None: all."""
        if self.routing_type == SINKHORN:
            if unit.row_length is not None:
                raise UserError(
                    "--moe-router-load-balancing-type sinkhorn needs all tokens of a microbatch at once: it cannot be "
                    "had with sequences in chunks."
                )
            self.training = unit.training  # where it is not, each token goes to its best
        self._unit, self._half, self._real, self._rows = unit, half, real, (hidden.size(0), hidden.size(1))
        probs, chosen = self(hidden)
        self._unit = None
        return probs, chosen

    @property
    def losses(self) -> tuple[tuple[str, float], ...]:
        """The kinds of balancing losses with their coefficients, where these are not 0."""
        kinds, coefficients = self.config.moe_router_load_balancing_type, self.config.moe_aux_loss_coeff
        kinds = [kinds] if isinstance(kinds, str) else kinds
        coefficients = coefficients if isinstance(coefficients, Sequence) else [coefficients] * len(kinds)
        return tuple((kind, each) for kind, each in zip(kinds, coefficients, strict=True) if each and kind != "none")

    def is_aux_loss_enabled(self) -> bool:
        """Not in megatron-core's own routing."""
        return False

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Tokens are counted in `routing`."""

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """[rows, experts], which take a gradient of the z-loss along."""
        unit, coefficient = self._unit, self.config.moe_z_loss_coeff
        if unit is None or not unit.training or not coefficient:
            return logits
        square = logits.logsumexp(dim=-1).square().sum()
        self._square = square.detach()
        scaled: Tensor = _WithLoss.apply(
            logits, square, coefficient / max(1, sum(self._lengths)), unit.auxiliary_gradient
        )
        return scaled

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self._square = None
        if self._places is not None:
            logits = logits.flatten(0, 1).index_select(0, self._places).unsqueeze(1)
        probs, routing_map = super().routing(logits, padding_mask)
        unit = self._unit
        if unit is not None and unit.training:
            probs = self._balanced(logits.flatten(0, 1), probs, routing_map, unit)
        return self._among_padding(probs), self._with_equal_parts(self._among_padding(routing_map))

    @property
    def _places(self) -> Tensor | None:
        """The unit's real rows; None: all."""
        return None if self._real is None else self._real.places

    def _among_padding(self, real: Tensor) -> Tensor:
        """[real rows, experts] to [s b, experts], with zeros for padding."""
        if self._places is None:
            return real
        return real.new_zeros((self._rows[0] * self._rows[1], *real.shape[1:])).index_copy(0, self._places, real)

    def _with_equal_parts(self, routing_map: Tensor) -> Tensor:
        """Let padding go to the first experts, with probability 0, where gloo gathers the tokens of tensor-parallel
        ranks: it cannot gather unequal parts."""
        config = self.config
        parts = config.expert_tensor_parallel_size or config.tensor_model_parallel_size
        unequal = config.moe_token_dispatcher_type == "alltoall" and config.moe_expert_capacity_factor is None
        if self._real is not None and parts > 1 and unequal and routing_map.device.type == "cpu":
            routing_map[~routing_map.any(dim=1), : self.topk] = True
        return routing_map

    @property
    def _lengths(self) -> tuple[int, ...]:
        """The real tokens of each row of the unit's microbatch, on all ranks."""
        batch = self._rows[1]
        return (self._tokens // batch,) * batch if self._real is None else self._real.lengths

    @property
    def _tokens(self) -> int:
        """Of the unit's microbatch, in all of its rows and on all ranks."""
        assert self._unit is not None
        length, rows = self._unit.row_length, self._rows[0] if self._half is None else self._half.rows
        return self._rows[1] * (rows * self.tp_cp_group.size() if length is None else length)

    def _balanced(self, logits: Tensor, probs: Tensor, routing_map: Tensor, unit: UnitContext) -> Tensor:
        """Count, and let the probabilities take a gradient of the balancing losses along."""
        chosen = sums = scores = everywhere = None
        if self.losses:
            best, scores = compute_routing_scores_for_aux_loss(logits, self.topk, self.score_function)
            chosen, sums = (
                self._among_padding(each.detach()).unflatten(0, self._rows).sum(dim=0) for each in (best, scores)
            )
            if GLOBAL_LOSS in dict(self.losses):
                everywhere = chosen.sum(dim=0)
                if self.tp_dp_cp_group.size() > 1:
                    dist.all_reduce(everywhere, group=self.tp_dp_cp_group)
            if self.tp_cp_group.size() > 1:
                dist.all_reduce(chosen, group=self.tp_cp_group)
        here = self._rows[0] * self._rows[1] * self.tp_cp_group.size()
        which = 0 if self._half is None else self._half.which
        counts = Counts(here, routing_map.sum(dim=0), chosen, sums, self._square, everywhere)
        self.counts.write(unit, which, self._tokens, counts)
        if scores is None:
            return probs
        balance = _Balance(self, unit.microbatch, self._lengths, self._rows, self._places)
        balanced: Tensor = _WithBalance.apply(probs, scores, balance, unit.auxiliary_gradient)
        return balanced

    def weights_of_scores(self, microbatch: int, lengths: Sequence[int]) -> Tensor:
        """The gradient of the balancing losses of a microbatch with respect to the scores of each of its rows' tokens:
        [b, experts]. lengths: the real tokens of each row."""
        chosen, tokens = self.counts.chosen(microbatch).double(), max(1, sum(lengths))
        total = torch.zeros_like(chosen)
        for kind, coefficient in self.losses:
            if kind == SEQUENCE_LOSS:  # the mean over tokens of their row's loss
                factors = (coefficient * self.num_experts / (self.topk * max(1, each) * tokens) for each in lengths)
                total += torch.stack([row * factor for row, factor in zip(chosen, factors, strict=True)])
            elif kind == GLOBAL_LOSS:
                every = self.counts.everywhere(microbatch)
                pipelines = self.tp_dp_cp_group.size() // self.tp_cp_group.size()
                total += every / every.sum().clamp(min=1) * (coefficient * self.num_experts / (pipelines * tokens))
            else:
                total += chosen.sum(dim=0) * (coefficient * self.num_experts / (self.topk * tokens * tokens))
        return total


class _Balance(NamedTuple):
    """The balancing losses of a unit, asked for in its backward. lengths: the real tokens of each row of its
    microbatch. rows: [s, b] of the unit on this rank. places: the real ones among these; None: all."""

    router: Router
    microbatch: int
    lengths: tuple[int, ...]
    rows: tuple[int, int]
    places: Tensor | None

    def gradient(self) -> Tensor:
        """Return the gradient of the scores of each real row, [rows, experts]."""
        weights = self.router.weights_of_scores(self.microbatch, self.lengths)
        every = weights.expand(self.rows[0], *weights.shape).flatten(0, 1)
        return every if self.places is None else every.index_select(0, self.places)


class _WithBalance(torch.autograd.Function):
    """The probabilities, whose backward gives the scores the gradient of the balancing losses."""

    @staticmethod
    def forward(ctx: Any, probs: Tensor, scores: Tensor, balance: _Balance, scale: Scale) -> Tensor:
        ctx.balance, ctx.scale, ctx.dtype = balance, scale, scores.dtype
        return probs.view_as(probs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], (ctx.balance.gradient() * ctx.scale()).to(ctx.dtype), None, None


class _WithLoss(torch.autograd.Function):
    """The first tensor, whose backward gives a loss, a scalar, the gradient factor * scale()."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor, factor: float, scale: Scale) -> Tensor:
        ctx.factor, ctx.scale, ctx.dtype, ctx.device = factor, scale, loss.dtype, loss.device
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = torch.ones((), dtype=ctx.dtype, device=ctx.device) * ctx.factor * ctx.scale()
        return gradients[0], gradient.to(ctx.dtype), None, None
