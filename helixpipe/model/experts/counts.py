"""What the routers of a rank count in a step, and the biases of experts that follow from it.

A layer's weights may be on one rank and run on others, or have replicas, so what is known of a layer is kept by its
number, apart from its weights. Every rank has the biases of all layers, and all change them alike, once a step, by
loads that are sums over all ranks: biases then need no place in the messages that bring weights, of another type.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from helixpipe.common.errors import UserError
from helixpipe.model.device import device
from helixpipe.model.options import UnitContext, further_tokens

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


class Counts(NamedTuple):
    """What a chunk's forward counts, without a gradient.

    tokens: of all ranks' rows. load: [experts], tokens of this rank's rows that are sent to each expert. chosen:
    [b, experts], those of all ranks' rows whose best scores each expert is among, what the balancing losses count;
    scores: [b, experts], the sums of this rank's scores. square: the sum over its rows of log-sum-exp squared, what the
    z-loss is the mean of. everywhere: [experts], what is counted in `chosen`, over data-parallel ranks as well.
    """

    tokens: int
    load: Tensor
    chosen: Tensor | None
    scores: Tensor | None
    square: Tensor | None
    everywhere: Tensor | None = None


@dataclass
class StepCounts:
    """The counts of one training step in one layer, of each microbatch by chunk and half. A forward that is run again
    writes the same again."""

    step: int = -1
    of: dict[int, dict[tuple[int, int], Counts]] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    """Of each microbatch, in all of its rows."""
    order: dict[int, int] = field(default_factory=dict)
    """The microbatches by their numbers in this pipeline."""
    numbers: dict[int, int] = field(default_factory=dict)
    """The other way round."""
    sums: list[Tensor] = field(default_factory=list)
    """[experts] each: of all ranks' microbatches up to each number, as far as they have been asked for."""

    def write(self, unit: UnitContext, half: int, tokens: int, counts: Counts) -> None:
        if unit.step != self.step:
            self.step, self.of, self.tokens, self.order, self.numbers, self.sums = unit.step, {}, {}, {}, {}, []
        self.of.setdefault(unit.microbatch, {})[unit.chunk, half] = counts
        self.tokens[unit.microbatch] = tokens
        self.order[unit.number], self.numbers[unit.microbatch] = unit.microbatch, unit.number

    def everywhere(self, microbatch: int) -> Tensor:
        """[experts] float64: the sum over this pipeline's microbatches up to that one, all their chunks and all ranks.
        Raises UserError where one has not run here yet."""
        number = self.numbers[microbatch]
        while len(self.sums) <= number:
            own = self._everywhere(self.order.get(len(self.sums)))
            self.sums.append(self.sums[-1] + own if self.sums else own)
        return self.sums[number].double()

    def _everywhere(self, microbatch: int | None) -> Tensor:
        counts = list(self.of[microbatch].values()) if microbatch is not None else []
        if microbatch is None or sum(each.tokens for each in counts) < self.tokens[microbatch]:
            raise UserError(
                "--moe-router-load-balancing-type global_aux_loss needs all microbatches up to one to run forward "
                "through a layer's experts, on one rank, before that one runs backward there, which this schedule "
                "does not do: give aux_loss."
            )
        return torch.stack([each.everywhere for each in counts if each.everywhere is not None]).sum(dim=0)

    def chosen(self, microbatch: int) -> Tensor:
        """[b, experts], over all chunks of a microbatch. Raises UserError where one has not run here yet."""
        found = list(self.of[microbatch].values())
        if sum(each.tokens for each in found) < self.tokens[microbatch]:
            raise UserError(
                "--moe-aux-loss-coeff needs all chunks of a microbatch to run forward through a layer's experts, on "
                "one rank, before one of them runs backward there, which this schedule does not do: give 0, or no "
                "chunks."
            )
        return torch.stack([each.chosen for each in found if each.chosen is not None]).sum(dim=0)


class Routing:
    """What the routers of a rank share, of its own weights and of borrowed ones: counts and biases by layer.

    The layers that predict further tokens come after the others.
    """

    def __init__(self, config: TransformerConfig):
        layers, experts = config.num_layers + further_tokens(config), config.num_moe_experts or 0
        self.shape, self._rate = (layers, experts), config.moe_router_bias_update_rate
        self.counts = [StepCounts() for _ in range(layers)]
        self.biases: Tensor | None = None
        if config.moe_router_enable_expert_bias:
            self.biases = torch.zeros(self.shape, device=device())  # float32, whatever weights are
        self._loaded = set[int]()

    def bind(self, modules: Iterable[torch.nn.Module], *, own: bool) -> None:
        """Let the routers among a model's modules count here, and choose by the biases here. own: the weights of the
        model are this rank's, and so its biases are those that checkpoints are read into."""
        for router in (each for each in modules if hasattr(each, "layer_of_experts")):
            number: Any = router.layer_of_experts
            router.counts = self.counts[number]
            if self.biases is not None:
                router.expert_bias = self.biases[number]
            if own:
                self._loaded.add(number)

    def loads(self, step: int) -> Tensor:
        """[layers, experts] float64: the tokens of this rank that were sent to each expert in a step."""
        loads = torch.zeros(self.shape, dtype=torch.float64, device=device())
        for layer, counts in zip(loads, self.counts, strict=True):
            if counts.step == step and counts.of:
                every = [each.load for chunks in counts.of.values() for each in chunks.values()]
                layer += torch.stack(every).sum(dim=0)
        return loads

    @torch.no_grad()
    def change_biases(self, loads: Tensor) -> None:
        """Raise the biases of experts that had less than the mean of their layer and lower those that had more (Wang et
        al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024, algorithm 1). loads: of a step,
        over all ranks."""
        if self.biases is not None:
            self.biases += self._rate * (loads.mean(dim=1, keepdim=True) - loads).sign().to(self.biases)

    def share_biases(self, group: dist.ProcessGroup) -> None:
        """Give all pipeline ranks the biases that those with a layer's weights have read. Collective over them."""
        if self.biases is None:
            return
        known = torch.full_like(self.biases, -torch.inf)
        own = sorted(self._loaded)
        known[own] = self.biases[own]
        dist.all_reduce(known, op=dist.ReduceOp.MAX, group=group)
        self.biases.copy_(known.where(known.isfinite(), 0.0))  # a layer without experts has none anywhere
