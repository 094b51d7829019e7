"""Explains an out-of-memory error: what the run needs by the cost model, and which flags would save most."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from helixpipe.common.errors import UserError
from helixpipe.common.memory import asked_for
from helixpipe.costs.hardware import GIB
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.planning.plan import Plans
from helixpipe.simulate.memory import rank_memory
from megatron.pretrain.config import Config
from megatron.pretrain.plan.programs import full_batch, make_planner

Saver = tuple[str, str, dict[str, Any]]

_SAVERS: Sequence[Saver] = (
    ("--recompute-granularity full", "recompute", {"recompute_granularity": "full"}),
    ("--recompute-granularity selective", "recompute", {"recompute_granularity": "selective"}),
    ("--use-distributed-optimizer", "parallel", {"use_distributed_optimizer": True}),
    ("--loss-chunk-size 1024", "model", {"loss_chunk_size": 1024}),
    ("--chunk-size 1024", "model", {"chunk_size": 1024}),
    ("--micro-batch-size 1", "training", {"micro_batch_size": 1}),
)
"""Flags, and what they change in which group of the configuration."""

_HOST_SAVERS: Sequence[Saver] = (
    ("--offload-activations off", "offload", {"offload_activations": "off"}),
    ("no --optimizer-cpu-offload", "training", {"optimizer_cpu_offload": False}),
)
"""The same for the host's memory, where the model is on a GPU."""


def out_of_memory(config: Config, plans: Plans[int], said: str, short: str = "the GPU", on_gpu: bool = True) -> str:
    """Return one sentence on what was out of memory, what a rank needs of it and what would save most.

    Args:
        config: the run.
        plans: its plans.
        said: the error's message, with the requested size and the capacity.
        short: whose memory it was, as `helixpipe.common.memory.out_of_memory` returns it.
        on_gpu: whether the model is on GPUs, so that its host's memory holds only what is offloaded.
    """
    there = re.search(r"total capacity of ([\d.]+ \w+)", said)
    capacity = f", which has {there[1]}," if there else ""
    on_host = on_gpu and short != "the GPU"
    needed, flags, otherwise = _needs, _SAVERS, "use more ranks"
    if on_host:
        needed, flags, otherwise = _host_needs, _HOST_SAVERS, "run fewer ranks on it at a time"
    needs = needed(plans, config)
    of = " of it" if on_host else ""
    sentence = (
        f"{short}{capacity} is out of memory{asked_for(said)}; a rank needs up to {needs / GIB:.3g} GiB{of} on paper, "
        "as `helixpipe memory` says"
    )
    better = savers(config, needs, needed, flags)
    words = " and ".join(f"{flags} ({saved / GIB:.3g} GiB less)" for flags, saved in better)
    return f"{sentence}; what would save most is {words}." if better else f"{sentence}; {otherwise}."


def savers(
    config: Config, needs: float, needed: Callable[[Plans[int], Config], float], flags: Sequence[Saver]
) -> list[tuple[str, float]]:
    """Return the two flags that save most memory by calculation.

    Args:
        config: the run.
        needs: bytes that it needs.
        needed: the function that has counted them.
        flags: what to try.

    Returns:
        Flags, and the bytes that they save of the rank that needs most.
    """
    saved = []
    for words, group, changes in flags:
        try:
            changed = config.replace(group, **changes)
            if getattr(changed, group) != getattr(config, group):
                saved.append((words, needs - needed(make_planner(changed), changed)))
        except UserError:  # not with this schedule
            continue
    best = sorted(saved, key=lambda each: -each[1])[:2]
    return [each for each in best if each[1] > 0.01 * needs]


def _needs(plans: Plans[int], config: Config) -> float:
    return max(plans.plan(full_batch(config)).simulation.device_needs)


def _host_needs(plans: Plans[int], config: Config) -> float:
    plan = plans.plan(full_batch(config))
    if not isinstance(plan.costs, ModelCosts):
        return max(peak.host for peak in plan.simulation.peaks)
    return max(rank_memory(plan.lowered, plan.costs, rank).host for rank in range(plan.program.num_ranks))
