"""What context-parallel ranks exchange gives the attention of all rows, and its gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from helixpipe.common.alternate import finished
from helixpipe.common.errors import UserError
from helixpipe.model.attention.context_parallel import ContextParallel, select, to_heads, to_rows
from helixpipe.model.attention.log_sums import FlashOnCPU, LogSumKernel, Plain
from helixpipe.model.attention.ring_attention import Ring, ring_attention, ring_rounds
from helixpipe.model.attention.tiles import Rows, Tile, tiles
from helixpipe.model.documents import Documents
from helixpipe.model.options import check_supported
from tests.distributed import run_ranks
from tests.model.common import make_config, make_options

ROWS, BATCH, CHANNELS = 24, 2, 8
HEADS = ((12, 4), (4, 1), (12, 6), (4, 4))
"""Heads and groups: as many groups as ranks, fewer, more that ranks cannot share evenly, one a head."""
DOCUMENTS = (None, [(3, 6, 15), (24,)], [(1, 1, 13, 9), (5, 1, 4, 14)])


def compare(rank: int, world_size: int) -> list[tuple[str, float]]:
    """The largest error of output and gradients, for every case."""
    group = dist.group.WORLD
    assert group is not None
    found = []
    for heads, groups in HEADS:
        for number, lengths in enumerate(DOCUMENTS):
            documents = None if lengths is None else Documents(lengths)
            tensors, gradient, expected, gradients = reference(heads, groups, lengths)
            kernels: tuple[tuple[str, LogSumKernel | None], ...] = (("a2a", None), ("p2p", FlashOnCPU()))
            if heads == 4:
                kernels += (("p2p", Plain()),)
            for how, kernel in kernels:
                context = ContextParallel(group, how)
                runs = context.runs(0, ROWS)
                query, keys, values = own = [select(tensor, runs, 0).clone().requires_grad_() for tensor in tensors]
                if kernel is None:
                    own_heads = finished(to_heads(group, *own))
                    output = finished(to_rows(group, attention(*own_heads, mask(lengths))))
                else:
                    ring = Ring(context, ring_rounds(context, (0,), ROWS, documents), kernel, CHANNELS**-0.5)
                    output = finished(ring_attention(query, keys, values, ring))
                output.backward(select(gradient, runs, 0))
                pairs = [(output, expected), *((a.grad, b) for a, b in zip(own, gradients, strict=True))]
                error = max(float((a - select(b, runs, 0)).abs().max()) for a, b in pairs)  # type: ignore[operator]
                found.append((f"{how} {type(kernel).__name__} heads {heads}/{groups} documents {number}", error))
    return found


def reference(
    heads: int, groups: int, lengths: list[tuple[int, ...]] | None
) -> tuple[list[Tensor], Tensor, Tensor, list[Tensor]]:
    """Query, key and value, the gradient of the output, the output, and the gradients of all three."""
    generator = torch.Generator().manual_seed(heads + groups)
    shapes = ((ROWS, BATCH, heads, CHANNELS), *2 * ((ROWS, BATCH, groups, CHANNELS),), (ROWS, BATCH, heads * CHANNELS))
    *tensors, gradient = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
    query, keys, values = leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    output = attention(query, keys, values, mask(lengths))
    output.backward(gradient)
    return tensors, gradient, output.detach(), [leaf.grad for leaf in leaves if leaf.grad is not None]


def attention(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=seen[:, None], enable_gqa=True)
    return output.permute(2, 0, 1, 3).flatten(2)


def mask(lengths: list[tuple[int, ...]] | None) -> Tensor:
    """[b, n, n]: which keys each query sees."""
    samples = lengths or [(ROWS,)] * BATCH
    squares = [torch.block_diag(*(torch.ones(length, length) for length in sample)) for sample in samples]
    return torch.stack(squares).tril().bool()


def test_exchanges_give_the_attention_of_all_rows() -> None:
    for results in run_ranks(compare, 4):
        assert len(results) == 3 * (2 * len(HEADS) + 2)
        assert [result for result in results if not result[1] < 1e-12] == []


def test_what_a_round_has_to_do() -> None:
    """Two ranks in zigzag, the second chunk of 8 tokens after one of 4."""
    first = Rows((range(1), range(3, 4), range(4, 6), range(10, 12)))
    second = Rows((range(1, 2), range(2, 3), range(6, 8), range(8, 10)))
    queries = Rows(first.runs[2:])
    own = tiles(queries, first, same_rank=True)
    assert own == (
        Tile(None, slice(0, 2), slice(0, 2), causal=False),
        Tile(None, slice(0, 2), slice(2, 4), causal=True),
        Tile(None, slice(2, 4), slice(0, 4), causal=False),
        Tile(None, slice(2, 4), slice(4, 6), causal=True),
    )
    assert tiles(queries, second, same_rank=False) == (
        Tile(None, slice(0, 2), slice(0, 2), causal=False),
        Tile(None, slice(2, 4), slice(0, 6), causal=False),
    )
    # The other rank's runs both come after what they see of the first rank's: one tile.
    (tile,) = tiles(Rows(second.runs[2:]), first, same_rank=False)
    assert tile == Tile(None, slice(0, 4), slice(0, 4), causal=False)


def test_a_model_that_ranks_cannot_share() -> None:
    options = replace(make_options("gpt", tied=False), cp_comm_type="a2a")
    with pytest.raises(UserError, match=r"^--context-parallel-size 3 with .* the 4 heads .* sizes are 2 and 4"):
        check_supported(make_config("gpt"), options, context_parallel=3)
    with pytest.raises(UserError, match=r"^--attention-dropout 0.1 cannot be had with --cp-comm-type p2p"):
        dropping = make_config("gpt", attention_dropout=0.1)
        check_supported(dropping, replace(options, cp_comm_type="p2p"), context_parallel=2)
    check_supported(make_config("gpt", attention_dropout=0.1), options, context_parallel=2)
