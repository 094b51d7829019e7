"""Builds megatron-core's own configuration objects: the only module of this package that needs torch."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.activations import squared_relu
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.enums import AttnBackend

from helixpipe.costs.layer_patterns import Frequency, parse_frequency, parse_window
from helixpipe.costs.model_config import ORIGINAL_LENGTHS
from helixpipe.model import GPTOptions
from helixpipe.model.backends import Machine, fuses_rope, fuses_weight_gradients
from helixpipe.model.rope_scaling import RopeScaling
from megatron.pretrain.config.container import Config

_YARN = "yarn_original_max_position_embeddings"


def params_dtype(config: Config) -> torch.dtype:
    """Precision of weights and activations."""
    if config.training.bf16:
        return torch.bfloat16
    return torch.float16 if config.training.fp16 else torch.float32


def transformer_config(config: Config, machine: Machine | None = None) -> TransformerConfig:
    """Return the model's shape and numerics. Fusions that need compiled kernels are on only with a GPU.

    machine: whose kernels; None: this one's.
    """
    model, parallel, training = config.model, config.parallel, config.training
    dtype = params_dtype(config)
    machine = machine if machine is not None else Machine.here()
    on_gpu = machine.device == "cuda"
    activation = torch.nn.functional.silu if model.swiglu else torch.nn.functional.gelu
    if model.squared_relu:
        activation = squared_relu
    fuse_activation = model.bias_swiglu_fusion if model.swiglu else model.bias_gelu_fusion and model.add_bias_linear
    init = torch.nn.init.xavier_uniform_ if model.init_method_xavier_uniform else None
    latent = _latent(config)
    made = (MLATransformerConfig if latent else TransformerConfig)(
        num_layers=_given(model.num_layers),
        hidden_size=_given(model.hidden_size),
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=_given(model.num_attention_heads),
        num_query_groups=model.num_query_groups if model.group_query_attention else None,
        kv_channels=model.kv_channels,
        normalization=model.normalization,
        layernorm_epsilon=model.norm_epsilon,
        gated_linear_unit=model.swiglu,
        activation_func=activation,
        add_bias_linear=model.add_bias_linear,
        add_qkv_bias=model.add_qkv_bias,
        qk_layernorm=model.qk_layernorm,
        attention_output_gate=model.attention_output_gate,
        softmax_type=model.softmax_type,
        layernorm_zero_centered_gamma=model.apply_layernorm_1p,
        rotary_interleaved=model.rotary_interleaved,
        window_size=None if (left := parse_window(model.window_size)) is None else (left, 0),
        window_attn_skip_freq=_listed(parse_frequency("--window-attn-skip-freq", model.window_attn_skip_freq)),
        no_rope_freq=_listed(parse_frequency("--no-rope-freq", model.no_rope_freq)),
        attention_dropout=model.attention_dropout,
        hidden_dropout=model.hidden_dropout,
        attention_softmax_in_fp32=model.attention_softmax_in_fp32,
        attention_backend=AttnBackend[model.attention_backend],
        init_method=init,
        output_layer_init_method=init,
        init_method_std=model.init_method_std,
        embedding_init_method_std=model.embedding_init_method_std,
        use_cpu_initialization=model.use_cpu_initialization or not on_gpu,
        bias_activation_fusion=fuse_activation and not model.squared_relu and on_gpu,
        bias_dropout_fusion=model.bias_dropout_fusion and on_gpu,
        # Its kernel adds to the gradient that was bound in the forward, when a shared-out weight has none.
        gradient_accumulation_fusion=model.gradient_accumulation_fusion
        and fuses_weight_gradients(machine)
        and not parallel.shards_weights,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        fp16=training.fp16,
        bf16=training.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        deterministic_mode=training.deterministic_mode,
        calculate_per_token_loss=bool(training.calculate_per_token_loss),
        deallocate_pipeline_outputs=True,
        barrier_with_L1_time=config.logging.barrier_with_L1_time,
        cuda_graph_scope=[],  # no graphs; the default warns that it is deprecated
        transformer_impl=model.transformer_impl or "local",
        mtp_num_layers=model.mtp_num_layers,
        mtp_loss_scaling_factor=model.mtp_loss_scaling_factor if model.mtp_num_layers else None,
        **_experts(config),
        **latent,
    )
    # Set afterwards: the class would import Transformer Engine to see whether it is there, which `machine` says.
    plain_rope = model.position_embedding_type == "rope" and not model.rotary_interleaved
    made.apply_rope_fusion = model.apply_rope_fusion and plain_rope and fuses_rope(machine)
    return made


def _latent(config: Config) -> dict[str, Any]:
    """Return the fields of multi-latent attention; none for a model without it."""
    model = config.model
    if not model.multi_latent_attention:
        return {}
    return {
        "multi_latent_attention": True,
        "q_lora_rank": model.q_lora_rank,
        "kv_lora_rank": model.kv_lora_rank,
        "qk_head_dim": model.qk_head_dim,
        "qk_pos_emb_head_dim": model.qk_pos_emb_head_dim,
        "v_head_dim": model.v_head_dim,
        "rope_type": model.rope_type,
        "rotary_base": model.rotary_base,
        "rotary_percent": model.rotary_percent,
        "rotary_scaling_factor": model.rotary_scaling_factor,
        "original_max_position_embeddings": model.yarn_original_max_position_embeddings or ORIGINAL_LENGTHS[_YARN],
        "beta_fast": model.yarn_beta_fast,
        "beta_slow": model.yarn_beta_slow,
        "mscale": model.mscale,
        "mscale_all_dim": model.mscale_all_dim,
    }


def _experts(config: Config) -> dict[str, Any]:
    """Return the fields of experts; none for a model without any."""
    model, parallel = config.model, config.parallel
    if model.num_experts is None:
        return {}
    kinds, weights = list(model.moe_router_load_balancing_type), list(model.moe_aux_loss_coeff)
    return {
        "num_moe_experts": model.num_experts,
        "moe_layer_freq": _listed(parse_frequency("--moe-layer-freq", model.moe_layer_freq)),
        "moe_ffn_hidden_size": model.moe_ffn_hidden_size,
        "moe_shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size,
        "moe_shared_expert_gate": model.moe_shared_expert_gate,
        "moe_router_topk": model.moe_router_topk,
        "moe_router_load_balancing_type": kinds[0] if len(kinds) == 1 else kinds,
        "moe_aux_loss_coeff": weights[0] if len(weights) == 1 else weights,
        "moe_z_loss_coeff": model.moe_z_loss_coeff,
        "moe_router_score_function": model.moe_router_score_function,
        "moe_router_pre_softmax": model.moe_router_pre_softmax,
        "moe_router_num_groups": model.moe_router_num_groups,
        "moe_router_group_topk": model.moe_router_group_topk,
        "moe_router_topk_scaling_factor": model.moe_router_topk_scaling_factor,
        "moe_router_enable_expert_bias": model.moe_router_enable_expert_bias,
        "moe_router_bias_update_rate": model.moe_router_bias_update_rate,
        "moe_router_dtype": model.moe_router_dtype,
        "moe_token_dispatcher_type": model.moe_token_dispatcher_type,
        "moe_expert_capacity_factor": model.moe_expert_capacity_factor,
        "moe_pad_expert_input_to_capacity": model.moe_pad_expert_input_to_capacity,
        "moe_token_drop_policy": model.moe_token_drop_policy,
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        "expert_tensor_parallel_size": parallel.expert_tensor_parallel_size,
    }


def optimizer_config(config: Config) -> OptimizerConfig:
    """Return the optimizer's hyperparameters."""
    training = config.training
    made = OptimizerConfig(
        optimizer=training.optimizer,
        lr=training.lr or 0.0,  # --skip-train needs none
        min_lr=training.min_lr,
        decoupled_lr=training.decoupled_lr,
        decoupled_min_lr=training.decoupled_min_lr,
        weight_decay=training.weight_decay,
        apply_wd_to_qk_layernorm=training.apply_wd_to_qk_layernorm,
        adam_beta1=training.adam_beta1,
        adam_beta2=training.adam_beta2,
        adam_eps=training.adam_eps,
        sgd_momentum=training.sgd_momentum,
        clip_grad=training.clip_grad,
        barrier_with_L1_time=config.logging.barrier_with_L1_time,
        log_num_zeros_in_grad=config.logging.log_num_zeros_in_grad,
        fp16=training.fp16,
        bf16=training.bf16,
        params_dtype=params_dtype(config),
        loss_scale=training.loss_scale,
        initial_loss_scale=training.initial_loss_scale,
        min_loss_scale=training.min_loss_scale,
        loss_scale_window=training.loss_scale_window,
        hysteresis=training.hysteresis,
        use_distributed_optimizer=config.parallel.use_distributed_optimizer and not config.parallel.shards_weights,
        use_torch_optimizer_for_cpu_offload=training.use_torch_optimizer_for_cpu_offload,
        overlap_cpu_optimizer_d2h_h2d=training.overlap_cpu_optimizer_d2h_h2d,
        pin_cpu_grads=training.pin_cpu_grads,
        pin_cpu_params=training.pin_cpu_params,
    )
    if training.optimizer_cpu_offload:
        keep_state_on_host(made, training.optimizer_offload_fraction)
    return made


def keep_state_on_host(made: OptimizerConfig, fraction: float) -> None:
    """Let megatron-core keep that share of Adam's state on the host, the float32 weights among it.

    Those stay on the device without its "precision-aware" optimizer. That is said only now because the class would look
    for Transformer Engine, whose Adam is not asked for what is on the host.
    """
    made.optimizer_cpu_offload, made.optimizer_offload_fraction = True, fraction
    made.use_precision_aware_optimizer = made.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True


def ddp_config(config: Config) -> DistributedDataParallelConfig:
    """Return DDP's settings: gradients are reduced over data-parallel ranks once, after all backwards."""
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.training.accumulate_allreduce_grads_in_fp32,
        use_distributed_optimizer=config.parallel.use_distributed_optimizer and not config.parallel.shards_weights,
        check_for_nan_in_grad=False,  # each rank would look for itself; `Trainer` looks at the norm of all
        bucket_size=config.parallel.ddp_bucket_size,
        average_in_collective=config.parallel.ddp_average_in_collective,
    )


def gpt_options(config: Config) -> GPTOptions:
    """Embedding, positions and output layer."""
    model = config.model
    return GPTOptions(
        vocab_size=config.padded_vocabulary,
        max_sequence_length=_given(model.max_position_embeddings),
        position_embedding_type=model.position_embedding_type,
        rotary_percent=model.rotary_percent,
        rotary_base=model.rotary_base,
        rope_scaling=rope_scaling(config),
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        chunk_size=model.chunk_size,
        loss_chunk_size=model.loss_chunk_size or 0,
        cp_comm_type=config.parallel.cp_comm_type[0],
        overlap_tp_comm=config.parallel.overlap_tp_comm,
        cuda_graphs=model.cuda_graphs,
    )


def rope_scaling(config: Config) -> RopeScaling:
    """Return the method that extends the context of rotary embeddings, with its parameters."""
    model = config.model
    if model.position_embedding_type == "yarn":
        return RopeScaling(
            "yarn",
            model.rotary_scaling_factor,
            original_length=_given(model.yarn_original_max_position_embeddings),
            beta_fast=model.yarn_beta_fast,
            beta_slow=model.yarn_beta_slow,
            round_ramp=model.yarn_correction_range_round_to_int,
            mscale=model.mscale,
            mscale_all_dim=model.mscale_all_dim,
        )
    interpolation = model.rotary_seq_len_interpolation_factor or 1.0
    if model.position_embedding_type != "rope" or not model.use_rope_scaling:
        return RopeScaling(interpolation=interpolation)
    return RopeScaling(
        "llama3",
        model.rope_scaling_factor,
        interpolation,
        _given(model.rope_scaling_original_max_position_embeddings),
        model.rope_scaling_low_freq_factor,
        model.rope_scaling_high_freq_factor,
    )


def _listed(frequency: Frequency | None) -> int | list[int] | None:
    return list(frequency) if isinstance(frequency, tuple) else frequency


def _given(value: int | None) -> int:
    """Return a size that validation has filled in."""
    if value is None:
        raise ValueError("the configuration was not validated")
    return value
