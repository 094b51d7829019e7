"""Training steps of our function and of megatron-core's, side by side."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from helixpipe.model.device import prepare, redirect

prepare()  # before megatron-core is imported, whose notices it silences

from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func as get_cores
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from helixpipe.common.errors import UserError
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
            offloader = function._runner.offloader if function._runner is not None else None
            results[index]["offloaded"] = 0 if offloader is None else offloader.moved
            function.close()
    return [results[index] for index in range(len(cases))]


def with_dropout(rank: int, world_size: int, case: Case) -> list[list[list[float]]]:
    """Losses of the case's steps without dropout and with it, twice: drawn anew, and from the same state."""
    start(case.tp, case.pp)
    found = []
    for rate in (0.0, 0.3, 0.3):
        torch.manual_seed(5)
        model_parallel_cuda_manual_seed(5, force_reset_rng=True)
        function = get_forward_backward_func(schedule=case.schedule or "", **dict(case.options))
        changes = (("hidden_dropout", 0.0), ("attention_dropout", rate))
        found.append(train(replace(case, changes=changes), function).losses)
        function.close()
    return found


def left_as_it_was(rank: int, world_size: int, case: Case) -> dict[str, Any]:
    """What a model gives for a whole sequence before a step in chunks, after it, and when the engine has been closed;
    and what is told of arguments that cannot be cut."""
    start(case.tp, case.pp)
    (model,), _ = set_up(case)
    tokens, labels, _ = batches(1, 0)[0]
    positions, mask = torch.arange(SEQUENCE).expand(BATCH, -1), torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1) > 0
    with torch.no_grad():
        outputs = [model(tokens, positions, mask, labels=labels)]
    hooks = [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()]
    function = get_forward_backward_func(schedule=case.schedule or "", **dict(case.options))

    def call(forward: Any = forward_step) -> None:
        with redirect():
            function(
                forward_step_func=forward,
                data_iterator=iter(batches(case.m, 0)),
                model=model,
                num_microbatches=case.m,
                seq_length=SEQUENCE,
                micro_batch_size=BATCH,
            )

    def documents(iterator: Any, model: Any) -> Any:
        tokens, labels, _ = next(iterator)
        apart = mask.clone()
        apart[..., SEQUENCE // 2 :, : SEQUENCE // 2] = True
        return model(tokens, positions, apart, labels=labels), None

    def packed(iterator: Any, model: Any) -> Any:
        return model(*next(iterator)[:2], None, packed_seq_params=object()), None

    call()
    with torch.no_grad():
        outputs.append(model(tokens, positions, mask, labels=labels))
    told = []
    for forward in (documents, packed):
        try:
            call(forward)
        except UserError as error:
            told.append(str(error))
    function.close()
    with torch.no_grad():
        outputs.append(model(tokens, positions, mask, labels=labels))
    return {
        "equal": [torch.equal(outputs[0], output) for output in outputs[1:]],
        "replaced": [name for name, module in model.named_modules() if "forward" in vars(module)],
        "hooks": hooks == [len(each._forward_pre_hooks) + len(each._forward_hooks) for each in model.modules()],
        "told": told,
    }


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
