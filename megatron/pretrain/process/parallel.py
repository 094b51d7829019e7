"""Process groups of a run, passed as arguments."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from helixpipe.common.errors import UserError
from helixpipe.model.device import device as current_device
from helixpipe.runtime.gloo_device import share_gloo_device
from megatron.pretrain.config import Config
from megatron.pretrain.process.meeting import check_master


@dataclass(frozen=True)
class Parallel:
    """The place of this process on the axes of parallelism, its device and its groups. Ranks and sizes are those of the
    axis named. Ranks of `tp_cp_group` run the same stream on the same microbatches; those of `dp_cp_group` hold the
    same weights.
    """

    rank: int
    world_size: int
    pp_rank: int
    pp_size: int
    tp_rank: int
    tp_size: int
    cp_rank: int
    cp_size: int
    dp_rank: int
    dp_size: int
    pp_group: dist.ProcessGroup
    tp_group: dist.ProcessGroup
    tp_cp_group: dist.ProcessGroup
    dp_cp_group: dist.ProcessGroup
    device: torch.device
    expert_tp_rank: int = 0
    expert_copies: int = 1
    """Ranks that hold the same experts."""
    expert_copies_group: dist.ProcessGroup | None = None
    """They, where others of `dp_cp_group` hold other experts."""
    replica_groups: dict[tuple[int, ...], dist.ProcessGroup | None] = field(default_factory=dict, compare=False)
    """Those of pipeline ranks that hold the same weights, once made; None where this rank is in none of them. Models
    that follow one another, of other layers, share them."""

    @classmethod
    def current(cls) -> Parallel:
        """Return the ranks and groups of megatron-core's initialised parallel state."""
        from megatron.core import parallel_state

        expert_parallel = parallel_state.get_expert_model_parallel_world_size()
        return cls(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
            pp_size=parallel_state.get_pipeline_model_parallel_world_size(),
            tp_rank=parallel_state.get_tensor_model_parallel_rank(),
            tp_size=parallel_state.get_tensor_model_parallel_world_size(),
            cp_rank=parallel_state.get_context_parallel_rank(),
            cp_size=parallel_state.get_context_parallel_world_size(),
            dp_rank=parallel_state.get_data_parallel_rank(),
            dp_size=parallel_state.get_data_parallel_world_size(),
            pp_group=parallel_state.get_pipeline_model_parallel_group(),
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            tp_cp_group=parallel_state.get_tensor_and_context_parallel_group(),
            dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
            device=current_device(),
            expert_tp_rank=parallel_state.get_expert_tensor_parallel_rank(),
            expert_copies=parallel_state.get_expert_data_parallel_world_size(),
            expert_copies_group=parallel_state.get_expert_data_parallel_group() if expert_parallel > 1 else None,
        )

    @property
    def name(self) -> str:
        """This rank for messages, with its place on the axes if the rank alone does not give it."""
        if self.world_size == self.pp_size:
            return f"rank {self.rank}"
        context = f", context {self.cp_rank}" if self.cp_size > 1 else ""
        return f"rank {self.rank} (pipeline {self.pp_rank}, tensor {self.tp_rank}{context}, data {self.dp_rank})"

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """The rank that prints losses, as in Megatron-LM."""
        return self.rank == self.world_size - 1

    @property
    def counts_tokens(self) -> bool:
        """Whether this rank's number of tokens is counted in sums over all ranks: tensor-parallel and context-parallel
        ranks have the same whole microbatches.
        """
        return self.tp_rank == 0 and self.cp_rank == 0

    def sum_over_pipeline_and_data(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a small tensor, in place, over context-parallel ranks as well; tensor-parallel ranks hold equal values,
        so they do not add to it."""
        dist.all_reduce(values, group=self.pp_group)
        dist.all_reduce(values, group=self.dp_cp_group)
        return values


def initialize(config: Config, leaving: Callable[[], bool] = lambda: False) -> Parallel:
    """Start torch.distributed and megatron-core's parallel state. leaving: whether to wait for other ranks no longer.
    Raises UserError when there is no CUDA for NCCL, or ranks cannot meet."""
    from megatron.core import parallel_state
    from megatron.core.rerun_state_machine import RerunMode, initialize_rerun_state_machine
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel, launch, backend = config.parallel, config.launch, _backend(config)
    if backend == "nccl" and not torch.cuda.is_available():
        raise UserError("--distributed-backend nccl needs GPUs, and this machine shows none; use gloo.")
    if torch.cuda.is_available():
        torch.cuda.set_device(launch.local_rank % torch.cuda.device_count())
    if "MASTER_ADDR" not in os.environ and launch.world_size == 1:  # started without torchrun: one process
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")  # 0: any that is free
    else:
        check_master(wait=min(parallel.timeout_seconds, 300.0), given_up=leaving)
    share_gloo_device()
    dist.init_process_group(backend, timeout=timedelta(seconds=parallel.timeout_seconds))
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
        distributed_timeout_minutes=max(1, round(parallel.timeout_seconds / 60)),
        # With another backend megatron-core would look for NCCL's options all the same.
        nccl_communicator_config_path=parallel.nccl_communicator_config_path if backend == "nccl" else None,
        high_priority_stream_groups=list(parallel.high_priority_stream_groups or ()) if backend == "nccl" else None,
        create_gloo_process_groups=False,
        # Gradients of tied copies are summed by ReplicaSums, whichever ranks hold them.
        get_embedding_ranks=lambda ranks, *_: ranks[:1],
        get_position_embedding_ranks=lambda ranks, *_: ranks[:1],
    )
    model_parallel_cuda_manual_seed(config.training.seed)
    rerun_logger = logging.getLogger("megatron.core.rerun_state_machine")
    rerun_logger.addFilter(_not_about_initialization)  # it warns that it is off, which is as meant
    initialize_rerun_state_machine(mode=RerunMode.DISABLED)
    return Parallel.current()


def _backend(config: Config) -> str:
    return config.parallel.distributed_backend or ("nccl" if torch.cuda.is_available() else "gloo")


def can_leave(config: Config) -> bool:
    """Whether a rank of this run can leave its groups while others wait for it: most of gloo's waits fail with their
    connections."""
    return _backend(config) == "gloo"


def leave_groups() -> None:
    """Undo `initialize`, or what of it was done, once the groups' connections are closed; what was built on them, and
    nobody uses any more, is freed."""
    from megatron.core import parallel_state
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine

    if dist.is_initialized():
        dist.destroy_process_group()
    parallel_state.destroy_model_parallel()
    destroy_rerun_state_machine()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _not_about_initialization(record: logging.LogRecord) -> bool:
    return "RerunStateMachine initialized" not in record.getMessage()
