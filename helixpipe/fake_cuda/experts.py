"""Where tokens go that are sent to experts, which a device without numbers does not know: as loads of experts say.

How many rows travel, and how many an expert gets, megatron-core reads from the device. Here the ranks of a group have
as many tokens each, and send together in proportion to the experts' loads. The rest of the program is what runs on a
GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import cache, partial
from math import ceil
from typing import Any
from unittest import mock

import torch

from helixpipe.costs.expert_loads import ExpertLoads
from helixpipe.costs.models import ModelShape

_ROUNDING = Fraction(1, 10**6)
"""Of sums of shares, which are floats."""


def rows_to_experts(shares: Sequence[float], chosen: int, tokens: int, ranks: int) -> torch.Tensor:
    """Return the rows that each rank sends to each expert, [ranks, experts], int64: ranks send an expert equally many
    but for one. shares: of the tokens that each expert gets; chosen: experts that each of a rank's tokens takes."""
    ends, sent = [0], Fraction(0)
    for share in shares:
        sent += ranks * tokens * Fraction(share)
        ends.append(ceil(sent - _ROUNDING))
    ends[-1] = ranks * tokens * chosen
    dealt = torch.tensor(ends) - torch.arange(ranks).unsqueeze(1)  # row after row to rank after rank
    return (dealt + ranks - 1).div(ranks, rounding_mode="floor").diff(dim=1)


def rows_in_layer(
    model: ModelShape, loads: ExpertLoads, layer: int, tokens: int, ranks: int, splits: int
) -> torch.Tensor:
    """Return the rows that each rank of a group sends to each expert of a layer, [ranks, experts], int64. tokens: of
    each rank; splits: of the ranks, those that each expert is split over. Loads of fewer layers than have experts, or
    of more, are taken in turn."""
    before = sum(model.mixed[each % len(model.mixed)] for each in range(layer))
    layers = loads.of_layers(model.experts, model.topk, ranks // splits)
    return rows_to_experts(layers[before % len(layers)], model.topk, tokens, ranks)


@contextmanager
def routed(fake: Any, model: ModelShape, loads: ExpertLoads, layers: Any) -> Iterator[None]:
    """Let every router of a model choose so. fake: the compiled module; layers: the class of layers with experts."""
    from megatron.core.transformer.moe.moe_utils import get_capacity
    from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher

    in_layer = cache(partial(rows_in_layer, model, loads))
    made, copied = layers.__init__, MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize
    gathered = MoEAllGatherTokenDispatcher.dispatch_postprocess

    def numbered(layer: Any, config: Any, number: int, draw: Any) -> None:
        made(layer, config, number, draw)
        layer.token_dispatcher.number = number

    def rows_of(dispatcher: Any, tokens: int) -> torch.Tensor:
        ranks, splits = dispatcher.ep_size * dispatcher.tp_size, dispatcher.tp_size
        rows = in_layer(dispatcher.number, tokens, ranks, splits)
        factor = dispatcher.config.moe_expert_capacity_factor
        if factor is None:
            return rows
        return rows.clamp(max=get_capacity(tokens * model.topk, model.experts, factor))

    def counted(dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
        """Where tokens go to the ranks of their experts: what megatron-core's `preprocess` makes of the counts."""
        on_host = copied(dispatcher, point, tokens_per_expert)
        if point != dispatcher.cuda_dtoh_point or dispatcher.drop_and_pad:
            return on_host
        rows, own = rows_of(dispatcher, dispatcher.routing_map.size(0)), dispatcher.local_expert_indices
        sizes = dispatcher.ep_size, dispatcher.tp_size
        from_here = rows[dispatcher.ep_group.rank() * dispatcher.tp_size + dispatcher.tp_rank]
        here = rows[:, own].view(*sizes, -1).transpose(0, 1)  # [tp, ep, local experts]
        fake.set_selected(int(from_here.sum()))
        if dispatcher.input_splits is not None:
            dispatcher.input_splits = from_here.view(dispatcher.ep_size, -1).sum(dim=1).numpy()
            dispatcher.output_splits = here[dispatcher.tp_rank].sum(dim=1).numpy()
            dispatcher.output_splits_tp = here.sum(dim=(1, 2)).numpy()
        if dispatcher.num_local_experts > 1:
            dispatcher.num_global_tokens_per_local_expert = here.reshape(-1, len(own))
        return here.sum(dim=(0, 1))

    def taken(dispatcher: Any, tokens: Any, probs: Any) -> Any:
        """Where all ranks have all tokens."""
        sources = dispatcher.ep_size * dispatcher.tp_size
        rows = rows_of(dispatcher, tokens.size(0) // sources)[:, dispatcher.local_expert_indices]
        fake.set_selected(int(rows.sum()))
        own, _, own_probs = gathered(dispatcher, tokens, probs)
        return own, rows.sum(dim=0), own_probs

    with (
        mock.patch.object(layers, "__init__", numbered),
        mock.patch.object(MoEAlltoAllTokenDispatcher, "_maybe_dtoh_and_synchronize", counted),
        mock.patch.object(MoEAllGatherTokenDispatcher, "dispatch_postprocess", taken),
    ):
        yield
