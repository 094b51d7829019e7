"""Training steps of our function and of megatron-core's, side by side."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from helixpipe.model.device import prepare

prepare()  # before megatron-core is imported, whose notices it silences

from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func as get_cores

from schedules.drop_in import get_forward_backward_func
from tests.drop_in.loop import (
    BATCH,
    SEQUENCE,
    Case,
    Trained,
    batches,
    forward_step,
    gather,
    gradient_of,
    set_up,
    start,
    train,
)


def run_documented(rank: int, world_size: int, blocks: list[str]) -> list[dict[str, Any]]:
    """The code blocks of docs/megatron_core.md, the first two in order, then the third and again the second."""
    start(1, world_size)
    results = []
    for case, code in (
        (Case("zb1p", world_size, 4), blocks[0] + blocks[1]),
        (Case("zbv", world_size, 4, v=2, in_a_v=True), blocks[2] + blocks[1]),
    ):
        expected = train(case.by_core(), get_cores(pp_size=world_size, vp_size=None))
        model, optimizer = set_up(case)
        iterators = [iter(batches(case.m, 0)) for _ in model]
        names: dict[str, Any] = {
            "get_forward_backward_func": get_forward_backward_func,
            "parallel_state": parallel_state,
            "build_chunk": partial(_built, model),
            "forward_step": forward_step,
            "data_iterator": iterators if case.v > 1 else iterators[0],
            "model": model,
            "optimizer": optimizer,
            "num_microbatches": case.m,
            "seq_length": SEQUENCE,
            "micro_batch_size": BATCH,
        }
        exec(code, names)
        names["forward_backward_func"].close()
        results.append(
            {
                "losses": [each["lm loss"].item() for each in names["losses"]],
                "expected": expected.losses[0],
                "gradients": worst(gather(case, model, gradient_of), expected.gradients[0]),
            }
        )
    return results


def _built(model: list[Any], pre_process: bool, post_process: bool, vp_stage: int) -> Any:
    chunk = model[vp_stage]
    assert (chunk.module.pre_process, chunk.module.post_process) == (pre_process, post_process)
    return chunk


def compare(rank: int, world_size: int, cases: list[Case]) -> list[dict[str, Any]]:
    """For each case, how far what our function gives is from what megatron-core's gives: the largest difference of
    losses, gradients and weights relative to the largest value of the same tensor."""
    results: dict[int, dict[str, Any]] = {}
    for tp, pp in sorted({(case.tp, case.pp) for case in cases}):
        start(tp, pp)
        expected: dict[Case, Trained] = {}
        for index, case in enumerate(cases):
            if (case.tp, case.pp) != (tp, pp):
                continue
            own = case.by_core()
            if own not in expected:
                expected[own] = train(own, get_cores(pp_size=pp, vp_size=own.v if own.v > 1 else None))
            function = get_forward_backward_func(schedule=case.schedule or "", **dict(case.options))
            results[index] = difference(train(case, function), expected[own])
            function.close()
    return [results[index] for index in range(len(cases))]


def difference(ours: Trained, theirs: Trained) -> dict[str, Any]:
    last = parallel_state.is_pipeline_last_stage()
    return {
        "counts": [len(each) for each in theirs.losses] == [len(each) if last else 0 for each in ours.losses],
        "losses": max(map(relative, map(torch.tensor, ours.losses), map(torch.tensor, theirs.losses))) if last else 0.0,
        "gradients": max(map(worst, ours.gradients, theirs.gradients)),
        "weights": worst(ours.weights, theirs.weights),
        "validation": relative(torch.tensor(ours.validation[0]), torch.tensor(theirs.validation[0])) if last else 0.0,
        "collected": max(map(relative, ours.validation[1], theirs.validation[1])) if last else 0.0,
    }


def worst(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> tuple[float, str]:
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    assert all(theirs[name].abs().max() > 0 for name in theirs)
    return max((relative(ours[name], theirs[name]), name) for name in theirs)


def relative(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape and theirs.numel() > 0, (ours.shape, theirs.shape)
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()
