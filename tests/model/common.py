"""Small models, their megatron-core counterparts and batches, for the tests of the model; runs inside ranks."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import MLATransformerConfig, TransformerConfig, multi_latent_attention
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.moe import moe_utils

from helixpipe.model import GPTOptions, Microbatch, PipelineModel, UnitContext
from helixpipe.model.device import device, redirect
from helixpipe.program.stages import Piece, model_pieces

LAYERS, VOCABULARY, SEQUENCE, BATCH = 2, 48, 12, 2
CHAIN = model_pieces(LAYERS)
CONTEXT = UnitContext(step=0, microbatch=0)


def set_parallel(tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1) -> None:
    """Process groups of the given sizes over all ranks, data parallel over the rest, in place of the ones before.

    The old groups are destroyed, not just forgotten: there are some twenty, and each gloo group has three threads.
    """
    torch.distributed.barrier()
    parallel_state.destroy_model_parallel()
    for group in list(torch.distributed.distributed_c10d._world.pg_map):
        if group is not torch.distributed.group.WORLD:
            torch.distributed.destroy_process_group(group)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        create_gloo_process_groups=False,
        # Our models sum the gradients of tied copies themselves, whichever ranks hold them.
        get_embedding_ranks=lambda ranks, *_: ranks[:1],
        get_position_embedding_ranks=lambda ranks, *_: ranks[:1],
    )
    model_parallel_cuda_manual_seed(1)


def make_config(style: str, tp: int = 1, **changes: Any) -> TransformerConfig:
    """A config, float64 unless changed: `gpt` style (LayerNorm, GELU, biases), `llama` style (RMSNorm, SwiGLU, GQA, no
    bias), `mixed` style, which is Llama's with every second layer's attention to a window of 4 tokens, from the first
    on, and no RoPE in every third, from the second on, `experts` style, which is Llama's with experts and all
    auxiliary losses in every second layer, from the first on, `further` style, which is Llama's and predicts two
    further tokens, `gated` style, which is `mixed` style with gates and learned sinks, `latent` style, which is
    Llama's with multi-latent attention and YaRN, `balanced` style, which is `experts` style balanced over the step as
    well, or `deepseek` style, which is `latent` with experts in all layers but the first and a further token."""
    settings: dict[str, Any] = {
        "num_layers": LAYERS,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "use_cpu_initialization": True,
        "params_dtype": torch.float64,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "cuda_graph_scope": None,
        "tensor_model_parallel_size": tp,
    }
    if style == "gated":
        settings.update(attention_output_gate=True, softmax_type="learnable", init_method_std=0.3)
    if style in ("mixed", "gated"):
        layers = changes.get("num_layers", LAYERS)
        settings.update(window_size=(3, 0), window_attn_skip_freq=2)
        settings["no_rope_freq"] = [int(layer % 3 == 1) for layer in range(layers)]
    if style == "deepseek":
        settings.update(mtp_num_layers=1, mtp_loss_scaling_factor=0.7)
        settings["moe_layer_freq"] = [0] + [1] * (changes.get("num_layers", LAYERS) - 1)
    if style in ("experts", "deepseek", "balanced"):
        settings.update(
            num_moe_experts=4,
            moe_layer_freq=settings.get("moe_layer_freq", 2),
            moe_ffn_hidden_size=24,
            moe_router_topk=2,
            moe_router_score_function="sigmoid",
            moe_router_load_balancing_type=["aux_loss", "seq_aux_loss"],
            moe_aux_loss_coeff=[0.3, 0.2],
            moe_z_loss_coeff=0.1,
            moe_router_enable_expert_bias=changes.get("moe_router_score_function", "sigmoid") == "sigmoid",
            moe_shared_expert_intermediate_size=16,
            moe_token_dispatcher_type="alltoall",
        )
    if style == "balanced":
        settings.update(moe_router_load_balancing_type=["global_aux_loss", "aux_loss"], num_query_groups=2)
    if style == "further":
        settings.update(mtp_num_layers=2, mtp_loss_scaling_factor=0.7)
    if style != "gpt":
        settings.update(
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            num_query_groups=2,
            ffn_hidden_size=40,
        )
    if style in ("latent", "deepseek"):
        settings.update(
            num_query_groups=None,
            q_lora_rank=20,
            kv_lora_rank=12,
            qk_head_dim=6,
            qk_pos_emb_head_dim=4,
            v_head_dim=7,
            qk_layernorm=True,
            rotary_base=500,
            rotary_scaling_factor=4,
            original_max_position_embeddings=8,
            mscale=0.7,
            mscale_all_dim=0.4,
        )
    kind = MLATransformerConfig if style in ("latent", "deepseek") else TransformerConfig
    return kind(**{**settings, **changes})


def make_options(style: str, tied: bool) -> GPTOptions:
    rope = {"position_embedding_type": "rope", "rotary_percent": 0.5, "rotary_base": 500}
    return GPTOptions(
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        share_embeddings_and_output_weights=tied,
        **(rope if style != "gpt" else {}),
    )


def make_model(
    style: str, tied: bool, pieces: Sequence[Piece] = CHAIN, tp: int = 1, seed: int = 7, **changes: Any
) -> PipelineModel:
    return PipelineModel(make_config(style, tp, **changes), make_options(style, tied), pieces, seed=seed)


class PlainAttention(torch.nn.Module):
    """Causal attention written out, of keys and values of unlike width, which megatron-core has in Transformer Engine
    alone."""

    def __init__(self, config: TransformerConfig, softmax_scale: float, **others: Any):
        super().__init__()
        self.scale = softmax_scale
        if config.softmax_type == "learnable":
            self.softmax_offset = torch.nn.Parameter(torch.zeros(config.num_attention_heads))

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, **others: Any
    ) -> torch.Tensor:
        scores = torch.einsum("ibhd,jbhd->bhij", query, key) * self.scale
        scores = scores.masked_fill(mask, -torch.inf)
        if hasattr(self, "softmax_offset"):
            sinks = self.softmax_offset[:, None, None].expand(*scores.shape[:-1], 1)
            weights = torch.cat((sinks, scores), dim=-1).softmax(-1)[..., 1:]
        else:
            weights = scores.softmax(-1)
        return torch.einsum("bhij,jbhd->ibhd", weights, value).flatten(2)


def make_reference(style: str, tied: bool, tp: int = 1, **changes: Any) -> GPTModel:
    """Plain megatron-core, with its unfused attention."""
    options, config = make_options(style, tied), make_config(style, tp, **changes)
    norm = "RMSNorm" if style != "gpt" else None
    latent = config.multi_latent_attention
    spec: Any = get_gpt_layer_local_spec(
        normalization=config.normalization if latent else norm,
        multi_latent_attention=latent,
        qk_layernorm=config.qk_layernorm,
    )
    if latent:
        spec.submodules.self_attention.submodules.core_attention = PlainAttention
    if config.num_moe_experts:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=norm)
    further = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if config.mtp_num_layers else None
    with mock.patch.object(multi_latent_attention, "HAVE_TE", False):  # it takes stand-ins for the library
        model = _core_model(config, spec, options, tied, further, changes.get("params_dtype", torch.float64))
    gate_exactly(model)
    return model


def gate_exactly(model: torch.nn.Module) -> None:
    """Let megatron-core's attention not round the sigmoid of its gate to float32."""
    for module in model.modules():
        if isinstance(module, SelfAttention):
            module._apply_output_gate = lambda attention, gate: attention * gate.reshape(attention.shape).sigmoid()


@contextmanager
def in_float64() -> Iterator[None]:
    """Let megatron-core compute cross entropies and the scores of routers in float64, which it rounds to float32."""
    wide = SimpleNamespace(**{**vars(torch), "float32": torch.float64})

    def widen(own: torch.Tensor) -> torch.Tensor:
        return own.to(torch.float64 if own.dim() > 1 else torch.float32)  # norms keep the type that all ranks send

    with mock.patch.object(torch.Tensor, "float", widen), mock.patch.object(moe_utils, "torch", wide):
        yield


def _core_model(
    config: TransformerConfig, spec: Any, options: GPTOptions, tied: bool, further: Any, dtype: torch.dtype
) -> GPTModel:
    return GPTModel(
        config,
        spec,
        options.vocab_size,
        options.max_sequence_length,
        share_embeddings_and_output_weights=tied,
        position_embedding_type=options.position_embedding_type,
        rotary_percent=options.rotary_percent,
        rotary_base=options.rotary_base,
        mtp_block_spec=further,
    ).to(device(), dtype)


def make_batch(seed: int = 3) -> Microbatch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=generator)
    labels = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=generator)
    return Microbatch(tokens, labels, torch.rand(BATCH, SEQUENCE, generator=generator))


def score(logits: torch.Tensor, tp_rank: int = 0) -> torch.Tensor:
    """A float64 function of the logits [s, b, vocabulary / tp]: stands for the loss, which computes in float32."""
    columns = torch.arange(logits.size(-1), dtype=torch.float64) + tp_rank * logits.size(-1)
    rows = torch.arange(logits.size(0), dtype=torch.float64)[:, None, None]
    return torch.sum(torch.sin(columns + 0.1 * rows) * logits + torch.cos(rows - 0.2 * columns) * logits**2)


def reference_forward(model: GPTModel, batch: Microbatch, labels: torch.Tensor | None) -> torch.Tensor:
    """GPTModel's logits [s, b, vocabulary / tp], or its token losses [b, s] when labels are given."""
    length = batch.tokens.size(1)
    positions = torch.arange(length, device=batch.tokens.device).expand(batch.tokens.size(0), -1)
    mask = torch.ones(length, length, dtype=torch.bool, device=batch.tokens.device).triu(1)[None, None]
    with redirect() if model.config.window_size is not None else nullcontext():  # whose mask is made on the GPU
        weights = {"loss_mask": batch.loss_mask} if model.config.mtp_num_layers else {}
        output = model(batch.tokens, positions, mask, labels=labels, **weights)
    return output if labels is not None else output.transpose(0, 1)


def run_parts(
    parts: Sequence[tuple[PipelineModel, Sequence[Piece]]],
    batch: Microbatch,
    objective: Callable[[torch.Tensor], torch.Tensor] | None = None,
    context: UnitContext = CONTEXT,
) -> torch.Tensor:
    """Run the chain part by part, each in its own graph, then backward part by part with explicit gradients.

    objective: function of the logits in place of the head's own loss. Returns the loss.
    """
    boundaries: list[tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]] = []
    state: tuple[torch.Tensor, ...] = ()
    for model, pieces in parts:
        inputs = tuple(tensor.detach().requires_grad_() for tensor in state)
        if objective is not None and pieces[-1].kind == "head":
            state = (objective(model.logits(*model.run(pieces[:-1], inputs, batch, context))),)
        else:
            state = model.run(pieces, inputs, batch, context)
        if pieces[-1].kind != "head":
            shapes = model.payload_shapes(pieces[-1], BATCH, SEQUENCE)
            assert tuple(tensor.shape for tensor in state) == shapes, (pieces[-1], shapes)
            assert all(tensor.dtype == model.payload_dtype for tensor in state)
        boundaries.append((inputs, state))
    loss = state[0].detach()
    gradients: tuple[torch.Tensor | None, ...] = (None,)
    for inputs, outputs in reversed(boundaries):
        torch.autograd.backward(outputs, gradients)
        gradients = tuple(tensor.grad for tensor in inputs)
        assert all(gradient is not None for gradient in gradients)
    return loss


def gradients_of(*models: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Gradients by GPTModel's names; a tied head's own copy is added to the word embedding's."""
    gradients: dict[str, torch.Tensor] = {}
    for model in models:
        copies = {id(copy): key for key, copy in getattr(model, "replicated_parameters", dict)().items()}
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and not parameter.grad.requires_grad, name
            key = copies.get(id(parameter), name)
            gradients[key] = gradients[key] + parameter.grad if key in gradients else parameter.grad
    return gradients


def with_global_experts(named: dict[str, torch.Tensor], first: int) -> dict[str, torch.Tensor]:
    """Number a rank's experts as those of all ranks are, in the names of their weights.

    Args:
        named: Tensors by the names of weights.
        first: The number of the rank's first expert.

    Returns:
        The same tensors by the names in one process.
    """
    local = re.compile(r"local_experts\.(\d+)\.")
    return {
        local.sub(lambda match: f"local_experts.{first + int(match[1])}.", name): own for name, own in named.items()
    }


def worst(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest difference, relative to the parameter's largest gradient, and the parameter's name; infinite where a
    number is not one."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    found = []
    for name in theirs:
        error = (ours[name] - theirs[name]).abs().max() / theirs[name].abs().max().clamp_min(1e-30)
        found.append((number_or_infinity(error.item()), name))
    return max(found)


def number_or_infinity(value: float) -> float:
    """Larger than any tolerance if it is not a number, which is neither larger nor smaller."""
    return math.inf if math.isnan(value) else value
