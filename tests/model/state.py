"""Runs on the ranks of test_state.py: dropout, checkpoints, megatron-core's DDP and optimizers around our model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection

from helixpipe.model import PipelineModel, UnitContext
from helixpipe.program.stages import Piece
from tests.model.common import (
    BATCH,
    CHAIN,
    CONTEXT,
    SEQUENCE,
    make_batch,
    make_model,
    make_reference,
    set_parallel,
)

MIDDLE = 4  # cuts the first layer between core attention and projection
DROPOUT: dict[str, Any] = {"hidden_dropout": 0.5, "attention_dropout": 0.5}


def all_checks(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    set_parallel(tp=1)
    dropout(results)
    chunks(results)
    optimizers(results, rank)
    checkpoint_keys(results)
    checkpoint_round_trip(results, rank, Path(folder))
    set_parallel(tp=2)
    dropout_over_tensor_parallel(results, rank)
    return results


# ----------------------------------------------------------------------------------------------------------- dropout


def dropout(results: dict[str, Any]) -> None:
    model, batch = make_model("gpt", True, **DROPOUT), make_batch()

    def loss(context: UnitContext) -> float:
        return model.run(CHAIN, (), batch, context)[0].item()

    base = UnitContext(step=3, microbatch=1)
    contexts = {
        "step": base._replace(step=4),
        "microbatch": base._replace(microbatch=2),
        "chunk": base._replace(chunk=1),
    }
    first = loss(base)
    changed = {name: loss(context) for name, context in contexts.items()}
    torch.manual_seed(99)
    results["repeats"] = loss(base) == first
    results["order does not matter"] = [loss(contexts[name]) for name in reversed(contexts)] == [
        changed[name] for name in reversed(contexts)
    ]
    results["all differ"] = len({first, *changed.values()}) == 4
    results["evaluation has none"] = loss(base._replace(training=False)) == loss(
        contexts["step"]._replace(training=False)
    )
    results["seed matters"] = make_model("gpt", True, seed=8, **DROPOUT).run(CHAIN, (), batch, base)[0].item() != first

    torch.manual_seed(5)
    state = torch.get_rng_state()
    loss(base._replace(training=False))
    make_model("gpt", True).run(CHAIN, (), batch, base)
    results["no seeding without dropout"] = torch.equal(torch.get_rng_state(), state)

    model.decoder.layers["1"].load_state_dict(model.decoder.layers["0"].state_dict())
    hidden = torch.randn(SEQUENCE, BATCH, 32, dtype=torch.float64)
    for name, pieces in {"mlp": ("mlp",), "proj": ("norm", "qkv", "attn", "proj")}.items():
        outputs = {
            (layer, training): model.run(
                [Piece(kind, layer) for kind in pieces], (hidden,), batch, base._replace(training=training)
            )[0]
            for layer in (0, 1)
            for training in (True, False)
        }
        results[f"layers draw apart in {name}"] = not torch.equal(outputs[0, True], outputs[1, True])
        assert torch.equal(outputs[0, False], outputs[1, False])


def dropout_over_tensor_parallel(results: dict[str, Any], rank: int) -> None:
    """Rank by rank: hashes of what dropout leaves when both ranks are given the same values."""
    piece = Piece("mlp", 0)
    for sequence_parallel in (False, True):
        rows = SEQUENCE // 2 if sequence_parallel else SEQUENCE
        model = make_model("gpt", True, tp=2, sequence_parallel=sequence_parallel, **DROPOUT)
        generator = torch.Generator().manual_seed(1)
        hidden = torch.randn(rows, BATCH, 32, generator=generator, dtype=torch.float64)
        output = model.run([piece], (hidden,), make_batch(), CONTEXT)[0]
        embedded = model.run(CHAIN[:1], (), replace(make_batch(), tokens=torch.zeros(BATCH, SEQUENCE).long()), CONTEXT)[
            0
        ]
        name = "sp" if sequence_parallel else "nosp"
        results[f"hidden dropout {name}"] = (output == hidden).nonzero().tolist()
        results[f"embedding dropout {name}"] = (embedded == 0).nonzero().tolist()
    query = torch.ones(SEQUENCE, BATCH, 2, 8, dtype=torch.float64)
    value = torch.randn(SEQUENCE, BATCH, 2, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    residual = torch.zeros(SEQUENCE // 2, BATCH, 32, dtype=torch.float64)
    attended = model.run([Piece("attn", 0)], (query, query, value, residual), make_batch(), CONTEXT)[0]
    results["attention dropout"] = attended.sum().item()


# ------------------------------------------------------------------------------------------------------------ chunks


def chunks(results: dict[str, Any]) -> None:
    """A chunk's embedding, projections and loss are its part of the whole sequence's."""
    cuts = ((0, 5), (5, 7))
    for style in ("gpt", "llama"):
        model, batch = make_model(style, True), make_batch()
        (embedded,) = model.run(CHAIN[:1], (), batch, CONTEXT)
        whole = model.run(CHAIN[1:3], (embedded,), batch, CONTEXT)
        (loss,) = model.run(CHAIN[-1:], (embedded,), batch, CONTEXT)
        losses = 0.0
        for number, (offset, length) in enumerate(cuts):
            context = UnitContext(0, 0, number, offset, length)
            (part,) = model.run(CHAIN[:1], (), batch, context)
            rows = slice(offset, offset + length)
            assert torch.equal(part, embedded[rows])
            for ours, expected in zip(model.run(CHAIN[1:3], (part,), batch, context), whole, strict=True):
                torch.testing.assert_close(ours, expected[rows], rtol=1e-12, atol=1e-12)
            losses += model.run(CHAIN[-1:], (part,), batch, context)[0].item()
        results[f"{style} chunk losses"] = losses, loss.item()
    shifted = replace(make_batch(), position_ids=torch.arange(SEQUENCE).flip(0).expand(BATCH, -1))
    model = make_model("gpt", True)
    table = dict(model.named_parameters())["embedding.position_embeddings.weight"]
    plain = model.run(CHAIN[:1], (), make_batch(), CONTEXT)[0]
    expected = plain + (table.flip(0) - table)[:, None]
    torch.testing.assert_close(model.run(CHAIN[:1], (), shifted, CONTEXT)[0], expected, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------------------------------------------- checkpoints


def entries(model: torch.nn.Module) -> set[tuple[Any, ...]]:
    """Key, shape, offset and replica of all that a model puts into a checkpoint."""
    result = set()
    for item in model.sharded_state_dict().values():  # type: ignore[operator]
        parts = item.build() if isinstance(item, ShardedTensorFactory) else item
        for part in parts if isinstance(parts, list) else [parts]:
            place: tuple[Any, ...] = (part.global_shape, part.global_offset)
            if isinstance(part, ShardedTensor):
                place += (part.local_shape, part.prepend_axis_num, part.axis_fragmentations, part.allow_shape_mismatch)
            result.add((part.key, place, part.replica_id))
    return result


def checkpoint_keys(results: dict[str, Any]) -> None:
    for style in ("gpt", "llama"):
        for tied in (True, False):
            theirs = entries(make_reference(style, tied))
            case = f"{style} {'tied' if tied else 'untied'}"
            results[f"{case} entries equal"] = entries(make_model(style, tied)) ^ theirs
            front = entries(make_model(style, tied, CHAIN[:MIDDLE]))
            back = entries(make_model(style, tied, CHAIN[MIDDLE:]))
            copies = (front | back) - theirs
            results[f"{case} parts make the whole"] = (front | back) - copies == theirs and not front & back
            results[f"{case} copies"] = sorted((key, replica[0]) for key, _, replica in copies)


def checkpoint_round_trip(results: dict[str, Any], rank: int, folder: Path) -> None:
    """Two pipeline ranks cut mid-layer -> plain GPTModel -> two tensor-parallel ranks."""
    for style, tied in (("gpt", True), ("llama", True), ("llama", False)):
        set_parallel(pp=2)
        part = make_model(style, tied, CHAIN[:MIDDLE] if rank == 0 else CHAIN[MIDDLE:], seed=21)
        save(part, folder / f"{style}-{tied}-pieces")
        set_parallel(tp=1)
        expected = make_model(style, tied, seed=21).state_dict()
        plain: GPTModel = make_reference(style, tied)
        load(plain, folder / f"{style}-{tied}-pieces")
        got = plain.state_dict()
        same = all(torch.equal(got[name], value) for name, value in expected.items() if value is not None)
        save(plain, folder / f"{style}-{tied}-plain")
        set_parallel(tp=2)
        sharded = make_model(style, tied, tp=2, seed=99)
        load(sharded, folder / f"{style}-{tied}-plain")
        target = make_model(style, tied, tp=2, seed=21).state_dict()
        loaded = sharded.state_dict()
        same_again = all(torch.equal(loaded[name], value) for name, value in target.items() if value is not None)
        results[f"{style}-{tied} round trip"] = same, same_again


def save(model: torch.nn.Module, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    dist_checkpointing.save(model.sharded_state_dict(), str(folder))  # type: ignore[operator]


def load(model: torch.nn.Module, folder: Path) -> None:
    state = dist_checkpointing.load(model.sharded_state_dict(), str(folder))  # type: ignore[operator]
    _, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected


# ------------------------------------------------------------------------------------------------ megatron-core around


def optimizers(results: dict[str, Any], rank: int) -> None:
    """Three steps over two data-parallel ranks, with and without the distributed optimizer."""
    for dtype in (torch.float32, torch.bfloat16):
        for distributed in (False, True):
            results[f"{dtype} {'distributed' if distributed else 'plain'} steps"] = train(dtype, distributed, rank)


def train(dtype: torch.dtype, distributed: bool, rank: int) -> list[tuple[float, float]]:
    """Loss on this rank and gradient norm of each step."""
    bf16 = dtype == torch.bfloat16
    model: PipelineModel = make_model("llama", True, params_dtype=dtype, bf16=bf16)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=distributed, grad_reduce_in_fp32=True)
    ddp = DistributedDataParallel(model.config, ddp_config, model, pg_collection=groups)
    settings = OptimizerConfig(
        lr=1e-2, bf16=bf16, params_dtype=dtype, use_distributed_optimizer=distributed, clip_grad=0.1
    )
    optimizer = get_megatron_optimizer(settings, [ddp], use_gloo_process_groups=False, pg_collection=groups)
    history = []
    for step in range(3):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        batch = make_batch(seed=100 * step + rank)
        with ddp.no_sync():
            (loss_sum,) = model.run(CHAIN, (), batch, UnitContext(step, rank))
            loss = loss_sum / batch.loss_mask.sum()
            loss.backward()
        finalize_model_grads([ddp], pg_collection=groups)
        _, norm, _ = optimizer.step()
        history.append((loss.item(), norm))
    return history
