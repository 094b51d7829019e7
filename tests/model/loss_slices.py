"""Runs on the ranks of test_chunked_loss.py: losses over slices against losses of whole logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection

from benchmarks.accounting import AliveBytes
from helixpipe.costs.models import Chunk, Layout, ModelShape
from helixpipe.costs.piece_bytes import PieceBytes
from helixpipe.model import GPTOptions, Microbatch, PipelineModel, UnitContext
from helixpipe.program.stages import Piece
from tests.model.common import BATCH, CONTEXT, SEQUENCE, make_batch, make_config, make_options, set_parallel
from tests.model.slices import PARALLEL, STYLES, counted

SIZES = (1, 5, 12, 50)
HEAD = (Piece("head"),)
ROOT = 0.37

Found = tuple[float, torch.Tensor, dict[str, torch.Tensor]]
"""The loss sum, the gradient of the head's input, and those of the weights."""


def make_head(style: str, size: int, tp: int = 1, **changes: Any) -> PipelineModel:
    options = replace(make_options(style, tied=False), loss_chunk_size=size)
    return PipelineModel(make_config(style, tp, **changes), options, HEAD, seed=7)


def hidden_states(model: PipelineModel, rows: int, seed: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, BATCH, model.config.hidden_size, generator=generator, dtype=torch.float64)
    return hidden.to(model.payload_dtype).requires_grad_()


def masked() -> Microbatch:
    """With a sequence whose tokens do not count, and others that count by halves."""
    batch = make_batch()
    mask = torch.arange(BATCH * SEQUENCE).reshape(BATCH, SEQUENCE) % 3 / 2
    mask[1] = 0.0
    return replace(batch, loss_mask=mask.float())


def step(model: PipelineModel, rows: int) -> Found:
    """Forward and backward of the head alone."""
    hidden = hidden_states(model, rows)
    (loss,) = model.run(HEAD, (hidden,), masked(), CONTEXT)
    loss.backward(torch.tensor(ROOT))
    assert hidden.grad is not None
    weights = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return loss.item(), hidden.grad, weights


def difference(ours: Found, theirs: Found) -> float:
    """The largest, relative to the largest number of its tensor."""
    assert ours[2].keys() == theirs[2].keys()
    pairs = [(ours[1], theirs[1]), *((ours[2][name], theirs[2][name]) for name in ours[2])]
    return max(((mine - other).abs().max() / other.abs().max()).item() for mine, other in pairs)


def compare(rank: int, world_size: int) -> dict[str, Any]:
    """Results of every check, by name."""
    results: dict[str, Any] = {}
    for layout, (tp, split) in PARALLEL.items():
        set_parallel(tp=tp)
        rows = SEQUENCE // tp if split else SEQUENCE
        changes = {"tp": tp, "sequence_parallel": split}
        for style in STYLES:
            whole = step(make_head(style, 0, **changes), rows)
            for size in SIZES:
                found = step(make_head(style, size, **changes), rows)
                results[f"{layout}-{style}-{size}"] = difference(found, whole), abs(found[0] / whole[0] - 1)
            results[f"{layout}-{style}-split"] = split_backward(style, rows, whole, changes)
        results[f"{layout}-collectives"] = collectives(rows, changes)
        results[f"{layout}-evaluation"] = evaluation(rows, changes)
    set_parallel(tp=1)
    results["value"] = value_before_and_after()
    results["bf16"] = {size: half_precision(size) for size in (0, 1, 5)}
    runs = (("gpt", torch.float32), ("gpt", torch.bfloat16), ("llama", torch.float32))
    results["peaks"] = [peaks(style, dtype, size) for style, dtype in runs for size in (64, 200)]
    return results


def split_backward(style: str, rows: int, whole: Found, changes: dict[str, Any]) -> tuple[float, int]:
    """As op I and, after it, op W do it: what differs, and how many weight gradients wait in between."""
    model = make_head(style, 5, **changes)
    store = model.weight_gradients()
    with store.keep("unit"):
        found = step(model, rows)
    waiting = len(list(store.tensors()))
    store.compute("unit")
    return difference(found, whole), waiting


def collectives(rows: int, changes: dict[str, Any]) -> list[list[str]]:
    """Return what tensor-parallel ranks exchange in the forward and in the backward, over three slices."""
    model = make_head("gpt", 5, **changes)
    hidden = hidden_states(model, rows)
    with counted() as forward:
        (loss,) = model.run(HEAD, (hidden,), make_batch(), CONTEXT)
    with counted() as backward:
        loss.backward()
    return [forward, backward]


def evaluation(rows: int, changes: dict[str, Any]) -> tuple[float, bool]:
    """How much losses differ where no gradient is asked for, and whether a graph was kept."""
    found = []
    for size in (5, 0):
        model = make_head("llama", size, **changes)
        with torch.no_grad():
            found.append(model.run(HEAD, (hidden_states(model, rows),), masked(), CONTEXT)[0])
    return abs(found[0].item() / found[1].item() - 1), found[0].requires_grad


def value_before_and_after() -> list[float]:
    """Of a loss and of what the executor keeps of it."""
    model = make_head("gpt", 5)
    (loss,) = model.run(HEAD, (hidden_states(model, SEQUENCE),), make_batch(), CONTEXT)
    kept = loss.detach()
    before = [loss.item(), kept.item()]
    loss.backward()
    (whole,) = make_head("gpt", 0).run(HEAD, (hidden_states(model, SEQUENCE),), make_batch(), CONTEXT)
    return [*before, kept.item() / whole.item(), loss.item() / whole.item()]


def half_precision(size: int) -> float:
    """In bfloat16, with the gradients summed in DistributedDataParallel's float32 buffers, against float64: the largest
    difference of the weight's gradients relative to their largest."""
    exact = make_head("llama", 0)
    model = make_head("llama", size, params_dtype=torch.bfloat16, bf16=True)
    with torch.no_grad():
        for ours, theirs in zip(exact.parameters(), model.parameters(), strict=True):
            ours.copy_(theirs)
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    DistributedDataParallel(model.config, config, model, pg_collection=groups).zero_grad_buffer()
    for seed in range(3):
        for each in (model, exact):
            hidden = hidden_states(model, SEQUENCE, seed).detach().to(each.payload_dtype).requires_grad_()
            each.run(HEAD, (hidden,), make_batch(), CONTEXT)[0].backward()
    found, expected = model.output_layer.weight.main_grad.double(), exact.output_layer.weight.grad
    return ((found - expected).abs().max() / expected.abs().max()).item()


def peaks(style: str, dtype: torch.dtype, size: int) -> tuple[str, float, float, float]:
    """Return what a step of the head alone has in memory at most, beside its input, weights and their gradients: (what,
    measured, predicted, measured without slices)."""
    tokens, batch, hidden, vocabulary = 512, 2, 64, 1024
    norm, positions = ("LayerNorm", "learned_absolute") if style == "gpt" else ("RMSNorm", "rope")
    shape = ModelShape(style, 1, hidden, 4, 4, 256, style != "gpt", vocabulary, False, norm, positions, False, tokens)
    half = dtype is torch.bfloat16
    config = make_config(style, 1, num_layers=1, hidden_size=hidden, params_dtype=dtype, bf16=half)
    labels = torch.randint(0, vocabulary, (batch, tokens), generator=torch.Generator().manual_seed(1))
    data = Microbatch(labels, labels, torch.ones(batch, tokens))
    measured = []
    for each in (size, 0):
        gpt = GPTOptions(vocabulary, tokens, positions, share_embeddings_and_output_weights=False, loss_chunk_size=each)
        model = PipelineModel(config, gpt, HEAD)
        for weight in model.parameters():
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        states = torch.randn(tokens, batch, hidden).to(dtype).requires_grad_()
        with AliveBytes() as alive:
            (loss,) = model.run(HEAD, (states,), data, UnitContext(step=0, microbatch=0))
            loss.backward(torch.tensor(1.0))
        measured.append(alive.peak)
    own = PieceBytes(shape, Layout(1, False, batch, dtype.itemsize, fused_kernels=False, loss_chunk=size))
    predicted = (
        own.stash(HEAD, Chunk(tokens)) - own.message(HEAD[0], Chunk(tokens)) + own.workspace(HEAD, Chunk(tokens))
    )
    return f"{style} {dtype} {size}", measured[0], predicted, measured[1]
