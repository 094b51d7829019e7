"""Model, optimizer and learning-rate schedule of one rank, from the configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.parallel_state import get_intra_distributed_optimizer_instance_group

from helixpipe.common.output import complain, say
from helixpipe.costs.models import OFF
from helixpipe.model import PipelineModel
from helixpipe.model.backends import transport_name
from helixpipe.model.graphs import why_not
from helixpipe.program.graphs import in_graphs, stages_in_graphs
from helixpipe.program.program import Program
from helixpipe.program.stages import Piece
from helixpipe.runtime.sharded_weights import ShardedWeights
from megatron.pretrain.config import Config, core
from megatron.pretrain.process.parallel import Parallel
from megatron.pretrain.step.sharded import PartsOfModel, TrainedParts
from megatron.pretrain.step.update import TrainedWeights
from megatron.pretrain.step.weights import MegatronWeights


@dataclass(frozen=True)
class TrainingModel:
    """The model and what trains it. weights: the model's, with their gradients and their update; optimizer: used by the
    update, for checkpoints and the learning rate. sharded: the weights if they are sharded over data-parallel ranks.
    """

    model: PipelineModel
    optimizer: Any
    weights: TrainedWeights
    sharded: ShardedWeights | None = None

    def release(self) -> None:
        """Have the optimizer forget the weights, so that both can be freed. The distributed optimizer's shares of
        float32 weights are views that autograd knows of: a circle that Python's collector does not see."""
        for weight in self.model.parameters():
            weight.__dict__.pop("main_param", None)
        for each in self.optimizer.chained_optimizers:
            if not each.is_stub_optimizer:
                each.optimizer.param_groups.clear()
                each.optimizer.state.clear()
            vars(each).clear()


def build_model(
    config: Config,
    parallel: Parallel,
    pieces: Sequence[Piece],
    copies: Mapping[Piece, int] = MappingProxyType({}),
    stages: Sequence[Sequence[Piece]] = (),
) -> TrainingModel:
    """Build the weights of `pieces` with their gradient buffers and optimizer. copies: those of the pieces that other
    pipeline ranks hold as well (`Program.copies`). stages: the pieces, stage by stage; weights sharded over
    data-parallel ranks are gathered stage by stage.

    Collective over all ranks.
    """
    transformer_config = core.transformer_config(config)
    gpt, seed = core.gpt_options(config), config.training.seed
    model = PipelineModel(transformer_config, gpt, pieces, seed=seed, copies=copies)
    per_token, ddp_config = bool(config.training.calculate_per_token_loss), core.ddp_config(config)
    if not config.parallel.shards_weights:
        ddp = DistributedDataParallel(transformer_config, ddp_config, model)
        optimizer = get_megatron_optimizer(core.optimizer_config(config), [ddp], use_gloo_process_groups=False)
        return TrainingModel(model, optimizer, MegatronWeights(ddp, model, optimizer, parallel, per_token))
    scale = 1.0 if per_token else 1.0 / (parallel.dp_size * parallel.cp_size)
    sharded = ShardedWeights(
        model, stages or [pieces], parallel.dp_cp_group, _gradient_dtype(config), scale, parallel.expert_copies_group
    )
    parts: Any = PartsOfModel(sharded.parts(), transformer_config, ddp_config)
    optimizer = get_megatron_optimizer(core.optimizer_config(config), [parts], use_gloo_process_groups=False)
    for each in optimizer.chained_optimizers:  # the norm is that of all parts
        each.grad_stats_parallel_group = get_intra_distributed_optimizer_instance_group()
    weights = TrainedParts(sharded, model, optimizer, parallel, per_token)
    return TrainingModel(model, optimizer, weights, sharded)


def _gradient_dtype(config: Config) -> torch.dtype:
    """Return the type in which gradients are summed."""
    return torch.float32 if config.training.accumulate_allreduce_grads_in_fp32 else core.params_dtype(config)


def say_kernels(state: TrainingModel, training: Config, program: Program) -> None:
    """Print the kernels the model runs on in one line, after a warning if a requested one is not available, and what of
    it runs as CUDA graphs.

    training: the run's configuration. program: of a step.
    """
    kernels, config = state.model.kernels, state.model.config
    on_gpu = kernels.machine.device == "cuda"
    backend = dist.get_backend()
    transport = transport_name(backend, on_gpu, torch.cuda.nccl.version() if backend == "nccl" else ())
    if kernels.warning:
        complain(f"WARNING: {kernels.warning}")
    context = state.model.context
    shared = f", context parallel {context.comm_type} over {context.size}" if context.size > 1 else ""
    if context.ranks_of_half:
        shared += ", tokens in halves that hide their ranks' communication"
    if state.model.in_pairs:
        shared += ", forwards beside backwards that hide their ranks' communication"
    chunked, gradients = program.num_chunks > 1, _gradient_dtype(training)
    line = kernels.line(config, chunked=chunked, transport=transport, gradients=gradients)
    say(f" > kernels: {line}{shared}")
    if training.model.cuda_graphs != OFF:
        say(f" > cuda graphs: {graphs_line(state.model, program)}")


def graphs_line(model: PipelineModel, program: Program) -> str:
    """Return what of a step can run as CUDA graphs, and why not all."""
    ranks = model.tp_group.size() * model.context.size
    stages = sum(len(stages_in_graphs(program, rank)) for rank in range(program.num_ranks))
    reason = why_not(model.config, model.gpt, ranks)
    if not reason and not stages:
        reason = "its backwards are split, or run beside forwards, or its weights travel or are in parts"
    if reason:
        return f"none ({reason})"
    kinds = ", ".join(sorted({piece.kind for stage in program.stages for piece in stage.pieces if in_graphs(piece)}))
    every = sum(len({op.stage for op in ops}) for ops in program.ranks)
    return (
        f"{kinds} of {stages} of {every} stages, once a chunk has come a few times, where the host takes longer than "
        "the GPU; not of rows of several documents, of units that are offloaded, and of what is run to be recomputed"
    )
