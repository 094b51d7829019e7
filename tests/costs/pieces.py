"""What torch counts of the real pieces, beside what helixpipe counts; runs inside ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from megatron.core.parallel_state import get_global_memory_buffer
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.accounting import SavedBytes
from helixpipe.costs.models import Chunk, Layout, ModelShape
from helixpipe.costs.piece_bytes import PieceBytes
from helixpipe.costs.piece_kinds import work
from helixpipe.model import GPTOptions, Microbatch, PipelineModel, UnitContext
from helixpipe.model.attention.kv_store import KeyValueStore
from helixpipe.planning.memory.recompute import RecomputeOptions
from helixpipe.program.program import Op, Program, Unit
from helixpipe.program.stages import Piece, Segment, Stage, model_pieces
from helixpipe.program.workload import uniform
from helixpipe.runtime.executor import Step
from schedules import Shape, build
from schedules.helix import HelixOptions
from tests.costs.layouts import BATCH, LAYERS, TOKENS, VOCABULARY, layouts, squares
from tests.costs.watched import watched
from tests.model.common import make_config

CHAIN = model_pieces(LAYERS)
Compared = tuple[str, float, float]
"""What, torch's count, ours."""
CONTEXT = UnitContext(step=0, microbatch=0)
RUNS = [CHAIN[a:b] for a in range(len(CHAIN)) for b in {a + 1, a + 6, len(CHAIN)} if b <= len(CHAIN)]
RUNS_OF_CHUNKS = [
    run
    for run in RUNS
    if (len(run) <= 6 and (run[0].layer < 1 or run[-1].kind == "head")) or run[0].kind in ("embed", "attn")
]
"""Without those that begin and end in the second layer, which is as the first, and most of those that are long."""
CHUNKS = (12, 8, 4)
"""Their lengths."""


def compare(rank: int, world_size: int, cases: Sequence[str]) -> dict[str, list[Compared]]:
    """For each model and layout, (what, torch's count, ours) of FLOPs, of bytes kept and sent, and of weights; nothing
    where one rank is enough and another has its turn."""
    results: dict[str, list[Compared]] = {}
    for turn, (case, shape, layout) in enumerate(layouts(cases)):
        if not has_turn(turn, layout):
            results[case] = []
            continue
        results[case] = [
            *_flops(shape, layout),
            *_saved(shape, layout),
            *_recomputed(shape, layout),
            *_helix(shape, layout),
            *_inside_mlp(shape, layout),
            *_saved_of_chunks(shape, layout),
            *_parameters(shape, layout),
        ]
    return results


def has_turn(turn: int, layout: Layout) -> bool:
    """Whether this rank counts in this layout: each does if all are needed."""
    ranks = torch.distributed.get_world_size()
    return layout.tensor_parallel * layout.context_parallel == ranks or turn % ranks == torch.distributed.get_rank()


def make(shape: ModelShape, layout: Layout, pieces: Sequence[Piece] = CHAIN) -> PipelineModel:
    llama = {"normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    config = make_config(
        "gpt",
        layout.tensor_parallel,
        params_dtype=torch.float32,
        sequence_parallel=layout.sequence_parallel,
        num_query_groups=shape.groups,
        kv_channels=shape.channels,
        ffn_hidden_size=shape.ffn,
        add_bias_linear=shape.bias,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        layernorm_zero_centered_gamma=shape.centered,
        **(llama if shape.gated else {}),
    )
    options = GPTOptions(
        vocab_size=shape.padded_vocab(layout.tensor_parallel),
        max_sequence_length=shape.seq_length,
        position_embedding_type=shape.positions,
        share_embeddings_and_output_weights=shape.tied,
        chunk_size=layout.mlp_chunk,
        loss_chunk_size=layout.loss_chunk,
        cp_comm_type=layout.cp_comm_type,
        overlap_tp_comm=layout.overlap_tp_comm,
    )
    return PipelineModel(config, options, pieces)


def batch() -> Microbatch:
    tokens = torch.randint(0, VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))
    return Microbatch(tokens, tokens.clone(), torch.ones(BATCH, TOKENS))


def inputs_of(model: PipelineModel, first: Piece, tokens: int = TOKENS) -> tuple[torch.Tensor, ...]:
    """Tensors as they arrive from another rank, before piece `first`."""
    if first.kind == "embed":
        return ()
    before = CHAIN[CHAIN.index(first) - 1]
    return tuple(torch.randn(shape, requires_grad=True) for shape in model.payload_shapes(before, BATCH, tokens))


def _attention_flops(query: Any, key: Any, *unused: Any, **also_unused: Any) -> int:
    b, heads, rows, channels = query
    return 2 * 2 * b * heads * rows * key[2] * channels


def _attention_backward_flops(gradient: Any, query: Any, key: Any, *unused: Any, **also_unused: Any) -> int:
    return _attention_flops(query, key) * 5 // 2  # as torch counts the GPU's: the scores again, and four products


@contextmanager
def counted() -> Iterator[FlopCounterMode]:
    """torch's counter; it lacks only the CPU's flash attention, which here counts as it counts the GPU's."""
    aten = torch.ops.aten
    mapping = {
        aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    }
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        yield counter


def _needed(
    pieces: Sequence[Piece], inputs: tuple[torch.Tensor, ...], recomputed: bool = False
) -> tuple[torch.Tensor, ...]:
    """All but a residual that only passes by."""
    return inputs[:-1] if Segment(tuple(pieces), recomputed).passes_residual else inputs


def _flops(shape: ModelShape, layout: Layout) -> list[Compared]:
    model = make(shape, layout)
    return [row for piece in CHAIN for row in flops_of_piece(model, shape, layout, piece, inputs_of(model, piece))]


def flops_of_piece(
    model: PipelineModel, shape: ModelShape, layout: Layout, piece: Piece, inputs: tuple[torch.Tensor, ...]
) -> list[Compared]:
    """Return the FLOPs of F, I and W, and of an F alone; and what waits for W."""
    store, found, counts = model.weight_gradients(), list[Compared](), {}
    with counted() as counter:
        outputs = model.run((piece,), inputs, batch(), CONTEXT)
    counts["F"] = counter.get_total_flops()
    gradients = tuple(torch.ones_like(tensor) for tensor in outputs)
    unit = Unit(0, 0)
    with counted() as counter, store.keep(unit):
        torch.autograd.backward(outputs, gradients)
    counts["I"] = counter.get_total_flops()
    kept = [each for put_off in store._waiting[unit] for each in put_off[1:]]
    waiting = [each for each in kept if isinstance(each, torch.Tensor)]
    deferred = PieceBytes(shape, layout).deferred_stash((piece,), Chunk(TOKENS))
    found.append((f"deferred {piece}", _storage_bytes(waiting), deferred))
    del kept, waiting
    with counted() as counter:
        store.compute(unit)
    counts["W"] = counter.get_total_flops()
    for op, count in counts.items():
        kernels = work(shape, layout, piece.kind, op, Chunk(TOKENS), shares=piece.shares)
        ours = sum(kernel.flops for kernel in kernels) * (squares(layout) if piece.kind == "attn" else 1)
        found.append((f"flops {op} {piece}", count, ours))
    with counted() as counter, torch.no_grad():
        model.run((piece,), inputs, batch(), CONTEXT)
    kernels = work(shape, layout, piece.kind, "F", Chunk(TOKENS), True, piece.shares)
    ours = sum(kernel.flops for kernel in kernels) * (squares(layout) if piece.kind == "attn" else 1)
    found.append((f"flops alone {piece}", counter.get_total_flops(), ours))
    return found


def _storage_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def _saved(shape: ModelShape, layout: Layout) -> list[Compared]:
    model = make(shape, layout)
    own = PieceBytes(shape, layout)
    found: list[Compared] = []
    model.run(CHAIN, (), batch(), CONTEXT)  # makes RoPE's table
    rotary = getattr(model.decoder.layers["0"], "_rotary", None)
    tables = rotary._table if rotary is not None else ()
    for pieces in RUNS:
        data = batch()
        known = [*model.parameters(), *tables, data.tokens, data.labels, data.loss_mask]
        inputs = inputs_of(model, pieces[0])
        with SavedBytes(known) as account:
            outputs = model.run(pieces, inputs, data, CONTEXT)
            saved = account.now
            held = tuple(tensor * tensor for tensor in _needed(pieces, inputs))  # saves the inputs too
            stash = account.now
        what = f"{pieces[0]}..{pieces[-1]}"
        found.append((f"saved {what}", saved, sum(own.saved(pieces, Chunk(TOKENS)).values())))
        found.append((f"stash {what}", stash, own.stash(pieces, Chunk(TOKENS))))
        del outputs, held
        if pieces[0].kind != "embed":
            nbytes = sum(tensor.nbytes for tensor in inputs)
            found.append((f"message {what}", nbytes, own.message(pieces[0], Chunk(TOKENS))))
    return found


def _inside_mlp(shape: ModelShape, layout: Layout) -> list[Compared]:
    """The most that autograd saves in the backward of an MLP, beside the product that its second layer multiplies."""
    model, own, piece, data = make(shape, layout), PieceBytes(shape, layout), Piece("mlp", 1), batch()
    inputs = inputs_of(model, piece)
    gradient = torch.autograd.grad(model.run((piece,), inputs, data, CONTEXT), inputs, torch.ones_like(inputs[0]))
    buffers = get_global_memory_buffer().buffer.values()
    with SavedBytes([*model.parameters(), *buffers]) as account:
        outputs = model.run((piece,), inputs, data, CONTEXT)
        torch.autograd.backward(outputs, gradient)
    inside = own.mlp_slice(Chunk(TOKENS))
    ours = sum(own.saved((piece,), Chunk(TOKENS)).values()) + sum(inside.values()) - inside["mlp product"]
    return [("peak in the backward of an MLP", account.peak, ours)]


RECOMPUTATIONS = (
    RecomputeOptions("full"),
    RecomputeOptions("full", recompute_method="block"),
    RecomputeOptions("full", recompute_num_layers=2),
    RecomputeOptions("selective"),
    RecomputeOptions("selective", recompute_modules=("mlp",)),
    RecomputeOptions("without-attention"),
)


def _recomputed(shape: ModelShape, layout: Layout) -> list[Compared]:
    """Return what the executor holds of one unit after F, and at most while its backward recomputes."""
    model = make(shape, layout)
    own, found = PieceBytes(shape, layout), list[Compared]()
    rows = ((Op("F", 0, 0), Op("B", 0, 0)),)
    data = batch()
    model.run(CHAIN, (), data, CONTEXT)
    rotary = getattr(model.decoder.layers["0"], "_rotary", None)
    tables = rotary._table if rotary is not None else ()
    for options in RECOMPUTATIONS:
        stages = options.stages((Stage(CHAIN),))
        step = Step(0, int, lambda index: data, lambda index: torch.tensor(1.0), BATCH, TOKENS)
        with SavedBytes([*model.parameters(), *tables, data.tokens, data.labels, data.loss_mask]) as account:
            executor = watched(Program("one", stages, rows, uniform(1)), model, account, step)
        what = f"{options.granularity} {options.recompute_method} {options.recompute_num_layers}"
        for kind, held in (("F", executor.after_forward), ("B", executor.most)):
            ours = own.segments_stash(stages[0].segments, Chunk(TOKENS), kind)
            found.append((f"recompute {kind} {what} {options.recompute_modules}", held, ours))
    return found


def _helix(shape: ModelShape, layout: Layout) -> list[Compared]:
    """Return what the executor holds of all stages of one microbatch after their F, for each cut of helix's layers."""
    model, own, data, found = make(shape, layout), PieceBytes(shape, layout), batch(), list[Compared]()
    model.run(CHAIN, (), data, CONTEXT)
    rotary = getattr(model.decoder.layers["0"], "_rotary", None)
    tables = rotary._table if rotary is not None else ()
    for ship, recompute in product(("none", "qkv", "attention"), (False, True)):
        options = HelixOptions(1, ship, recompute)
        asked = RecomputeOptions(recompute_early=False)
        program = build("helix", Shape(1, 1, LAYERS, recompute=asked), options)
        step = Step(0, int, lambda index: data, lambda index: torch.tensor(1.0), BATCH, TOKENS)
        with SavedBytes([*model.parameters(), *tables, data.tokens, data.labels, data.loss_mask]) as account:
            executor = watched(program, model, account, step)
        for last in range(len(program.stages) - 1):
            ours = sum(own.segments_stash(stage.segments, Chunk(TOKENS), "F") for stage in program.stages[: last + 1])
            found.append((f"helix {ship} {recompute} to stage {last}", executor.totals[last], ours))
    return found


def _saved_of_chunks(shape: ModelShape, layout: Layout) -> list[Compared]:
    """Return what chunks keep beside the store, and the store."""
    model = make(shape, layout)
    own = PieceBytes(shape, layout)
    found: list[Compared] = []
    model.run(CHAIN, (), batch(), CONTEXT)  # makes RoPE's table
    rotary = getattr(model.decoder.layers["0"], "_rotary", None)
    tables = rotary._table if rotary is not None else ()
    for pieces in RUNS_OF_CHUNKS:
        store = KeyValueStore(rows_apart=model.rows_apart)
        layers = [piece.layer for piece in pieces if piece.kind == "attn"]
        units = []
        for number, tokens in enumerate(CHUNKS):
            earlier = sum(CHUNKS[:number])
            unit = store.unit(0, earlier, tokens, TOKENS)
            context = UnitContext(0, 0, number, earlier, tokens, keys_values=unit)
            data, chunk = batch(), Chunk(tokens, earlier, len(CHUNKS) > 1)
            inputs = inputs_of(model, pieces[0], tokens)
            if layers:
                with torch.no_grad():  # makes the buffers, which are known then
                    model.run(pieces, inputs, data, context)
            buffers = [buffer for layer in layers for buffer in store.get(0, layer).buffers]
            known = [*model.parameters(), *tables, data.tokens, data.labels, data.loss_mask, *buffers]
            with SavedBytes(known) as account:
                outputs = model.run(pieces, inputs, data, context)
                saved = account.now
                held = tuple(tensor * tensor for tensor in _needed(pieces, inputs))  # saves the inputs too
                stash = account.now
            del held
            units.append((unit, outputs))
            what = f"chunk {number} {pieces[0]}..{pieces[-1]}"
            found.append((f"saved {what}", saved, sum(own.saved(pieces, chunk).values())))
            found.append((f"stash {what}", stash, own.stash(pieces, chunk)))
            if pieces[0].kind != "embed":
                inputs = _needed(pieces, inputs, recomputed=True)
                kept = sum({t.untyped_storage().data_ptr(): t.nbytes for t in inputs}.values())
                rows = slice(unit.offset, unit.offset + unit.length)
                kept -= sum(t.nbytes for t in inputs if any(t.is_set_to(b[rows]) for b in buffers))
                found.append(
                    (f"stash recomputed {what}", kept, own.segments_stash((Segment(tuple(pieces), True),), chunk, "F"))
                )
        if layers:
            what = f"{pieces[0]}..{pieces[-1]}"
            found.append((f"saved store {what}", store.bytes_alive(), own.keys_values(pieces, TOKENS)))
            for unit, _ in reversed(units[1:]):
                unit.begin_backward(layers)
                unit.finish(layers)
            both = own.keys_values(pieces, TOKENS) + own.key_value_gradients(pieces, sum(CHUNKS[:-1]))
            found.append((f"saved store and gradients {what}", store.peak_bytes(), both))
    return found


def _parameters(shape: ModelShape, layout: Layout) -> list[Compared]:
    own = PieceBytes(shape, layout)
    parts = [CHAIN, CHAIN[:6], CHAIN[6:], *((piece,) for piece in CHAIN if piece.kind != "attn")]
    found: list[Compared] = []
    for pieces in parts:
        count = sum(parameter.numel() for parameter in make(shape, layout, pieces).parameters())
        found.append((f"parameters {pieces[0]}..{pieces[-1]}", count, own.parameters(pieces)))
    return found
