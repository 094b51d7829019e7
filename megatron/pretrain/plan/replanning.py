"""What watches a rank of a run, and has it run other plans."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch.distributed as dist

from helixpipe.common.output import say
from helixpipe.planning.background import BackgroundPlanner
from helixpipe.planning.plan import Plans
from helixpipe.watch.adaptation import Adaptation
from helixpipe.watch.lead import Options, Place
from megatron.pretrain.config import Config
from megatron.pretrain.plan.candidates import Replanner
from megatron.pretrain.plan.costs import memory_limit
from megatron.pretrain.plan.programs import full_batch
from megatron.pretrain.process.parallel import Parallel


def make_adaptation(config: Config, parallel: Parallel, plans: Plans[int]) -> Adaptation | None:
    """Return what watches this rank; None where nothing is watched: one pipeline rank, or steps that all have plans of
    their own.
    """
    adapt = config.adapt
    if not adapt.watch_interval or parallel.pp_size == 1 or config.data.variable_seq_lengths:
        return None
    size = full_batch(config)
    place = Place(
        parallel.rank,
        parallel.world_size,
        parallel.dp_rank,
        parallel.dp_size,
        reports=parallel.counts_tokens,
    )
    folder = adapt.watch_dir or config.checkpoint.save
    options = Options(
        adapt.watch_interval,
        adapt.replan,
        not adapt.replan_chunks,
        memory_limit(config),
        Path(folder) if folder else None,
        config.training.train_iters or 0,
    )
    return Adaptation(
        plans.plan(size),
        place,
        options,
        dist.distributed_c10d._get_default_store(),
        lambda: BackgroundPlanner(Replanner(config)),
        partial(plans.adopt, size),
        say,
    )
