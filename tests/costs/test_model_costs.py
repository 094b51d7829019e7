"""Presets, times, messages and memory of a model on named hardware."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from helixpipe.common.bounded import BoundedDict
from helixpipe.common.errors import UserError
from helixpipe.costs.hardware import GIB, HARDWARE, Efficiency, Hardware, find_hardware
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import MODELS, Chunk, Layout, find_model
from helixpipe.costs.piece_bytes import PieceBytes
from helixpipe.costs.piece_kinds import flops, model_flops, num_parameters, work
from helixpipe.costs.thread_blocks import fitting_blocks
from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.lower import lower
from helixpipe.planning.memory.early import peak_memory
from helixpipe.planning.memory.recompute import RecomputeOptions
from helixpipe.program.costs import Work
from helixpipe.program.program import Op, Program, Unit
from helixpipe.program.stages import PIECE_KINDS, Piece, even_stages
from helixpipe.program.transfer import Transfer
from helixpipe.program.workload import Extent, uniform
from helixpipe.simulate.memory import rank_memory
from helixpipe.simulate.simulator import simulate
from schedules import Shape, build
from tests.costs.asking import message_bytes, op_time

SEVEN, H20 = MODELS["llama2-7b"], HARDWARE["h20"]
COSTS = ModelCosts(SEVEN, HARDWARE["a100-80"], Layout(), seq_length=4096)


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("llama2-7b", 6_738_415_616),  # as counted in the released weights
        ("llama2-13b", 13_015_864_320),
        ("llama2-70b", 68_976_648_192),
        ("llama3-8b", 8_030_261_248),
        ("llama3-405b", 405_853_388_800),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-14b", 14_768_307_200),
        ("qwen3-32b", 32_762_123_264),
    ],
)
def test_number_of_weights_is_the_published_one(name: str, published: int) -> None:
    assert num_parameters(MODELS[name]) == published


@pytest.mark.parametrize("name", MODELS)
def test_models_are_consistent(name: str) -> None:
    model = find_model(name.upper())
    assert model.name == name
    assert model.hidden % model.heads == model.heads % model.groups == 0
    # the size in the name is that of the layers and the vocabulary, within a fifth
    layers = num_parameters(replace(model, positions="rope"))
    if size := re.search(r"-(?:(\d+)x)?([\d.]+)b", name):
        experts, billions = size.groups(default="1")
        assert layers == pytest.approx(int(experts) * float(billions) * 1e9, rel=0.2)


def test_hardware_has_no_slip_of_a_unit() -> None:
    for name, hardware in HARDWARE.items():
        assert hardware.name == name
        assert 1e14 < hardware.flops < 4e15 and 40 * GIB <= hardware.memory < 300 * GIB
        assert hardware.flops > hardware.memory_bandwidth > hardware.nvlink >= hardware.network / hardware.gpus_per_node
        assert hardware.network > hardware.host_link / 2
        assert 10e9 < hardware.host_bandwidth(both=False) < hardware.host_link < hardware.host_memory_bandwidth < 2e12
    assert (HARDWARE["a800"].network, H20.network) == (4 * 100e9 / 8, 4 * 200e9 / 8)


def test_bandwidth_is_shared() -> None:
    eight, alone = H20.peer_bandwidth(8, same_node=False), H20.peer_bandwidth(1, same_node=False)
    assert eight == pytest.approx(100e9 / 8 * H20.efficiency.network)
    assert alone == pytest.approx(100e9 / 4 * H20.efficiency.network)  # one adapter of the four
    assert H20.peer_bandwidth(8, same_node=True) > eight


@pytest.mark.parametrize(
    ("ends", "processors", "blocks"),
    [(0, 132, 32), (2, 78, 32), (4, 132, 32), (14, 78, 4), (14, 108, 4), (30, 108, 2), (126, 78, 1)],
)
def test_blocks_of_all_channels_leave_a_processor(ends: int, processors: int, blocks: int) -> None:
    """All of a rank's at once, but for pipelines that no device has room for. They bound what a message carries."""
    assert fitting_blocks(ends, processors) == blocks
    hardware = replace(H20, processors=processors, block_bandwidth=3e9)
    assert hardware.message_bandwidth(1e12, ends) == blocks * 3e9
    assert hardware.message_bandwidth(2e9, ends) == 2e9


def test_messages_of_many_channels_are_slower() -> None:
    """Within a node of eight H20: helix's ranks all talk to each other, those of 1f1b to two."""
    costs = ModelCosts(SEVEN, H20, Layout(), 4096)
    for schedule, blocks in (("1f1b", 16), ("helix", 4)):
        program = build(schedule, Shape(8, 16, 16))
        bound, (first, *_) = BoundCosts(program, costs), lower(program).messages
        carried = message_bytes(costs, program, first)
        assert bound.transfer_time(first) == pytest.approx(10e-6 + carried / (blocks * 10.6e9))


def test_a_group_on_several_nodes_leaves_each_over_all_adapters() -> None:
    assert H20.ring_bandwidth(8) == H20.peer_bandwidth(1, same_node=True)
    assert H20.ring_bandwidth(16) == pytest.approx(100e9 * H20.efficiency.network)
    assert H20.ring_bandwidth(12) == pytest.approx(50e9 * H20.efficiency.network)  # the second node has two groups
    wide = replace(H20, network=1e12)
    assert wide.ring_bandwidth(16) == wide.ring_bandwidth(8)  # bounded by the way through a node


def test_tensor_parallel_ranks_on_several_nodes() -> None:
    """Of a layer's forward, two gathers and two scatters of 15/16 of the hidden states, over the network."""
    near, far = (
        ModelCosts(MODELS["sppo-65b"], replace(H20, gpus_per_node=gpus), Layout(16, True), 65536) for gpus in (16, 8)
    )
    work = Work("F", (Piece("qkv", 0), Piece("proj", 0), Piece("mlp", 0)), (Extent(65536, 0),), 65536)
    moved = 4 * 65536 * 8192 * 2 * 15 / 16
    more = moved * (1 / H20.network - 1 / H20.nvlink) / H20.efficiency.network
    assert far.op_time(work) - near.op_time(work) == pytest.approx(more)
    program = build("gpipe", Shape(1, 1, 80))
    two = replace(far, data_parallel=2)
    assert two.after_time(program)[0] == pytest.approx(
        two.bytes.parameters(program.pieces_of_rank(0)) * 6 / 2 / (H20.network / 8 * H20.efficiency.network)
    )


def test_unknown_names_and_shares_are_refused() -> None:
    with pytest.raises(UserError, match="did you mean llama2-7b"):
        find_model("llama-2-7b")
    with pytest.raises(UserError, match="did you mean h200"):
        find_hardware("h-200")
    for value in (0.0, 1.1, float("nan")):
        with pytest.raises(UserError, match="matmul-efficiency"):
            find_hardware("h20", matmul=value)
    assert find_hardware("h20", matmul=0.5, attention=None).efficiency == replace(H20.efficiency, matmul=0.5)
    with pytest.raises(UserError, match="--tensor-parallel 3 must divide the 32 heads"):
        ModelCosts(SEVEN, H20, Layout(3), 4096)


# ----------------------------------------------------------------------------------------------------- FLOPs and time


@pytest.mark.parametrize("kind", PIECE_KINDS)
@pytest.mark.parametrize("op", "FIWBR")
def test_chunks_add_up_to_the_whole_sequence(kind: str, op: str) -> None:
    layout = Layout(2, True, 3)
    parts = [Chunk(1000, 0), Chunk(24, 1000), Chunk(3072, 1024)]
    whole = flops(SEVEN, layout, kind, op, Chunk(4096))
    assert sum(flops(SEVEN, layout, kind, op, part) for part in parts) == pytest.approx(whole)


@pytest.mark.parametrize("op", "FIWR")
def test_tensor_parallel_ranks_share_the_flops(op: str) -> None:
    for kind in PIECE_KINDS:
        whole = flops(SEVEN, Layout(), kind, op, Chunk(4096))
        # the head's vocabulary is padded
        share = flops(SEVEN, Layout(8, True), kind, op, Chunk(4096)) * 8
        assert share == pytest.approx(whole * (32768 / 32000 if kind == "head" else 1))


def test_textbook_flops_of_gpt() -> None:
    """6, 2, 16 b s h^2 of the linear layers and 2 b s^2 h of causal attention (HelixPipe's table)."""
    gpt, s, h = MODELS["helix-7b"], 8192, 4096
    forward = {kind: flops(gpt, Layout(), kind, "F", Chunk(s)) for kind in PIECE_KINDS}
    assert forward["qkv"] == 6 * s * h * h and forward["proj"] == 2 * s * h * h and forward["mlp"] == 16 * s * h * h
    assert forward["attn"] == 2 * s * s * h and forward["norm"] == forward["embed"] == 0
    assert forward["head"] == 2 * s * h * 50304
    for kind in ("qkv", "proj", "mlp", "head"):
        assert flops(gpt, Layout(), kind, "I", Chunk(s)) == flops(gpt, Layout(), kind, "W", Chunk(s)) == forward[kind]
    assert flops(gpt, Layout(), "attn", "I", Chunk(s)) == 2.5 * forward["attn"]
    assert flops(gpt, Layout(), "attn", "W", Chunk(s)) == 0


def test_slices_of_an_mlp_cost_flops_and_weights_in_the_backward_and_save_memory() -> None:
    gpt, chunk = MODELS["helix-7b"], Chunk(8192)
    whole, sliced = Layout(8, True), Layout(8, True, mlp_chunk=1000)
    forward = flops(gpt, whole, "mlp", "F", chunk)
    counts = {op: flops(gpt, sliced, "mlp", op, chunk) / forward for op in "FIWB"}
    assert counts == {"F": 1, "I": 2.5, "W": 0, "B": 2.5}  # the first layer again
    assert sliced.mlp_slices(8192) == [1000] * 8 + [192] and sliced.mlp_slices(7) == [7]
    layer = 4 * 4096**2 / 8
    # Each slice reads both weights in F; in B it reads three times, and reads and writes both float32 gradients.
    for op, each in (("F", 2 * layer * 2), ("B", 3 * layer * 2 + 2 * layer * 8)):
        moved = [
            sum(kernel.bytes for kernel in work(gpt, layout, "mlp", op, chunk) if kernel.kind == "matmul")
            for layout in (replace(sliced, mlp_chunk=1024), replace(sliced, mlp_chunk=4096))
        ]
        assert moved[0] - moved[1] == (8 - 2) * each
    for op in "FB":
        exchanged = [
            sorted(kernel.bytes for kernel in work(gpt, layout, "mlp", op, chunk) if kernel.kind == "network")
            for layout in (whole, sliced)
        ]
        assert exchanged[0] == exchanged[1] != []


def test_what_slices_of_an_mlp_keep() -> None:
    gpt, chunk, pieces = MODELS["helix-7b"], Chunk(8192), (Piece("mlp", 3),)
    whole, sliced = (PieceBytes(gpt, Layout(8, True, mlp_chunk=size)) for size in (0, 1024))
    hidden = 8192 * 4096 / 8 * 2
    assert whole.stash(pieces, chunk) - sliced.stash(pieces, chunk) == 2 * 4 * hidden
    assert sliced.deferred_stash(pieces, chunk) == 0
    # two whole hidden states, and of a slice the inner tensors and their gradients
    assert sliced.workspace(pieces, chunk) == 2 * 8 * hidden + 1024 * (2 + 2) * 4 * 4096 / 8 * 2
    assert sliced.workspace(pieces, Chunk(512, 0, True)) == (2 * 8 * hidden + 8192 * (2 + 2) * 4 * 4096 / 8 * 2) / 16


def test_slices_of_a_loss_move_all_but_the_norm_to_the_backward() -> None:
    model, chunk = MODELS["llama3-8b"], Chunk(10000)
    whole, sliced = Layout(8, True), Layout(8, True, loss_chunk=4096)
    once = flops(model, whole, "head", "F", chunk)
    assert {op: flops(model, sliced, "head", op, chunk) / once for op in "FIWB"} == {"F": 0, "I": 3, "W": 0, "B": 3}
    assert model_flops(model, sliced, "head", chunk) == model_flops(model, whole, "head", chunk) == 3 * once
    evaluated = [work(model, layout, "head", "F", chunk, alone=True) for layout in (whole, sliced)]
    assert sum(kernel.flops for kernel in evaluated[1]) == once
    products = [[kernel for kernel in kernels if kernel.kind == "matmul"] for kernels in evaluated]
    assert [len(each) for each in products] == [1, 3]  # the last slice is of 1808 tokens
    assert sum(kernel.bytes for kernel in products[1]) - products[0][0].bytes == 2 * 4096 * 129024 / 8 * 2
    exchanged = [
        sum(
            kernel.bytes for op in "FB" for kernel in work(model, layout, "head", op, chunk) if kernel.kind == "network"
        )
        for layout in (whole, sliced)
    ]
    assert exchanged[1] == exchanged[0] * 2 / 3  # the input is gathered once


def test_what_slices_of_a_loss_keep() -> None:
    model, head, rows = MODELS["llama3-8b"], (Piece("head"),), 129024 // 8
    own = {size: PieceBytes(model, Layout(8, True, 2, loss_chunk=size)) for size in (0, 2048, 128, 1)}
    chunk, whole = Chunk(16384), 2 * 16384 * 4096 * 2
    assert own[0].stash(head, chunk) - own[2048].stash(head, chunk) == 2 * 16384 * (rows * 4 + 9)
    assert own[2048].deferred_stash(head, chunk) == 0
    # the gradient of the whole input, and of a slice float32 probabilities with the logits or their gradients
    assert own[2048].workspace(head, chunk) == whole + 2 * 2048 * rows * (4 + 2)
    assert own[2048].workspace(head, Chunk(2000)) == whole * 2000 / 16384 + 2 * 2000 * rows * (4 + 2)
    # of short slices the weight's gradient, before it is added to its sum
    assert own[128].workspace(head, chunk) == whole + 2 * 128 * rows * 2 + rows * 4096 * 2


def test_time_of_an_op_is_its_pieces_kernels() -> None:
    program = build("1f1b", Shape(4, 8, 32, recompute=RecomputeOptions("selective", recompute_modules=("mlp",))))
    stage, chunk = program.stages[1], Chunk(4096)
    mlp = sum(COSTS.piece_time(piece.kind, "F", chunk) for piece in stage.pieces if piece.kind == "mlp")
    assert op_time(COSTS, program, Op("R", 1, 0)) == pytest.approx(mlp)
    for kind in "FBIW":
        expected = sum(COSTS.piece_time(piece.kind, kind, chunk) for piece in stage.pieces)
        assert op_time(COSTS, program, Op(kind, 1, 0)) == pytest.approx(expected)
    times = {kind: op_time(COSTS, program, Op(kind, 1, 0)) for kind in "FBIWR"}
    assert times["B"] == pytest.approx(times["I"] + times["W"]) and times["F"] > times["W"] > times["R"] > 0
    # A large linear layer is bound by arithmetic, a norm by memory.
    (product,) = [kernel for kernel in work(SEVEN, Layout(), "proj", "F", chunk) if kernel.kind == "matmul"]
    assert product.flops / (312e12 * 0.69) > product.bytes / (2039e9 * 0.85)
    assert COSTS.piece_time("norm", "F", chunk) == pytest.approx(2 * 4096 * 4096 * 2 / (2039e9 * 0.85))


def test_higher_efficiency_is_faster() -> None:
    program = build("1f1b", Shape(2, 4, 32))
    fast = replace(COSTS, hardware=replace(COSTS.hardware, efficiency=Efficiency(1, 1, 1, 1)))
    assert op_time(fast, program, Op("B", 0, 0)) < 0.8 * op_time(COSTS, program, Op("B", 0, 0))


def test_messages_weigh_what_crosses_the_cut() -> None:
    costs = ModelCosts(SEVEN, H20, Layout(8, True), seq_length=131072)
    lowered = lower(build("1f1b", Shape(8, 2, 32)), costs)
    hidden = 131072 * 4096 * 2 / 8
    assert {message_bytes(costs, lowered.program, message) for message in lowered.messages} == {hidden}
    share = 100e9 / 8 * H20.efficiency.network  # eight GPUs of a node send at once
    assert BoundCosts(lowered.program, costs).transfer_time(lowered.messages[0]) == pytest.approx(
        10e-6 + hidden / share
    )
    near = replace(costs, layout=Layout(2, True))
    assert near._node(3) == 0 and near._node(4) == 1


def test_utilization_of_llama2_7b_on_a100_is_near_what_is_published() -> None:
    """About half of the peak on one node, as training reports have it (45 to 60 %)."""
    costs = replace(COSTS, data_parallel=4)
    simulation = simulate(lower(build("1f1b", Shape(2, 64, 32)), costs), costs)
    seconds = simulation.makespan + sum(costs.after_time(simulation.lowered.program))
    assert 0.45 < costs.step_flops(simulation.lowered.program) / (seconds * 8 * 312e12) < 0.6


def test_published_gain_of_interleaving() -> None:
    """Seq1F1B's table: 2.7B, 16k tokens, p = 8, 16 microbatches on A100: 1F1B 96.9, interleaved (v = 2) 110.3 TFLOP/s a
    GPU. The ratio does not depend on how attention's FLOPs are counted."""
    model = replace(MODELS["seq1f1b-2.7b"], seq_length=16384)
    costs = ModelCosts(model, HARDWARE["a100-80"], Layout(), 16384)
    plain, interleaved = (
        simulate(lower(build(name, Shape(8, 16, 32, virtual_stages=v)), costs), costs).makespan
        for name, v in (("1f1b", None), ("interleaved-1f1b", 2))
    )
    assert plain / interleaved == pytest.approx(110.3 / 96.9, rel=0.03)


# ------------------------------------------------------------------------------------------------------------- memory


def one_rank(order: str, microbatches: int = 1) -> Program:
    """A program of one rank and stage: `F0 R0 I0 W0`."""
    ops = tuple(Op(cell[0], 0, int(cell[1:])) for cell in order.split())
    stages = tuple(replace(stage, recompute=(stage.pieces,) if "R" in order else ()) for stage in even_stages(32, 1))
    return Program("test", stages, (ops,), uniform(microbatches))


def test_activations_follow_the_program() -> None:
    stages, chunk = even_stages(32, 1), Chunk(4096)
    kept = COSTS.bytes.stash(stages[0].pieces, chunk)
    deferred = COSTS.bytes.deferred_stash(stages[0].pieces, chunk)

    def peak(order: str, microbatches: int = 1) -> float:
        return rank_memory(lower(one_rank(order, microbatches)), COSTS, 0).activations

    assert peak("F0 B0") == peak("F0 B0 F1 B1", 2) == kept
    assert peak("F0 F1 B0 B1", 2) == 2 * kept
    assert peak("F0 I0 W0") == max(kept, deferred)
    assert peak("F0 I0 F1 I1 W0 W1", 2) == pytest.approx(kept + deferred + max(deferred - kept, 0))
    assert peak("F0 F1 R0 B0 R1 B1", 2) == kept  # embed is first: nothing to keep for R but the batch
    assert 0 < kept < 32 * 20 * 4096 * 4096 * 2 + 2 * 4096 * 32000 * 4


def test_weights_gradients_and_optimizer() -> None:
    costs = replace(COSTS, data_parallel=4)
    lowered = lower(build("1f1b", Shape(2, 4, 32)), costs)
    ranks = [rank_memory(lowered, costs, rank) for rank in range(2)]
    weights = sum(memory.weights for memory in ranks) / 2
    assert weights == num_parameters(SEVEN)
    assert sum(memory.gradients for memory in ranks) == 4 * weights
    assert sum(memory.optimizer for memory in ranks) == 12 * weights / 4
    whole = replace(costs, distributed_optimizer=False)
    assert rank_memory(lowered, whole, 0).optimizer == 4 * ranks[0].optimizer
    assert ranks[0].activations > ranks[1].activations > 0
    assert all(memory.messages > 0 and memory.workspace >= 0 for memory in ranks)
    for rank, memory in enumerate(ranks):
        static = costs.static_memory(lowered.program.pieces_of_rank(rank))
        assert static == pytest.approx(memory.weights + memory.gradients + memory.optimizer)
        assert peak_memory(lowered.program, costs)[rank] == pytest.approx(memory.total)


def test_what_is_received_is_let_go() -> None:
    """Messages of a long pipeline do not pile up in the account: more microbatches, same peak."""
    few, many = (lower(build("1f1b", Shape(4, m, 32)), COSTS) for m in (8, 24))
    for rank in range(4):
        assert rank_memory(few, COSTS, rank) == rank_memory(many, COSTS, rank)


def test_tied_head_has_a_copy_only_away_from_the_embedding() -> None:
    tied = replace(COSTS, model=MODELS["helix-1.3b"])
    together = lower(build("none", Shape(1, 1, 24)), tied)
    apart = lower(build("1f1b", Shape(2, 2, 24)), tied)
    table = tied.model.padded_vocab(1) * 2048
    once = rank_memory(together, tied, 0).weights
    assert sum(rank_memory(apart, tied, rank).weights for rank in range(2)) == once + 2 * table


def test_pods_share_what_the_spine_takes() -> None:
    """Messages from pod to pod have a part of the bandwidth; within a pod, and in rings of several pods, all of it."""
    hardware = replace(HARDWARE["h100"], pod_nodes=2)
    full, thin = hardware, replace(hardware, oversubscription=4.0)

    def messages(on: Hardware, layout: Layout, data: int) -> list[float]:
        costs = ModelCosts(MODELS["llama2-7b"], on, layout, 4096, data)
        stages = even_stages(costs.layer_kinds(32), 4)
        program = Program("", stages, tuple((Op("F", rank, 0), Op("B", rank, 0)) for rank in range(4)), uniform(1, 1))
        bound = BoundCosts(program, costs)
        pairs = ((0, 1), (1, 2), (2, 3))
        return [bound.transfer_time(Transfer(0, "activation", pair, Unit(pair[1], 0, 0))) for pair in pairs]

    layout = Layout(8, True)
    wide, narrow = messages(full, layout, 1), messages(thin, layout, 1)
    assert narrow[0] == wide[0] and narrow[2] == wide[2]  # nodes 0 and 1 are a pod, and 2 and 3
    assert narrow[1] - hardware.latency == pytest.approx(4 * (wide[1] - hardware.latency))
    program = Program("", even_stages(32, 1), ((Op("F", 0, 0), Op("B", 0, 0)),), uniform(1, 1))
    for factor, slower in ((2.0, 1.0), (6.0, 3.0)):  # the rings of one node leave a pod of two
        reductions = [
            ModelCosts(MODELS["llama2-7b"], on, layout, 4096, 8).after_time(program)[0]
            for on in (full, replace(hardware, oversubscription=factor))
        ]
        assert reductions[1] == pytest.approx(slower * reductions[0])


def test_steps_of_ever_other_lengths_are_not_all_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run over documents, whose chunks are those of no step before."""
    monkeypatch.setattr(BoundedDict.__init__, "__defaults__", (50,))
    costs = replace(COSTS, layout=Layout(tensor_parallel=2, overlap_tp_comm="halves"))
    for tokens in range(64, 264):
        assert costs.op_time(Work("F", (Piece("mlp", 0),), (Extent(tokens, 0, False),), tokens)) > 0
    remembered = [value for value in vars(costs).values() if isinstance(value, dict)]
    assert len(remembered) >= 2 and all(isinstance(each, BoundedDict) for each in remembered)
    assert 0 < len(costs._op_times) <= 50
