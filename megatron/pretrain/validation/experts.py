"""Checks of mixtures of experts."""

from __future__ import annotations

from helixpipe.common.errors import UserError
from helixpipe.costs.expert_flags import ExpertFlags
from helixpipe.costs.layer_patterns import parse_frequency
from megatron.pretrain.config import Config
from megatron.pretrain.validation.wording import checked
from schedules import CATALOGUE


def experts(config: Config) -> Config:
    """Settle the experts' width, and check that flags fit each other and that ranks can divide the experts."""
    model, parallel = config.model, config.parallel
    if not model.num_experts:
        if parallel.expert_model_parallel_size > 1:
            raise UserError(
                f"--expert-model-parallel-size {parallel.expert_model_parallel_size} shares out experts: give "
                "--num-experts, or 1."
            )
        return config.replace("parallel", expert_tensor_parallel_size=None).replace("model", num_experts=None)
    parse_frequency("--moe-layer-freq", model.moe_layer_freq, checked(model.num_layers))
    _check_routing(model)
    if model.moe_router_enable_expert_bias and config.training.enable_optimizer_post_validation:
        raise UserError(
            "--enable-optimizer-post-validation cannot be combined with --moe-router-enable-expert-bias: the next "
            "step's forwards need the loads of all ranks."
        )
    if "global_aux_loss" in model.moe_router_load_balancing_type:
        _check_balance_of_a_step(config)
    _check_ranks(config)
    if model.moe_ffn_hidden_size is None:
        config = config.replace("model", moe_ffn_hidden_size=model.ffn_hidden_size)
    return config


def _check_balance_of_a_step(config: Config) -> None:
    """global_aux_loss weighs a microbatch by those before it: all must be as long, and have run on the same rank."""
    flag = "--moe-router-load-balancing-type global_aux_loss"
    name = config.parallel.pipeline_schedule
    if name is not None and name in CATALOGUE and CATALOGUE[name].spread:
        raise UserError(
            f"{flag} counts all microbatches of a layer on one rank; --pipeline-schedule {name} runs them on several: "
            "give aux_loss, or another schedule."
        )
    if config.data.variable_seq_lengths:
        raise UserError(
            f"{flag} counts microbatches that are equally long, and as many on all data-parallel ranks; with "
            "--variable-seq-lengths give aux_loss."
        )


def _check_routing(model: ExpertFlags) -> None:
    kinds, weights = model.moe_router_load_balancing_type, model.moe_aux_loss_coeff
    if len(kinds) != len(weights):
        raise UserError(
            f"--moe-router-load-balancing-type {' '.join(kinds)} names {len(kinds)} losses, but --moe-aux-loss-coeff "
            f"has {len(weights)} numbers; give one each."
        )
    sinkhorn = "sinkhorn" in kinds
    if sinkhorn and (len(kinds) > 1 or any(weights)):
        raise UserError(
            f"--moe-router-load-balancing-type {' '.join(kinds)}: sinkhorn goes alone, with --moe-aux-loss-coeff 0."
        )
    if model.moe_router_enable_expert_bias and model.moe_router_score_function != "sigmoid":
        raise UserError(
            f"--moe-router-score-function {model.moe_router_score_function} goes without "
            "--moe-router-enable-expert-bias; give sigmoid."
        )
    count, topk = model.num_experts or 0, model.moe_router_topk
    if topk > count:
        raise UserError(f"--moe-router-topk {topk} must be at most --num-experts {count}.")
    over_best = model.moe_router_score_function == "softmax" and not model.moe_router_pre_softmax
    if topk == 1 and over_best and not sinkhorn:
        raise UserError("--moe-router-topk 1 needs --moe-router-pre-softmax: a softmax over one score is always 1.")
    groups, best = model.moe_router_num_groups, model.moe_router_group_topk
    if (groups is None) != (best is None):
        raise UserError("--moe-router-num-groups and --moe-router-group-topk need each other.")
    if groups is not None and best is not None and (count % groups or best > groups):
        raise UserError(
            f"--moe-router-num-groups {groups} must divide --num-experts {count} and be at least "
            f"--moe-router-group-topk {best}."
        )
    factor = model.moe_expert_capacity_factor
    if model.moe_pad_expert_input_to_capacity and (factor is None or factor < 0):
        raise UserError("--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor.")


def _check_ranks(config: Config) -> None:
    model, parallel = config.model, config.parallel
    ep, tp = parallel.expert_model_parallel_size, parallel.tensor_model_parallel_size
    parts = parallel.expert_tensor_parallel_size or tp
    count = model.num_experts or 0
    if count % ep:
        raise UserError(f"--expert-model-parallel-size {ep} must divide --num-experts {count}.")
    sharing = tp * parallel.context_parallel_size * parallel.data_parallel_size
    if sharing % (ep * parts):
        raise UserError(
            f"--expert-model-parallel-size {ep} x --expert-tensor-parallel-size {parts} must divide the {sharing} "
            "tensor-, context- and data-parallel ranks of a pipeline rank."
        )
    if ep == 1 and parts != tp:
        raise UserError(
            f"--expert-tensor-parallel-size {parts} beside --tensor-model-parallel-size {tp} needs "
            "--expert-model-parallel-size above 1: megatron-core reduces experts' gradients apart from the others only "
            "with expert parallelism."
        )
    if tp > 1 and not parallel.sequence_parallel:
        raise UserError(f"--num-experts {count} with --tensor-model-parallel-size {tp} needs --sequence-parallel.")
    if model.add_bias_linear and (parts > 1 or model.moe_shared_expert_intermediate_size is not None):
        raise UserError("--num-experts with split or shared experts needs --disable-bias-linear.")
