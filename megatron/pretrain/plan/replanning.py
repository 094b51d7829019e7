"""What watches a rank of a run, and has it run other plans."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from helixpipe.adapt.cuts import can_be_cut
from helixpipe.adapt.replan import adaptable
from helixpipe.common.output import say
from helixpipe.planning.background import BackgroundPlanner
from helixpipe.planning.plan import Plans
from helixpipe.program.program import Program
from helixpipe.watch.adaptation import Adaptation
from helixpipe.watch.lead import Options, Place
from megatron.pretrain.config import Config
from megatron.pretrain.plan.candidates import Replanner
from megatron.pretrain.plan.costs import memory_limit
from megatron.pretrain.plan.programs import full_batch
from megatron.pretrain.process.parallel import Parallel


def why_layers_stay(config: Config, optimizer: Any, program: Program) -> str | None:
    """Return why no layers move between ranks, in words after "because"; None where they may. optimizer, program: of
    the run."""
    training, parallel, checkpoint = config.training, config.parallel, config.checkpoint
    interval, watched = checkpoint.save_interval, config.adapt.watch_interval or 1
    inner = [each.optimizer for each in optimizer.chained_optimizers if not each.is_stub_optimizer]
    for asked, reason in (
        (not checkpoint.save or not interval, "they do so after checkpoints (--save, --save-interval)"),
        (watched % (interval or 1) == 0, "checkpoints (--save-interval) are in every step that --watch-interval times"),
        (not adaptable(program), "the schedule's weights travel, are held by several ranks or are in parts"),
        (
            adaptable(program) and not can_be_cut(program),
            "stages are of parts of layers, or units offload or recompute in their own ways",
        ),
        (training.rampup_batch_size, "--rampup-batch-size has steps of other sizes"),
        (checkpoint.in_memory_checkpoint_interval, "--in-memory-checkpoint-interval has snapshots of the first layers"),
        (config.adapt.check_every, "--check-every watches the first layers' memory"),
        (config.model.num_experts, "experts are not moved"),
        (parallel.shards_weights or parallel.use_torch_fsdp2, "weights are in parts"),
        (training.optimizer_cpu_offload, "--optimizer-cpu-offload is not moved"),
        (training.use_precision_aware_optimizer, "--use-precision-aware-optimizer is not moved"),
        (
            not all(isinstance(each, torch.optim.Adam | torch.optim.AdamW) for each in inner),
            "only the state of torch's Adam is moved",
        ),
    ):
        if asked:
            return reason
    return None


def make_adaptation(
    config: Config, parallel: Parallel, plans: Plans[int], optimizer: Any, steps: int
) -> Adaptation | None:
    """Return what watches this rank; None where nothing is watched: one pipeline rank, or steps that all have plans of
    their own. optimizer, steps: of the run.
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
    own = plans.plan(size)
    stay = why_layers_stay(config, optimizer, own.program)
    if adapt.replan == "auto" and stay is not None and parallel.is_first:
        say(f" > --replan auto leaves layers on their ranks, because {stay}")
    options = Options(
        adapt.watch_interval,
        adapt.replan,
        not adapt.replan_chunks,
        memory_limit(config),
        Path(folder) if folder else None,
        steps,
        0 if stay is not None else config.checkpoint.save_interval or 0,
    )
    return Adaptation(
        own,
        place,
        options,
        dist.distributed_c10d._get_default_store(),
        lambda: BackgroundPlanner(Replanner(config)),
        partial(plans.adopt, size),
        say,
    )
