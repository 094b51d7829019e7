"""Flags of mixtures of experts, under Megatron-LM's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from helixpipe.common.flags import option
from helixpipe.common.ranges import MOST_EXPERTS, MOST_WIDTH


@dataclass(frozen=True)
class ExpertFlags:
    """Which layers have experts, and how tokens are sent to them."""

    num_experts: int | None = option(
        None, "Experts of each layer that has some, in place of its MLP; 0: none.", at_least=0, at_most=MOST_EXPERTS
    )
    moe_layer_freq: str = option(
        "1",
        "N, every N-th layer has experts, from the first on, or a list of 1 (experts) and 0, a number a layer.",
        metavar="N|LIST",
    )
    moe_ffn_hidden_size: int | None = option(
        None, "Width of an expert (default: --ffn-hidden-size).", at_least=1, at_most=MOST_WIDTH
    )
    moe_shared_expert_intermediate_size: int | None = option(
        None, "Width of the experts that all tokens go to, together (default: none).", at_least=1, at_most=MOST_WIDTH
    )
    moe_shared_expert_gate: bool = option(False, "A gate for the shared experts' output.")
    moe_router_topk: int = option(2, "Experts that a token goes to.", at_least=1, at_most=MOST_EXPERTS)
    moe_router_load_balancing_type: tuple[str, ...] = option(
        ("aux_loss",),
        "What makes experts be used alike: aux_loss (over a microbatch), seq_aux_loss (over each sequence), "
        "global_aux_loss (over all microbatches so far and data-parallel ranks), several of them, none, or sinkhorn, "
        "which deals out the tokens of a whole microbatch.",
        nargs="+",
    )
    moe_aux_loss_coeff: tuple[float, ...] = option(
        (0.0,), "Weight of each of these losses, of a mean over a microbatch.", nargs="+", at_least=0
    )
    moe_z_loss_coeff: float | None = option(
        None, "Weight of the mean of the squared log-sum-exp of the router's logits.", at_least=0
    )
    moe_router_score_function: Literal["softmax", "sigmoid"] = option("softmax", "From the router's logits to scores.")
    moe_router_pre_softmax: bool = option(False, "Softmax over all experts, before the best are chosen.")
    moe_router_num_groups: int | None = option(None, "Groups of experts, for --moe-router-group-topk.", at_least=1)
    moe_router_group_topk: int | None = option(None, "Groups whose experts a token may go to.", at_least=1)
    moe_router_topk_scaling_factor: float | None = option(None, "Scores of the chosen experts times this.", more_than=0)
    moe_router_enable_expert_bias: bool = option(
        False,
        "Choose experts by their score and a bias, which goes down after each step for those that had more tokens than "
        "the mean, and up for others.",
    )
    moe_router_bias_update_rate: float = option(1e-3, "How far biases go in a step.", at_least=0)
    moe_router_dtype: Literal["fp32", "fp64"] | None = option(
        None, "Precision of the router's logits (default: that of the hidden states)."
    )
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = option(
        "allgather",
        "How tokens get to expert-parallel ranks: all to all of them, each to where its experts are, or by DeepEP's "
        "kernels (flex, refused).",
    )
    moe_expert_capacity_factor: float | None = option(
        None,
        "Drop the tokens of an expert beyond this times its share of a chunk (default, or below 0: drop none).",
    )
    moe_pad_expert_input_to_capacity: bool = option(False, "Pad every expert's tokens to its capacity.")
    moe_token_drop_policy: Literal["probs", "position"] = option(
        "probs", "Which are dropped: those of the lowest probability, or the last."
    )
