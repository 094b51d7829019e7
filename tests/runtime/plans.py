"""Runs on the ranks of test_plans.py: several plans, one after the other, on one executor."""

from __future__ import annotations

from typing import Any

from tests.runtime.equality import (  # first: it prepares megatron-core's import
    Case,
    by_microbatch,
    gather,
    left_in_tables,
    make_model,
    make_step,
    reference,
)

# isort: split
from megatron.core import parallel_state

from helixpipe.costs.by_hand import unit_costs
from helixpipe.model.device import device
from helixpipe.planning.order.orders import one_forward_one_backward
from helixpipe.planning.plan import Plan, make_plan
from helixpipe.program.program import Op, Program
from helixpipe.program.stages import even_stages
from helixpipe.program.workload import Slice, Workload
from helixpipe.runtime.executor import Executor
from helixpipe.runtime.transport import make_transport
from tests.model.common import gradients_of, set_parallel, worst

LAYERS = 4


def unlike_chunks() -> Program:
    """Two microbatches of 12 tokens, a document each, the first in chunks of 5 and 7, the second of 6, 4 and 2."""
    cuts = ((5, 7), (6, 4, 2))
    chunks = [[(Slice(number, sum(cut[:i]), cut[i]),) for i in range(len(cut))] for number, cut in enumerate(cuts)]
    workload = Workload(tuple(map(tuple, chunks)))
    forwards = list(workload.units())
    backwards = sorted(forwards, key=lambda unit: (unit[0], -unit[1]))
    ranks = [
        tuple(
            one_forward_one_backward(
                [Op("F", rank, *unit) for unit in forwards], [Op("B", rank, *unit) for unit in backwards], 3 - rank
            )
        )
        for rank in range(2)
    ]
    return Program("unlike chunks", even_stages(LAYERS, 2), tuple(ranks), workload)


def successive_steps(rank: int, world_size: int) -> list[list[dict[str, Any]]]:
    """Of each style and step: the largest errors of gradients and losses, and what is left in the executor."""
    return [steps_of(style, rank, world_size) for style in ("gpt", "llama")]


def steps_of(style: str, rank: int, world_size: int) -> list[dict[str, Any]]:
    set_parallel(tp=1)
    few, many = Case("1f1b", 2, 2, style, layers=LAYERS), Case("zb1p", 2, 3, style, layers=LAYERS)
    expected = {case.m: reference(case.alone()) for case in (few, many)}
    set_parallel(tp=1, pp=world_size)
    transport = make_transport(parallel_state.get_pipeline_model_parallel_group(), device())
    model = make_model(few)
    executor = Executor(rank, model, transport)
    first, second = (make_plan(case.program(), unit_costs()) for case in (few, many))
    third = make_plan(unlike_chunks(), unit_costs())
    steps = [(first, few), (second, many), (first.evaluation, few), (first, few), (third, few), (third.evaluation, few)]
    results = [one_step(executor, plan, case, *expected[case.m]) for plan, case in steps]
    transport.close()
    return results


def one_step(executor: Executor, plan: Plan, case: Case, gradients: Any, losses: dict[int, float]) -> dict[str, Any]:
    model: Any = executor.model
    for parameter in model.parameters():
        parameter.grad = None
    training = not plan.program.forward_only
    found = by_microbatch(executor.run(plan.lowered, make_step(case, training))[0])
    return {
        "gradient": worst(gather(model, gradients_of(model)), gradients) if training else None,
        "made gradients": any(parameter.grad is not None for parameter in model.parameters()),
        "losses": {microbatch: abs(loss / losses[microbatch] - 1) for microbatch, loss in found.items()},
        "left": executor.keys_values.bytes_alive() + sum(left_in_tables(executor)),
    }
