"""Builds the cost model of the configured model, for schedules that are found from costs."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from math import inf
from typing import Any

from helixpipe.common.errors import UserError
from helixpipe.costs.hardware import DEFAULT_HARDWARE, GIB, find_hardware
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import AUTO, OFF, Layout, ModelShape
from helixpipe.costs.profile_costs import Profile, ProfileCosts
from helixpipe.costs.training_flags import shape_of_flags
from helixpipe.costs.verdict import tensor_limit
from helixpipe.planning.setup import Setup
from helixpipe.program.costs import Costs
from megatron.pretrain.config import Config


def training_costs(config: Config) -> ModelCosts | ProfileCosts:
    """Return costs in seconds and bytes: measured, if --cost-profile gives them, else on the hardware that --hardware
    names. Only the ratios of times matter to a schedule. Raises UserError for a file that cannot be read or is of
    another model.
    """
    parallel, model, training = config.parallel, config.model, config.training
    if parallel.cost_profile is not None:
        return _measured(config, parallel.cost_profile)
    hardware = find_hardware(parallel.hardware or DEFAULT_HARDWARE)
    tp = parallel.tensor_model_parallel_size
    return ModelCosts(
        model_shape(config),
        hardware,
        Layout(
            tp,
            parallel.sequence_parallel,
            training.micro_batch_size or 1,
            element_bytes=2 if training.bf16 or training.fp16 else 4,
            mlp_chunk=model.chunk_size,
            loss_chunk=model.loss_chunk_size or 0,
            context_parallel=parallel.context_parallel_size,
            cp_comm_type=parallel.cp_comm_type[0],
            overlap_tp_comm=parallel.overlap_tp_comm,
            cuda_graphs=_cuda_graphs(config),
            expert_parallel=parallel.expert_model_parallel_size,
            expert_tensor=parallel.expert_tensor_parallel_size or 0,
        ),
        model.seq_length or 1,
        parallel.data_parallel_size,
        parallel.use_distributed_optimizer,
        parallel.kv_grad_fp32,
        adam_on_host=training.optimizer_offload_fraction if training.optimizer_cpu_offload else 0.0,
        shards_weights=parallel.shards_weights,
        gathered_once=parallel.gathered_once,
        fused_adam=_fused_adam(),
    )


def with_overlap_chosen(config: Config) -> Config:
    """Return the configuration with an --overlap-tp-comm of auto settled between off and halves: by the costs of
    --hardware or its default, off with measured costs, which have no tensor parallelism.
    """
    way: Any = config.parallel.overlap_tp_comm
    if way == AUTO:
        costs = None if config.parallel.cost_profile is not None else training_costs(config)
        chunks = config.chunks.count() or 1
        way = costs.with_overlap_chosen(chunks).layout.overlap_tp_comm if isinstance(costs, ModelCosts) else OFF
    return config.replace("parallel", overlap_tp_comm=way)


def _cuda_graphs(config: Config) -> str:
    """Return `Layout.cuda_graphs`: rows of documents run in none, nor does what draws random numbers."""
    data, model = config.data, config.model
    documents = data.variable_seq_lengths or data.reset_position_ids or data.reset_attention_mask
    return OFF if model.hidden_dropout or documents else model.cuda_graphs


def _fused_adam() -> bool:
    """Whether megatron-core's Adam is Transformer Engine's or apex's, and not torch's."""
    if find_spec("transformer_engine") is None and find_spec("apex") is None:
        return False
    from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER  # with torch, which planning does without

    return not USING_PYTORCH_OPTIMIZER


def _measured(config: Config, path: str) -> ProfileCosts:
    profile = Profile.load(path, flag="--cost-profile")
    ours, theirs = model_shape(config), profile.model
    for flag, name in (
        ("--hidden-size", "hidden"),
        ("--num-attention-heads", "heads"),
        ("--num-query-groups", "groups"),
        ("--ffn-hidden-size", "ffn"),
        ("--swiglu", "gated"),
        ("--kv-channels", "channels"),
        ("--qk-layernorm", "qk_norm"),
        ("--attention-output-gate", "output_gate"),
        ("--softmax-type learnable", "sinks"),
        ("--kv-lora-rank", "kv_rank"),
        ("--q-lora-rank", "q_rank"),
        ("--qk-head-dim", "own_channels"),
        ("--qk-pos-emb-head-dim", "shared_channels"),
        ("--v-head-dim", "value_channels"),
        ("--num-experts", "experts"),
        ("--moe-router-topk", "topk"),
        ("--moe-ffn-hidden-size", "expert_ffn"),
        ("--moe-shared-expert-intermediate-size", "shared_ffn"),
    ):
        if getattr(ours, name) != getattr(theirs, name):
            raise UserError(
                f"--cost-profile {path} was measured with {flag} {getattr(theirs, name)}, not {getattr(ours, name)}."
            )
    if missing := set(ours.kinds) - set(theirs.kinds):
        raise UserError(
            f"--cost-profile {path} was measured without {', '.join(sorted(missing))} of layers here; measure again "
            "with what makes layers differ, such as --window-attn-skip-freq, --no-rope-freq and --moe-layer-freq."
        )
    if ours.window not in (0, theirs.window):
        raise UserError(
            f"--cost-profile {path} was measured with --window-size {theirs.window - 1},0, not {ours.window - 1},0."
        )
    for flag, here, there in (
        ("--seq-length", config.model.seq_length, profile.seq_length),
        ("--micro-batch-size", config.training.micro_batch_size, profile.layout.micro_batch_size),
        (
            "--tensor-model-parallel-size",
            config.parallel.tensor_model_parallel_size,
            profile.layout.tensor_parallel,
        ),
        ("--context-parallel-size", config.parallel.context_parallel_size, profile.layout.context_parallel),
        (
            "--expert-model-parallel-size",
            config.parallel.expert_model_parallel_size,
            profile.layout.expert_parallel,
        ),
        ("--chunk-size", config.model.chunk_size, profile.layout.mlp_chunk),
        ("--loss-chunk-size", config.model.loss_chunk_size or 0, profile.layout.loss_chunk),
    ):
        if here != there:
            raise UserError(f"--cost-profile {path} was measured with {flag} {there}, not {here}.")
    profile = replace(
        profile,
        model=replace(theirs, windowed=ours.windowed, unrotated=ours.unrotated, mixed=ours.mixed),
        layout=replace(profile.layout, cuda_graphs=_cuda_graphs(config)),
    )
    return ProfileCosts(profile, config.parallel.kv_grad_fp32, config.parallel.weight_parts, _fused_adam())


def memory_limit(config: Config) -> float | None:
    """Return the bytes of tensors that a GPU may hold, by --memory-limit and --hardware; None if neither is given."""
    limit, memory = explicit_limit(config), gpu_memory(config)
    return None if limit is None and memory == inf else tensor_limit(memory, limit)


def explicit_limit(config: Config) -> float | None:
    """Return the bytes of --memory-limit; None without it."""
    limit = config.parallel.memory_limit
    return None if limit is None else limit * GIB


def gpu_memory(config: Config) -> float:
    """Return the bytes of the memory of the GPU that --hardware names; infinite without it."""
    name = config.parallel.hardware
    return inf if name is None else find_hardware(name).memory


def host_limit(config: Config) -> float:
    """Return the bytes of its host's memory that a GPU may use: its share of --host-memory, or of what --hardware has;
    infinite if neither is given.
    """
    parallel = config.parallel
    if parallel.host_memory is None and parallel.hardware is None:
        return inf
    hardware = find_hardware(parallel.hardware or DEFAULT_HARDWARE)
    memory = hardware.host_memory if parallel.host_memory is None else parallel.host_memory * GIB
    return memory / min(hardware.gpus_per_node, config.launch.world_size)


def setup_of(config: Config, costs: Costs) -> Setup:
    """Return what is the same for the schedule in every step of the run. costs: `training_costs` of the flags."""
    parallel = config.parallel
    return Setup(
        ranks=parallel.pipeline_model_parallel_size,
        layers=config.model.num_layers or 0,
        costs=costs,
        virtual_stages=parallel.virtual_pipeline_model_parallel_size,
        recompute=config.recompute,
        memory_limit=memory_limit(config),
        offload=config.offload,
        host_limit=host_limit(config),
        sharded=parallel.weight_parts,
        gathered_once=parallel.gathered_once,
        stage_layers=parallel.stage_layers,
        vocabulary=replace(config.vocabulary, vocab_parallel_splits=divisible_head(config)),
    )


def divisible_head(config: Config) -> bool:
    """Return whether the head can be split over the pipeline: not where it is tied to the embedding and data-parallel
    ranks have parts of both, which they would cut at other elements."""
    return config.model.untie_embeddings_and_output_weights or not config.parallel.shards_weights


def model_shape(config: Config) -> ModelShape:
    """Return the configured model, with the rows that its embedding will have: it is padded already."""
    return shape_of_flags(vars(config.model), "the model", config.padded_vocabulary, vocab_multiple=1)
