"""Small training runs for the checkpoint tests: any layout of two ranks, without data or a schedule; runs inside ranks.

The gradient of a weight is a function of its own value, so training is elementwise: the same on every layout.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig

from helixpipe.costs.by_hand import unit_costs
from helixpipe.costs.layer_patterns import kinds_of_layers, mixed_layers
from helixpipe.model import GPTOptions, PipelineModel
from helixpipe.planning.vocabulary.choice import split_heads
from helixpipe.program.program import Program, of_layers
from helixpipe.program.stages import Piece, Stage, model_pieces
from helixpipe.program.text import parse_rows
from helixpipe.program.workload import uniform
from helixpipe.runtime.sharded_weights import ShardedWeights
from megatron.pretrain.checkpoint import optimizer as optimizers
from megatron.pretrain.checkpoint.checkpointing import Checkpointer
from megatron.pretrain.checkpoint.options import CheckpointOptions
from megatron.pretrain.checkpoint.state import TrainingProgress
from megatron.pretrain.checkpoint.tensors import quiet
from megatron.pretrain.config.core import keep_state_on_host
from megatron.pretrain.step.sharded import PartsOfModel
from schedules import Shape, build
from tests.checkpoint.fused_adam import fused_adam
from tests.model.common import set_parallel

REPLICATED_LAYERS = "replicated layers"


EXPERTS: dict[str, Any] = {
    "num_moe_experts": 2,
    "moe_layer_freq": 2,
    "moe_ffn_hidden_size": 24,
    "moe_router_topk": 1,
    "moe_router_score_function": "sigmoid",
    "moe_token_dispatcher_type": "alltoall",
}


@dataclass(frozen=True)
class Layout:
    """Parallel sizes; data parallelism takes the ranks that are left."""

    tp: int = 1
    pp: int = 1
    distributed_optimizer: bool = False
    optimizer: str = "adam"
    fused: bool = False
    """Adam that counts its steps in its groups."""
    bf16: bool = False
    tied: bool = True
    positions: str = "rope"
    num_layers: int = 2
    hidden_size: int = 16
    lr_decay_steps: int = 100
    schedule: str = "1f1b"
    """Places the layers; `REPLICATED_LAYERS`, or one of the catalogue."""
    split_head: bool = False
    """The head divided over the pipeline."""
    vocabulary: int = 32
    spread_head: bool = False
    """A copy of the head on every pipeline rank."""
    sharded: bool = False
    """Weights in parts over data-parallel ranks."""
    offload: float = 0.0
    """Share of the optimizer's state that is on the host."""
    cp: int = 1
    ep: int = 1
    experts: bool = False
    """Two of them in every second layer, from the first on."""
    chained: bool = False
    """The states of several optimizers saved side by side, as megatron-core does by itself."""
    lr: float = 1e-2
    ends_lr: float | None = None
    """A learning rate of their own for embedding and output layer."""
    rates_from: str = ""
    """`flags` or `checkpoint`: whose learning rates hold where they differ; empty: that is a mistake."""

    def program(self) -> Program:
        """Return what says which rank holds which weights."""
        if self.schedule == REPLICATED_LAYERS:
            return replicated_layers(self.num_layers)
        program = build(self.schedule, Shape(self.pp, 2 * self.pp, self.num_layers))
        if self.experts:
            program = of_layers(program, kinds_of_layers(self.num_layers, (), (), mixed_layers(2)))
        return split_heads(program, unit_costs()) if self.split_head else program


def replicated_layers(num_layers: int) -> Program:
    """Rank 0 runs the embedding, rank 1 the head; each the layers between, cut inside the first, of one microbatch."""
    chain = model_pieces(num_layers)
    stages = (Stage(chain[:3]), Stage(chain[3:-1], "replicated"), Stage(chain[-1:]))
    rows = ["0F0,0F1,1F0,1B0,0B0,0B1", "1F1,2F0,2B0,2F1,2B1,1B1"]
    return Program(REPLICATED_LAYERS, stages, parse_rows([row.split(",") for row in rows]), uniform(2))


def sizes() -> tuple[int, int, int, int] | None:
    """Tensor-, pipeline-, context- and expert-parallel size of the parallel state; None where there is none yet."""
    if not parallel_state.model_parallel_is_initialized():
        return None
    return (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
    )


class Run:
    """Model, optimizer and scheduler of one layout. Making one replaces a parallel state of other sizes."""

    def __init__(self, layout: Layout, seed: int = 1):
        if (layout.tp, layout.pp, layout.cp, layout.ep) != sizes():
            set_parallel(layout.tp, layout.pp, layout.cp, layout.ep)
        self.layout = layout
        dtype = torch.bfloat16 if layout.bf16 else torch.float32
        config = TransformerConfig(
            num_layers=layout.num_layers,
            hidden_size=layout.hidden_size,
            num_attention_heads=2,
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            expert_model_parallel_size=layout.ep,
            use_cpu_initialization=True,
            bf16=layout.bf16,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            gated_linear_unit=True,
            add_bias_linear=False,
            normalization="RMSNorm",
            cuda_graph_scope=[],
            **(EXPERTS if layout.experts else {}),
        )
        gpt = GPTOptions(
            layout.vocabulary, 8, layout.positions, share_embeddings_and_output_weights=layout.tied, cp_comm_type="a2a"
        )
        program = layout.program()
        rank = parallel_state.get_pipeline_model_parallel_rank()
        pieces, copies, head = program.pieces_of_rank(rank), program.copies(rank), Piece("head")
        if layout.spread_head:
            pieces, copies = (*pieces, head) if rank < layout.pp - 1 else pieces, {head: rank}
        self.model = PipelineModel(config, gpt, pieces, seed=seed, copies=copies)
        distributed = layout.distributed_optimizer
        ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=distributed)
        held = [each.pieces for index, each in enumerate(program.stages) if rank in program.holders(index)]
        self.sharded, updated = None, None
        if layout.sharded:
            copies_group = parallel_state.get_expert_data_parallel_group() if layout.ep > 1 else None
            data = parallel_state.get_data_parallel_group()
            self.sharded = ShardedWeights(self.model, held, data, torch.float32, 1 / 2, copies_group)
            updated = PartsOfModel(self.sharded.parts(), config, ddp_config)
        else:
            self.ddp = updated = DistributedDataParallel(config, ddp_config, self.model)
        optimizer_config = OptimizerConfig(
            optimizer=layout.optimizer,
            lr=layout.lr,
            decoupled_lr=layout.ends_lr,
            min_lr=1e-3,
            bf16=layout.bf16,
            params_dtype=dtype,
            use_distributed_optimizer=distributed,
            clip_grad=0.0,
        )
        if layout.offload:
            keep_state_on_host(optimizer_config, layout.offload)
        with fused_adam() if layout.fused else nullcontext():
            self.optimizer = get_megatron_optimizer(optimizer_config, [updated], use_gloo_process_groups=False)
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=layout.lr,
            min_lr=1e-3,
            lr_warmup_steps=2,
            lr_decay_steps=layout.lr_decay_steps,
            lr_decay_style="cosine",
            start_wd=0.1,
            end_wd=0.1,
            wd_incr_steps=10,
            wd_incr_style="constant",
            use_checkpoint_opt_param_scheduler=layout.rates_from == "checkpoint",
            override_opt_param_scheduler=layout.rates_from == "flags",
        )
        self.progress = TrainingProgress(index_samples=((12, 4, 0), (40, 8, 0)))
        self.arguments = {
            "num_layers": layout.num_layers,
            "hidden_size": layout.hidden_size,
            "swiglu": True,
            **({"num_experts": 2, "moe_layer_freq": 2, "moe_ffn_hidden_size": 24} if layout.experts else {}),
            "data_path": (Path("a"), 0.5),
            "rank": torch.distributed.get_rank(),
        }

    def train(self, iterations: int) -> Run:
        for _ in range(iterations):
            if self.sharded is not None:
                for part in self.sharded.parts():
                    weight: Any = part.parameter
                    weight.main_grad.copy_(weight.detach() * 0.5 + 0.01)
            else:
                self.ddp.zero_grad_buffer()
                for parameter in self.model.parameters():
                    # Experts that are shared out have the tokens of all ranks, whose mean DDP takes.
                    ranks = 1 if getattr(parameter, "allreduce", True) else self.layout.ep
                    parameter.main_grad.copy_((parameter.detach() * 0.5 + 0.01) * ranks)
                self.ddp.finish_grad_sync()
            self.optimizer.step()
            self.scheduler.step(increment=4)
            self.progress.iteration += 1
            self.progress.consumed_train_samples += 4
            self.progress.num_floating_point_operations_so_far += 1e18
        return self

    def saver(self, directory: Path | str, **options: Any) -> Checkpointer:
        checkpointer = Checkpointer(CheckpointOptions(save=str(directory), **options))
        checkpointer.keep(self.sharded)
        return checkpointer

    def save_by(self, checkpointer: Checkpointer) -> Run:
        side_by_side = mock.patch.object(optimizers, "joined", lambda parts, states: dict(enumerate(states)))
        with side_by_side if self.layout.chained else nullcontext():
            checkpointer.save(self.progress, self.model, self.optimizer, self.scheduler, self.arguments)
        return self

    def save(self, directory: Path | str, locked: bool = False, **options: Any) -> Run:
        checkpointer = self.saver(directory, **options)
        with checkpointer.folder.locked() if locked else nullcontext():
            self.save_by(checkpointer)
            checkpointer.settle()
        torch.distributed.barrier()  # the first rank lets go of the lock
        return self

    def tensors(self) -> list[torch.Tensor]:
        """Copies of weights and of the optimizer's state on this rank."""
        states = [
            torch.as_tensor(value)
            for part in self.optimizer.chained_optimizers
            for group in part.optimizer.param_groups
            for parameter in group["params"]
            for _, value in sorted(part.optimizer.state.get(parameter, {}).items())
        ]
        return [tensor.detach().clone() for tensor in [*self.model.parameters(), *states]]

    def load(self, directory: Path | str, **options: Any) -> tuple[TrainingProgress, dict[str, Any]] | None:
        checkpointer = Checkpointer(CheckpointOptions(load=str(directory), **options))
        checkpointer.keep(self.sharded)
        loaded = checkpointer.load(self.model, self.optimizer, self.scheduler)
        if loaded is not None:
            self.progress = loaded[0]
        return loaded


def contents(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, by name. Collective."""
    with quiet():
        loaded = dist_checkpointing.load_plain_tensors(str(folder))
    return {name: value for name, value in loaded.items() if isinstance(value, torch.Tensor)}
