"""Runs on the ranks of test_positions.py: learned positions that tensor-parallel ranks share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from helixpipe.model import GPTOptions, Microbatch, PipelineModel
from helixpipe.program.stages import Piece
from tests.model.common import BATCH, CHAIN, CONTEXT, SEQUENCE, VOCABULARY, make_batch, make_config, set_parallel, worst
from tests.model.equality import whole
from tests.model.slices import counted
from tests.model.state import entries, load, save

EVEN, UNEVEN = SEQUENCE + 2, SEQUENCE + 3
"""Rows of tables that two ranks can share and cannot."""

TABLE = "embedding.position_embeddings.weight"


def make_model(tp: int, rows: int = EVEN, seed: int = 7, **changes: Any) -> PipelineModel:
    return PipelineModel(make_config("gpt", tp, **changes), GPTOptions(VOCABULARY, rows), CHAIN, seed=seed)


def batches() -> dict[str, Microbatch]:
    """Positions that count up, and others, the last row among them."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(0, EVEN, (BATCH, SEQUENCE), generator=generator)
    ids[0, 0] = EVEN - 1
    return {"counted": make_batch(), "given": replace(make_batch(), position_ids=ids)}


def embed(model: PipelineModel, batch: Microbatch, offset: int = 0, length: int = SEQUENCE) -> torch.Tensor:
    context = CONTEXT._replace(offset=offset, length=length)
    (hidden,) = model.run((Piece("embed"),), (), batch, context)
    return hidden


def backward(model: PipelineModel, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of word embedding and positions, of a function in which every element has another share."""
    rows, rank = hidden.size(0), model.tp_group.rank()
    first = rows * rank if model.config.sequence_parallel else 0
    shares = torch.sin(torch.arange(SEQUENCE * BATCH * 32, dtype=torch.float64)).view(SEQUENCE, BATCH, 32)
    torch.sum(shares[first : first + rows] * hidden).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def compare(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    set_parallel(tp=1)
    expected, alone = {}, {}
    for rows in (EVEN, UNEVEN):
        for name, batch in batches().items():
            model = make_model(1, rows)
            hidden = embed(model, batch)
            expected[rows, name] = hidden.detach(), backward(model, hidden)
        alone[rows] = dict(model.named_parameters())[TABLE].detach()
    results["entries of one rank"] = table_entries(make_model(1))
    save(make_model(1, seed=21), Path(folder) / "one")
    set_parallel(tp=2)
    for rows in (EVEN, UNEVEN):
        for split in (False, True):
            for name, batch in batches().items():
                results[f"{rows} {split} {name}"] = one(rows, split, batch, *expected[rows, name])
        table = dict(make_model(2, rows).named_parameters())[TABLE].detach()
        results[f"{rows} rows"] = table.shape[0], torch.equal(table, alone[rows][own_rows(rows, rank)])
    results["entries of two ranks"] = table_entries(make_model(2))
    model = make_model(2)
    parts = [embed(model, batches()["given"], offset, length) for offset, length in ((0, 5), (5, 7))]
    results["chunks"] = torch.equal(torch.cat(parts), embed(model, batches()["given"]))
    results["one to two"] = loaded(make_model(2, seed=99), make_model(2, seed=21), Path(folder) / "one")
    save(make_model(2, seed=22), Path(folder) / "two")
    set_parallel(tp=1)
    results["two to one"] = loaded(make_model(1, seed=99), make_model(1, seed=22), Path(folder) / "two")
    return results


def own_rows(rows: int, rank: int) -> slice:
    return slice(None) if rows % 2 else slice(rank * rows // 2, (rank + 1) * rows // 2)


def one(
    rows: int, split: bool, batch: Microbatch, expected: torch.Tensor, gradients: dict[str, torch.Tensor]
) -> tuple[bool, tuple[float, str], list[str], list[str]]:
    """(hidden states equal, worst gradient, collectives of the forward, of the backward)."""
    model = make_model(2, rows, sequence_parallel=split)
    with counted() as forward:
        hidden = embed(model, batch)
    part = expected.chunk(2)[model.tp_group.rank()] if split else expected
    with counted() as after:
        own = backward(model, hidden)
    shards = {name: own.get(name, torch.zeros(())) for name, _ in model.named_parameters()}
    found = {name: value for name, value in whole_of(model, shards).items() if name in gradients}
    return torch.equal(hidden, part), worst(found, gradients), forward, after


def whole_of(model: PipelineModel, shards: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    shards = {n: shards[n] if shards[n].dim() else torch.zeros_like(p) for n, p in model.named_parameters()}
    return whole(model, shards, partial_sums=True)


def table_entries(model: PipelineModel) -> list[tuple[Any, ...]]:
    return [entry for entry in entries(model) if entry[0] == TABLE]


def loaded(model: PipelineModel, target: PipelineModel, folder: Path) -> bool:
    """Whether all weights of a checkpoint are those of `target`."""
    load(model, folder)
    found = dict(model.named_parameters())
    return all(torch.equal(found[name], value) for name, value in target.named_parameters())
