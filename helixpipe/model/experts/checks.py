"""What of megatron-core's mixtures of experts cannot be had here, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from helixpipe.common.errors import UserError
from helixpipe.costs.models import HALVES, OFF, PAIRS
from helixpipe.model.device import device
from helixpipe.model.options import GPTOptions

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

BALANCING = ("none", "aux_loss", "seq_aux_loss", "global_aux_loss")
"""Values of `--moe-router-load-balancing-type`."""

SINKHORN = "sinkhorn"
"""Another, alone: tokens are dealt by Sinkhorn's iteration over those of a microbatch on this rank, without a loss
(Clark et al., "Unified Scaling Laws for Routed Language Models", ICML 2022)."""


class _Refused(NamedTuple):
    """A field of TransformerConfig, which values of it cannot be had, and the sentence that says so."""

    field: str
    refused: Callable[[Any], bool]
    why: str


_REFUSED = (
    _Refused(
        "moe_token_dispatcher_type",
        lambda value: value == "flex",
        "--moe-token-dispatcher-type flex exchanges tokens by DeepEP's or HybridEP's kernels, which are for GPUs and "
        "not called here; valid values are allgather and alltoall",
    ),
    _Refused(
        "moe_router_load_balancing_type",
        lambda value: value != SINKHORN and not set([value] if isinstance(value, str) else value) <= set(BALANCING),
        "--moe-router-load-balancing-type must be none, aux_loss, seq_aux_loss or global_aux_loss, or sinkhorn alone",
    ),
    _Refused(
        "moe_shared_expert_overlap",
        bool,
        "--moe-shared-expert-overlap is not supported: shared experts run before the router",
    ),
    _Refused("moe_input_jitter_eps", bool, "--moe-input-jitter-eps is not supported: it draws with no seed of its own"),
    _Refused("moe_latent_size", bool, "--moe-latent-size needs Transformer Engine's layers, which are not used here"),
    _Refused("moe_router_force_load_balancing", bool, "--moe-router-force-load-balancing is not supported"),
    _Refused(
        "moe_router_fusion", bool, "--moe-router-fusion needs Transformer Engine's kernels, which are not used here"
    ),
    _Refused("moe_enable_routing_replay", bool, "--moe-enable-routing-replay is not supported"),
)


def check_experts(config: TransformerConfig, gpt: GPTOptions) -> None:
    """Raise UserError, naming the flag, for experts that cannot be had; nothing for a model without any."""
    if config.num_moe_experts is None:
        return
    for name, refused, why in _REFUSED:
        value = getattr(config, name, None)
        if value is not None and refused(value):
            raise UserError(f"{why} (it is {value!r}).")
    if config.moe_router_load_balancing_type == SINKHORN and gpt.overlap_tp_comm == HALVES:
        raise UserError(
            "--overlap-tp-comm halves cannot be combined with --moe-router-load-balancing-type sinkhorn, which needs "
            "all tokens of a microbatch at once; give off or pairs."
        )
    if config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
        raise UserError(
            f"--num-experts {config.num_moe_experts} with --tensor-model-parallel-size "
            f"{config.tensor_model_parallel_size} needs --sequence-parallel, as in megatron-core."
        )
    parts = config.expert_tensor_parallel_size or config.tensor_model_parallel_size
    uneven = config.expert_model_parallel_size > 1 and config.moe_token_dispatcher_type == "alltoall"
    if uneven and parts > 1 and device().type == "cpu":
        raise UserError(
            f"--moe-token-dispatcher-type alltoall with --expert-tensor-parallel-size {parts} gathers unequal parts, "
            "which gloo cannot: give allgather, or --expert-tensor-parallel-size 1."
        )
    if gpt.overlap_tp_comm == HALVES and config.moe_expert_capacity_factor is not None:
        raise UserError(
            f"--overlap-tp-comm {HALVES} routes each half by itself, and --moe-expert-capacity-factor "
            f"{config.moe_expert_capacity_factor} would count the tokens of a half: give {PAIRS} or {OFF}."
        )
    if gpt.chunk_size:
        raise UserError(
            f"--chunk-size {gpt.chunk_size} slices an MLP of all tokens, which --num-experts "
            f"{config.num_moe_experts} replaces: leave it out."
        )
    if config.moe_router_topk > config.num_moe_experts:
        raise UserError(
            f"--moe-router-topk {config.moe_router_topk} must be at most --num-experts {config.num_moe_experts}."
        )
