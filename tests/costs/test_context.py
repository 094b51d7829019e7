"""Times and sizes of context parallelism on named hardware."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helixpipe.common.errors import UserError
from helixpipe.costs.hardware import HARDWARE
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import MODELS, Chunk, Layout
from helixpipe.costs.piece_kinds import flops, work
from helixpipe.costs.sizes import Kernel
from helixpipe.program.program import Program
from schedules import Shape, build

H100, LLAMA, TOKENS = HARDWARE["h100"], MODELS["llama3-8b"], 65536
WHOLE = Chunk(TOKENS)


def costs(ranks: int, how: str, tp: int = 1, **changes: int) -> ModelCosts:
    layout = Layout(tp, tp > 1, context_parallel=ranks, cp_comm_type=how)
    return ModelCosts(LLAMA, H100, layout, TOKENS, **changes)


@pytest.mark.parametrize("how", ["a2a", "p2p"])
def test_ranks_share_the_work(how: str) -> None:
    for piece in ("norm", "qkv", "attn", "proj", "mlp", "head"):
        for op in "FB":
            alone = flops(LLAMA, Layout(), piece, op, WHOLE)
            assert flops(LLAMA, costs(8, how).layout, piece, op, WHOLE) == pytest.approx(alone / 8)


def test_an_all_to_all_sends_a_rank_s_rows_but_those_of_its_own_heads() -> None:
    query, keys = LLAMA.hidden * 2, LLAMA.kv_hidden * 2  # bytes of a token
    for size, copies in ((4, 1), (16, 2)):  # 8 groups
        sent = [
            kernel.bytes
            for kernel in work(LLAMA, costs(size, "a2a").layout, "attn", "F", WHOLE)
            if kernel.kind == "all-to-all"
        ]
        rows = TOKENS / size * (size - 1) / size
        assert sent == pytest.approx([rows * (query + 2 * keys * copies), rows * query])


def test_all_to_alls_between_nodes_go_over_all_adapters() -> None:
    sent = Kernel("all-to-all", 0.0, 1e9)
    near, far = costs(8, "a2a"), costs(16, "a2a")
    assert near._sending_time(sent) == pytest.approx(1e9 / (H100.nvlink * H100.efficiency.network))
    # of 15 others 8 are on the other node
    assert far._sending_time(sent) == pytest.approx(1e9 * 8 / 15 / (H100.network / 8 * H100.efficiency.network))
    assert costs(4, "a2a", tp=8)._sending_time(sent) == pytest.approx(1e9 / (50e9 * H100.efficiency.network))


def test_a_ring_is_hidden_behind_attention_as_far_as_that_is_longer() -> None:
    near = costs(8, "p2p")
    attention = sum(
        near._kernel_time(kernel) for kernel in work(LLAMA, near.layout, "attn", "F", WHOLE) if kernel.kind != "ring"
    )
    (ring,) = [kernel for kernel in work(LLAMA, near.layout, "attn", "F", WHOLE) if kernel.kind == "ring"]
    hidden = near._kernel_time(ring._replace(behind=()))
    assert near.piece_time("attn", "F", WHOLE) == pytest.approx(attention + 0.1 * hidden)
    slow = replace(near, hardware=replace(H100, nvlink=1e9))
    assert ring.bytes == 7 * 2 * TOKENS / 8 * LLAMA.kv_hidden * 2
    taken = ring.bytes / (1e9 * H100.efficiency.network) + H100.latency
    assert slow.piece_time("attn", "F", WHOLE) == pytest.approx(attention + taken - attention * 7 / 8, rel=1e-2)
    (back,) = [kernel for kernel in work(LLAMA, near.layout, "attn", "I", WHOLE) if kernel.kind == "ring"]
    assert back.bytes == ring.bytes * 15 / 7  # keys and values again, and their gradients once more than that


def test_ranks_that_hold_the_same_weights_share_the_optimizer_and_sum_gradients() -> None:
    program: Program = build("1f1b", Shape(2, 4, 32))
    data, context = costs(1, "p2p", data_parallel=8), costs(8, "p2p")
    assert context.after_time(program) == data.after_time(program)
    assert context.static_memory(program.stages[0].pieces) == data.static_memory(program.stages[0].pieces)
    assert context.step_flops(program) == pytest.approx(data.step_flops(program) / 8)
    assert context._node(1) == data._node(1) == 1


def test_what_ranks_cannot_share() -> None:
    with pytest.raises(UserError, match=r"^--context-parallel 3 .* the 32 heads .* sizes are 2 and 4, or use p2p\.$"):
        costs(3, "a2a")
    with pytest.raises(UserError, match=r"^--seq-length 65536 must be a multiple of 6 with --context-parallel 3\.$"):
        costs(3, "p2p")
