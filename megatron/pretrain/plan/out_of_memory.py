"""Explains an out-of-memory error: what the run needs by the cost model, and which flags would save most."""

from __future__ import annotations

import re

from helixpipe.common.errors import UserError
from helixpipe.common.memory import asked_for
from helixpipe.costs.hardware import GIB
from helixpipe.planning.plan import Plans
from megatron.pretrain.config import Config
from megatron.pretrain.plan.programs import full_batch, make_planner

_SAVERS = (
    ("--recompute-granularity full", "recompute", {"recompute_granularity": "full"}),
    ("--recompute-granularity selective", "recompute", {"recompute_granularity": "selective"}),
    ("--use-distributed-optimizer", "parallel", {"use_distributed_optimizer": True}),
    ("--loss-chunk-size 1024", "model", {"loss_chunk_size": 1024}),
    ("--chunk-size 1024", "model", {"chunk_size": 1024}),
    ("--micro-batch-size 1", "training", {"micro_batch_size": 1}),
)
"""Flags, and what they change in which group of the configuration."""


def out_of_memory(config: Config, plans: Plans[int], said: str, short: str = "the GPU") -> str:
    """Return one sentence on what was out of memory, what a rank needs and what would save most.

    said: the error's message, from which the requested size and the capacity are read. short: whose memory it was, as
    `helixpipe.common.memory.out_of_memory` returns it.
    """
    there = re.search(r"total capacity of ([\d.]+ \w+)", said)
    capacity = f", which has {there[1]}," if there else ""
    needs = _needs(plans, config)
    sentence = (
        f"{short}{capacity} is out of memory{asked_for(said)}; a rank needs up to {needs / GIB:.3g} GiB on paper, as "
        "`helixpipe memory` says"
    )
    better = savers(config, needs)
    words = " and ".join(f"{flags} ({saved / GIB:.3g} GiB less)" for flags, saved in better)
    return f"{sentence}; what would save most is {words}." if better else f"{sentence}; use more ranks."


def savers(config: Config, needs: float) -> list[tuple[str, float]]:
    """Return the two flags that save most memory by calculation: (flags, bytes of the rank that needs most)."""
    saved = []
    for flags, group, changes in _SAVERS:
        try:
            changed = config.replace(group, **changes)
            if getattr(changed, group) != getattr(config, group):
                saved.append((flags, needs - _needs(make_planner(changed), changed)))
        except UserError:  # not with this schedule
            continue
    best = sorted(saved, key=lambda each: -each[1])[:2]
    return [each for each in best if each[1] > 0.01 * needs]


def _needs(plans: Plans[int], config: Config) -> float:
    return max(plans.plan(full_batch(config)).simulation.device_needs)
