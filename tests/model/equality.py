"""Runs on the ranks of test_equality.py: our model against plain megatron-core, on the same weights and data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state

from helixpipe.model import PipelineModel
from helixpipe.program.stages import Piece
from tests.distributed import gather_tensors
from tests.model.common import (
    CHAIN,
    CONTEXT,
    gradients_of,
    make_batch,
    make_model,
    make_reference,
    reference_forward,
    run_parts,
    score,
    set_parallel,
    worst,
)


def compare(rank: int, world_size: int) -> dict[str, Any]:
    """Largest relative difference and where, for every case; rank 0 cuts the GPT model, rank 1 the Llama model."""
    set_parallel(tp=1)
    style = ("gpt", "llama")[rank]
    results: dict[str, Any] = {}
    for tied in (True, False):
        results.update(compare_cuts(style, tied))
    expected = {
        (style, tied): expected_of(style, tied) for style, tied in (("gpt", True), ("llama", True), ("llama", False))
    }
    set_parallel(tp=2)
    for (style, tied), (weights, gradients, loss) in expected.items():
        for sequence_parallel in (False, True):
            case = f"{style}-{'tied' if tied else 'untied'}-tp2-{'sp' if sequence_parallel else 'nosp'}"
            model = make_model(style, tied, tp=2, sequence_parallel=sequence_parallel)
            shards = {name: parameter.detach() for name, parameter in model.named_parameters()}
            results[f"{case}-weights"] = worst(whole(model, shards, partial_sums=False), weights)
            parts = [(model, (piece,)) for piece in CHAIN]  # cut everywhere
            run_parts(parts, make_batch(), objective=lambda logits: score(logits, rank))
            results[f"{case}-gradients"] = worst(whole(model, gradients_of(model), partial_sums=True), gradients)
            ours = model.run(CHAIN, (), make_batch(), CONTEXT)[0]
            results[f"{case}-loss"] = (abs(ours.item() / loss - 1), "loss")
    return results


def compare_cuts(style: str, tied: bool) -> dict[str, Any]:
    """The whole model, then every cut into two models that hold one side each, then a cut after every piece."""
    case = f"{style}-{'tied' if tied else 'untied'}"
    batch = make_batch()
    _, expected, _ = expected_of(style, tied)
    whole_model = make_model(style, tied)
    weights = dict(whole_model.state_dict())

    results = {}
    run_parts([(whole_model, CHAIN)], batch, objective=score)
    results[f"{case}-whole"] = worst(gradients_of(whole_model), expected)
    for cut in range(1, len(CHAIN)):
        front, back = make_model(style, tied, CHAIN[:cut]), make_model(style, tied, CHAIN[cut:])
        check_split(weights, front, back, tied)
        run_parts([(front, CHAIN[:cut]), (back, CHAIN[cut:])], batch, objective=score)
        results[f"{case}-after-{CHAIN[cut - 1]}"] = worst(gradients_of(front, back), expected)
    whole_model.zero_grad()
    run_parts([(whole_model, (piece,)) for piece in CHAIN], batch, objective=score)
    results[f"{case}-every-piece"] = worst(gradients_of(whole_model), expected)

    # The real loss, and the gradients it gives.
    reference = make_reference(style, tied)
    reference.load_state_dict(weights)
    theirs = torch.sum(reference_forward(reference, batch, batch.labels) * batch.loss_mask)
    theirs.backward()
    whole_model.zero_grad()
    ours = run_parts([(whole_model, CHAIN)], batch)
    results[f"{case}-loss"] = (abs(ours.item() / theirs.item() - 1), "loss")
    results[f"{case}-loss-gradients"] = worst(gradients_of(whole_model), gradients_of(reference))
    return results


def expected_of(
    style: str, tied: bool, chain: Sequence[Piece] = CHAIN, **changes: Any
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], float]:
    """Weights of our model, and the gradients and the loss that megatron-core's GPTModel gives with them."""
    weights = make_model(style, tied, chain, **changes).state_dict()
    reference = make_reference(style, tied, **changes)
    reference.load_state_dict(weights)  # by name, strictly
    batch = make_batch()
    score(reference_forward(reference, batch, None)).backward()
    loss = torch.sum(reference_forward(reference, batch, batch.labels) * batch.loss_mask).item()
    named = {name: parameter.detach() for name, parameter in reference.named_parameters()}
    return named, gradients_of(reference), loss


def check_split(weights: dict[str, Any], front: PipelineModel, back: PipelineModel, tied: bool) -> None:
    """Two partial models hold all weights once, with the whole model's values, but for the tied head's copy."""
    held = [name for model in (front, back) for name, _ in model.named_parameters()]
    copy = ["output_layer.weight"] if tied else []
    expected = [name for name, value in weights.items() if value is not None] + copy
    assert sorted(held) == sorted(expected), (held, expected)
    for model in (front, back):
        for name, parameter in model.named_parameters():
            source = "embedding.word_embeddings.weight" if tied and name in copy else name
            assert torch.equal(parameter, weights[source]), name
    embedding, head = front.embedding.word_embeddings.weight, back.output_layer.weight
    # What megatron-core's optimizer reads: only the copy is left out of the gradient norm.
    assert [getattr(weight, "shared_embedding", False) for weight in (embedding, head)] == [tied, tied]
    assert [getattr(weight, "shared", False) for weight in (embedding, head)] == [False, tied]
    for model in (front, back):
        assert list(model.replicated_parameters()) == (["embedding.word_embeddings.weight"] if tied else [])


def whole(model: PipelineModel, shards: dict[str, torch.Tensor], partial_sums: bool) -> dict[str, torch.Tensor]:
    """Tensors of the unsplit model from both tensor-parallel ranks'; gradients that are partial sums are summed."""
    own = {name: shards[name] for name, _ in model.named_parameters()}
    one, other = gather_tensors(own, parallel_state.get_tensor_model_parallel_group())
    result = {}
    for name, parameter in model.named_parameters():
        first, second = one[name], other[name]
        if getattr(parameter, "tensor_model_parallel", False):
            dim, stride = parameter.partition_dim, parameter.partition_stride
            pairs = zip(first.chunk(stride, dim), second.chunk(stride, dim), strict=True)
            result[name] = torch.cat([block for pair in pairs for block in pair], dim)
        elif partial_sums and getattr(parameter, "sequence_parallel", False):
            result[name] = first + second
        else:
            assert torch.equal(first, second), name
            result[name] = first
    return result
