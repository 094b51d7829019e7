"""Where tokens go that are sent to experts, which a device without numbers does not know: to all experts alike.

How many rows travel, and how many an expert gets, megatron-core reads from the device. Here each rank sends each expert
its tokens x top-k / experts rows, the first ones one more where that is no whole number, and every rank of a group has
as many tokens as this one. The rest of the program is what runs on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


def even(rows: int, parts: int) -> list[int]:
    """Return rows shared out alike, the first parts getting one more."""
    return [rows // parts + (part < rows % parts) for part in range(parts)]


@contextmanager
def balanced(fake: Any, experts: int, chosen: int) -> Iterator[None]:
    """Let every router of a model choose so. fake: the compiled module; experts: of a layer; chosen: by each token."""
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    copied, forward = MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize, SequentialMLP.forward

    def counted(dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
        on_host = copied(dispatcher, point, tokens_per_expert)
        if point != dispatcher.cuda_dtoh_point or dispatcher.drop_and_pad:
            return on_host
        every = even(dispatcher.routing_map.size(0) * chosen, experts)
        own = torch.tensor([every[number] for number in dispatcher.local_expert_indices])
        sources, here = dispatcher.ep_size * dispatcher.tp_size, int(own.sum())
        if dispatcher.input_splits is not None:
            dispatcher.input_splits = torch.tensor(every).view(dispatcher.ep_size, -1).sum(dim=1).numpy()
            dispatcher.output_splits = torch.full((dispatcher.ep_size,), here).numpy()
            dispatcher.output_splits_tp = torch.full((dispatcher.tp_size,), here * dispatcher.ep_size).numpy()
        if dispatcher.num_local_experts > 1:
            dispatcher.num_global_tokens_per_local_expert = own.expand(sources, -1).contiguous()
        return own * sources

    def shared_out(layer: Any, tokens: Any, counts: Any, probs: Any) -> Any:
        """Where all ranks have all tokens, counts are copied elsewhere."""
        if not counts.any():
            counts = torch.tensor(even(tokens.size(0), layer.num_local_experts))
        return forward(layer, tokens, counts, probs)

    fake.set_selected_share(chosen / experts if experts else 0)
    with (
        mock.patch.object(MoEAlltoAllTokenDispatcher, "_maybe_dtoh_and_synchronize", counted),
        mock.patch.object(SequentialMLP, "forward", shared_out),
    ):
        try:
            yield
        finally:
            fake.set_selected_share(0)
