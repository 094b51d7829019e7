"""A plain megatron-core training loop, which test_drop_in.py runs under megatron-core's own function and under ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from helixpipe.model.device import prepare, redirect

prepare()  # before megatron-core is imported, whose notices it silences

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from helixpipe.drop_in.checks import unwrapped
from helixpipe.model.norms import make_norm
from tests.distributed import gather_tensors

VOCABULARY, SEQUENCE, BATCH, STEPS = 48, 12, 2, 2


@dataclass(frozen=True)
class Case:
    """One training run. v: chunks a rank; in_a_v: placed as zbv does; None as schedule: megatron-core's own."""

    schedule: str | None
    pp: int
    m: int
    tp: int = 1
    v: int = 1
    in_a_v: bool = False
    tied: bool = False
    llama: bool = False
    sequence_parallel: bool = False
    per_token: bool = False
    bf16: bool = False
    overlap: bool = False
    distributed_optimizer: bool = False
    recompute: bool = False
    deallocate: bool = True
    bare: bool = False
    """Without DistributedDataParallel, which leaves reductions and the optimizer to others."""
    counted: bool = False
    """The loss function returns a sum and the number of tokens, as Megatron-LM's, whatever is made of them."""
    double: bool = False
    """In float64 but for the loss function, and bare."""
    changes: tuple[tuple[str, Any], ...] = ()
    """Other settings of the configuration."""
    frozen: bool = False
    """Bare, and with weights that are not trained: all of the first stage's, some of the others'."""
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def layers(self) -> int:
        return self.pp * 2

    def __str__(self) -> str:
        marks = [name.replace("_", "-") for name, value in vars(self).items() if value is True]
        return "-".join([str(self.schedule), f"p{self.pp}", f"tp{self.tp}", f"v{self.v}", f"m{self.m}", *marks])

    def by_core(self) -> Case:
        """The run to compare with, by megatron-core's own function: with the same chunks where it can run them, else
        with one a rank."""
        return replace(
            self,
            schedule=None,
            v=self.v if self.same_chunks else 1,
            in_a_v=False,
            options=(),
            overlap=self.overlap and not self.distributed_optimizer,  # with it, force_all_reduce does nothing there
        )

    @property
    def same_chunks(self) -> bool:
        """Say whether megatron-core has the same: its interleaved schedule knows no V, needs m to be a multiple of p,
        and over two ranks mixes its messages up (Megatron-LM refuses these two ranks)."""
        return self.v == 1 or (not self.in_a_v and self.pp > 2 and self.m % self.pp == 0)


@dataclass
class Trained:
    """losses: what each step returned on the last rank. gradients: of each step, by global name, of all pipeline
    ranks. weights: of the end. validation: losses, and the outputs collected as non-loss data."""

    losses: list[list[float]]
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]
    validation: tuple[list[float], list[Tensor]]


# ------------------------------------------------------------------------------------------------- the user's own loop


def start(tp: int, pp: int, cp: int = 1) -> None:
    torch.distributed.barrier()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp, pp, context_parallel_size=cp, create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1)


def make_config(case: Case) -> TransformerConfig:
    style: dict[str, Any] = {}
    if case.llama:
        style = {
            "normalization": "RMSNorm",
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "add_bias_linear": False,
            "num_query_groups": 2,
            "ffn_hidden_size": 40,
        }
    if case.recompute:
        style |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    dtype = torch.bfloat16 if case.bf16 else torch.float64 if case.double else torch.float32
    style |= dict(case.changes)
    config = TransformerConfig(
        num_layers=case.layers,
        hidden_size=32,
        num_attention_heads=4,
        **{"hidden_dropout": 0.0, "attention_dropout": 0.0, **style},
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.v if case.v > 1 else None,
        sequence_parallel=case.sequence_parallel,
        calculate_per_token_loss=case.per_token,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=case.bf16,
        deallocate_pipeline_outputs=case.deallocate,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        cuda_graph_scope=None,
    )
    config.counts_tokens = case.counted
    return config


def stages_here(case: Case) -> list[int]:
    rank = parallel_state.get_pipeline_model_parallel_rank()
    return [rank, 2 * case.pp - 1 - rank] if case.in_a_v else [rank + case.pp * index for index in range(case.v)]


class Norm:
    """torch's, which megatron-core refuses with sequence parallelism."""

    def __new__(cls, config: TransformerConfig, **unused: Any) -> Any:
        return make_norm(config)


def make_model(case: Case, config: TransformerConfig) -> list[Any]:
    chunks = []
    last = case.pp * case.v - 1
    layer = get_gpt_layer_local_spec(config.num_moe_experts, False, normalization=config.normalization)
    if config.sequence_parallel:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
        count = config.num_layers // (case.pp * case.v)
        layer = TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=Norm)
    for index, stage in enumerate(stages_here(case)):
        chunk: torch.nn.Module = GPTModel(
            config,
            layer,
            VOCABULARY,
            SEQUENCE,
            pre_process=stage == 0,
            post_process=stage == last,
            share_embeddings_and_output_weights=case.tied,
            position_embedding_type="rope" if case.llama else "learned_absolute",
            vp_stage=index if case.v > 1 else None,
        )
        draw_weights(chunk, stage * case.layers // (last + 1))
        if case.double:
            chunk.double()  # norms have been made in float32
        if case.bf16:
            chunk = Float16Module(config, chunk)
        if case.frozen:
            for name, parameter in chunk.named_parameters():
                parameter.requires_grad = stage > 0 and "linear_fc1" not in name
        if case.bare:
            chunks.append(chunk)
            continue
        ddp = DistributedDataParallelConfig(
            overlap_grad_reduce=case.overlap,
            use_distributed_optimizer=case.distributed_optimizer,
            overlap_param_gather=case.overlap and case.distributed_optimizer,
            grad_reduce_in_fp32=True,
        )
        chunks.append(DistributedDataParallel(config, ddp, chunk))
    if case.overlap:
        config.no_sync_func = [chunk.no_sync for chunk in chunks] if case.v > 1 else chunks[0].no_sync
    return chunks


def forward_step(iterator: Iterator[Any], model: Any) -> tuple[Tensor, Callable[..., Any]]:
    tokens, labels, mask = next(iterator)
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    attention_mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    return model(tokens, positions, attention_mask, labels=labels), partial(loss_func, model.config, mask)


def loss_func(config: TransformerConfig, mask: Tensor, losses: Tensor, non_loss_data: bool = False) -> Any:
    if non_loss_data:
        return losses.detach().clone()
    total = torch.sum(losses.float() * mask)
    if config.calculate_per_token_loss or getattr(config, "counts_tokens", False):
        return total, mask.sum().int(), {"lm loss": total.detach().clone()}
    loss = total / mask.sum()
    return loss, {"lm loss": loss.detach().clone()}


def set_up(case: Case) -> tuple[list[Any], Any]:
    """The model's chunks on this rank and the optimizer, configured for a schedule."""
    config = make_config(case)
    model = make_model(case, config)
    if case.bare:
        return model, None
    settings = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        adam_eps=1e-2,
        bf16=case.bf16,
        use_distributed_optimizer=case.distributed_optimizer,
        overlap_param_gather=case.overlap and case.distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(settings, model, use_gloo_process_groups=False)
    config.grad_scale_func = lambda loss: optimizer.scale_loss(loss) * 3.0
    config.finalize_model_grads_func = finalize_model_grads
    return model, optimizer


def train(case: Case, function: Any) -> Trained:
    """Some steps and a validation."""
    model, optimizer = set_up(case)

    def call(step: int, **arguments: Any) -> list[Any]:
        iterators = [iter(batches(case.m, step)) for _ in model]
        with redirect():  # megatron-core's function asks for the device "cuda"
            found: list[Any] = function(
                forward_step_func=forward_step,
                data_iterator=iterators if case.v > 1 else iterators[0],
                model=model if case.v > 1 else model[0],
                num_microbatches=case.m,
                seq_length=SEQUENCE,
                micro_batch_size=BATCH,
                force_all_reduce=case.distributed_optimizer,  # gradients whole, not one shard a rank
                **arguments,
            )
        assert all(next(iterator, None) is None for iterator in iterators)
        return found

    losses, gradients = [], []
    for step in range(STEPS):
        for chunk in model:
            chunk.zero_grad() if case.bare else chunk.zero_grad_buffer()
        losses.append([each["lm loss"].item() for each in call(step)])
        gradients.append(gather(case, model, gradient_of))
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        evaluated = [each["lm loss"].item() for each in call(STEPS, forward_only=True)]
        collected = call(STEPS, forward_only=True, collect_non_loss_data=True)
    weights = gather(case, model, lambda parameter: parameter.detach())
    return Trained(losses, gradients, weights, (evaluated, collected))


# ------------------------------------------------------------------------------------------------------ for comparing


def draw_weights(chunk: torch.nn.Module, offset: int) -> None:
    """Weights by their global names, so that they do not depend on the placement; copies and replicas alike."""
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    for name, parameter in chunk.named_parameters():
        key = global_name(name, offset)
        if key == "output_layer.weight" and getattr(parameter, "shared_embedding", False):
            key = "embedding.word_embeddings.weight"
        split = getattr(parameter, "tensor_model_parallel", False)
        generator = torch.Generator().manual_seed(sum(key.encode()) * 100 + len(key) + (tp_rank + 1) * split)
        values = torch.randn(parameter.shape, generator=generator) * 0.1 + ("norm.weight" in key)
        parameter.data.copy_(values)


def global_name(name: str, offset: int) -> str:
    parts = name.split(".")
    if "layers" in parts:
        at = parts.index("layers") + 1
        parts[at] = str(int(parts[at]) + offset)
    return ".".join(parts)


def gradient_of(parameter: Any) -> Tensor | None:
    assert parameter.requires_grad or parameter.grad is None
    gradient: Tensor | None = getattr(parameter, "main_grad", parameter.grad)
    return gradient


def gather(case: Case, model: list[Any], value: Callable[[Any], Tensor | None]) -> dict[str, Tensor]:
    """By global name, of the chunks of all pipeline ranks with this tensor-parallel rank; what is None is left out."""
    own: dict[str, Tensor] = {}
    for stage, chunk in zip(stages_here(case), model, strict=True):
        for name, parameter in unwrapped(chunk).named_parameters():
            tensor = value(parameter)
            if tensor is not None:
                own[global_name(name, stage * case.layers // (case.pp * case.v))] = tensor
    group = parallel_state.get_pipeline_model_parallel_group()
    return {name: tensor for part in gather_tensors(own, group) for name, tensor in part.items()}


def batches(count: int, step: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(100 * step + parallel_state.get_data_parallel_rank())
    return [
        (
            torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=generator),
            torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=generator),
            torch.randint(0, 2, (BATCH, SEQUENCE), generator=generator).float(),
        )
        for _ in range(count)
    ]
