"""Builds what is measured: the task, and a model with its gradient buffers as the training program builds it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from helixpipe.costs.models import ModelShape
from helixpipe.model import GPTOptions, PipelineModel
from helixpipe.model.backends import Machine, fuses_rope, fuses_weight_gradients
from helixpipe.program.stages import EXPERTS, NO_ROPE, WINDOWS, Piece
from helixpipe.runtime.gloo_device import share_gloo_device


@dataclass(frozen=True)
class Task:
    """The measurement to run. processes: how many measure at the same time; None: 2, or 1 with one GPU. repeats: rounds
    that count. threads: a process. chunk_size, loss_chunk_size: tokens of a slice of the MLP, of head and loss; 0:
    whole.
    """

    model: ModelShape
    seq_length: int
    micro_batch_size: int
    dtype: str
    processes: int | None
    threads: int
    repeats: int
    chunk_size: int = 0
    loss_chunk_size: int = 0

    @classmethod
    def load(cls, path: str) -> Task:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        return cls(**{**content, "model": ModelShape.from_json(**content["model"])})


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def initialize_parallel_state(world_size: int) -> None:
    """Create megatron-core's groups of one pipeline over all ranks."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    share_gloo_device()  # as training does
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=world_size,
        create_gloo_process_groups=False,
        get_embedding_ranks=lambda ranks, *_: ranks[:1],  # pipeline_model sums tied copies itself
        get_position_embedding_ranks=lambda ranks, *_: ranks[:1],
    )
    model_parallel_cuda_manual_seed(1)


def _experts(shape: ModelShape) -> dict[str, Any]:
    """Return the fields of a configuration whose layers all have experts."""
    return {
        "num_moe_experts": shape.experts,
        "moe_ffn_hidden_size": shape.expert_ffn,
        "moe_router_topk": shape.topk,
        "moe_router_pre_softmax": shape.topk == 1,  # a softmax over one score is always 1
        "moe_shared_expert_intermediate_size": shape.shared_ffn or None,
        "moe_token_dispatcher_type": "alltoall",
    }


def _latent(shape: ModelShape) -> dict[str, Any]:
    """Return the fields of a configuration of multi-latent attention."""
    return {
        "multi_latent_attention": True,
        "kv_lora_rank": shape.kv_rank,
        "q_lora_rank": shape.q_rank or None,
        "qk_head_dim": shape.own_channels,
        "qk_pos_emb_head_dim": shape.shared_channels,
        "v_head_dim": shape.value_channels,
        "rope_type": "rope",
        "rotary_scaling_factor": 1.0,
    }


def build_model(task: Task, num_layers: int, pieces: Sequence[Piece]) -> tuple[PipelineModel, Any]:
    """Build the pieces with their gradient buffers, as the training program does: (model, DistributedDataParallel)."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    shape, dtype, on_gpu = task.model, DTYPES[task.dtype], torch.cuda.is_available()
    kinds = {piece.kind for piece in pieces}
    config = (MLATransformerConfig if shape.kv_rank else TransformerConfig)(
        num_layers=num_layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        kv_channels=shape.channels,
        ffn_hidden_size=shape.ffn,
        normalization=shape.norm,
        gated_linear_unit=shape.gated,
        activation_func=torch.nn.functional.silu if shape.gated else torch.nn.functional.gelu,
        add_bias_linear=shape.bias,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        attention_output_gate=shape.output_gate,
        softmax_type="learnable" if shape.sinks else "vanilla",
        layernorm_zero_centered_gamma=shape.centered,
        window_size=(shape.window - 1, 0) if kinds & {*WINDOWS} else None,
        no_rope_freq=[1] * num_layers if NO_ROPE in kinds else None,
        **(_experts(shape) if EXPERTS in kinds else {}),
        **(_latent(shape) if shape.kv_rank else {}),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        pipeline_model_parallel_size=dist.get_world_size(),
        use_cpu_initialization=not on_gpu,
        bias_activation_fusion=on_gpu and (shape.gated or shape.bias),
        bias_dropout_fusion=on_gpu,
        gradient_accumulation_fusion=fuses_weight_gradients(Machine.here()),
        masked_softmax_fusion=False,
        attention_softmax_in_fp32=False,
        cuda_graph_scope=[],
        deallocate_pipeline_outputs=True,
        transformer_impl="local",
    )
    config.apply_rope_fusion = shape.positions == "rope" and fuses_rope(Machine.here())
    gpt = GPTOptions(
        vocab_size=shape.padded_vocab(1),
        max_sequence_length=task.seq_length,
        position_embedding_type=shape.positions,
        share_embeddings_and_output_weights=shape.tied,
        chunk_size=task.chunk_size,
        loss_chunk_size=task.loss_chunk_size,
    )
    model = PipelineModel(config, gpt, pieces)
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    return model, ddp
