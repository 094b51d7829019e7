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

from helixpipe.model import PipelineModel
from helixpipe.model.backends import transport_name
from helixpipe.program.stages import Piece
from megatron.training.config import Config, core
from megatron.training.process.output import complain, say
from megatron.training.process.parallel import Parallel
from megatron.training.step.update import TrainedWeights
from megatron.training.step.weights import MegatronWeights


@dataclass(frozen=True)
class TrainingModel:
    """`weights` keeps those of `model`, with their gradients and their update; `ddp`, which wraps the model, and the
    optimizer are what it is made of, for checkpoints and the learning rate."""

    model: PipelineModel
    ddp: DistributedDataParallel
    optimizer: Any
    weights: TrainedWeights


def build_model(
    config: Config,
    parallel: Parallel,
    pieces: Sequence[Piece],
    vocab_size: int,
    copies: Mapping[Piece, int] = MappingProxyType({}),
) -> TrainingModel:
    """The weights of `pieces` with their gradient buffers and optimizer. vocab_size: the tokenizer's, before padding.
    copies: those of the pieces that other pipeline ranks hold as well (`Program.copies`).

    Collective over all ranks.
    """
    transformer_config = core.transformer_config(config)
    gpt, seed = core.gpt_options(config, vocab_size), config.training.seed
    model = PipelineModel(transformer_config, gpt, pieces, seed=seed, copies=copies)
    ddp = DistributedDataParallel(transformer_config, core.ddp_config(config), model)
    optimizer = get_megatron_optimizer(core.optimizer_config(config), [ddp], use_gloo_process_groups=False)
    weights = MegatronWeights(ddp, model, optimizer, parallel, bool(config.training.calculate_per_token_loss))
    return TrainingModel(model, ddp, optimizer, weights)


def say_kernels(state: TrainingModel, *, chunked: bool) -> None:
    """One line: what the model runs on; before it a warning for whoever asked for something that is not there.

    chunked: whether sequences run chunk by chunk.
    """
    kernels, config = state.model.kernels, state.model.config
    on_gpu = kernels.machine.device == "cuda"
    backend = dist.get_backend()
    transport = transport_name(backend, on_gpu, torch.cuda.nccl.version() if backend == "nccl" else ())
    gradients = torch.float32 if state.ddp.ddp_config.grad_reduce_in_fp32 else config.params_dtype
    if kernels.warning:
        complain(f"WARNING: {kernels.warning}")
    context = state.model.context
    shared = f", context parallel {context.comm_type} over {context.size}" if context.size > 1 else ""
    say(f" > kernels: {kernels.line(config, chunked=chunked, transport=transport, gradients=gradients)}{shared}")
