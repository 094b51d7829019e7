"""A training loop around our own PipelineModel, which test_own_model.py compares with one process's GPTModel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from helixpipe.model.device import prepare, redirect

prepare()  # before megatron-core is imported, whose notices it silences

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from helixpipe.common.errors import UserError
from helixpipe.drop_in.checks import unwrapped
from helixpipe.model import Microbatch, PipelineModel, UnitContext, layers_of
from helixpipe.program.stages import HEAD_MTP, Piece, model_pieces
from schedules.drop_in import ForwardBackward, get_forward_backward_func
from tests.distributed import gather_tensors
from tests.drop_in.comparing import worst
from tests.drop_in.loop import start
from tests.model.common import (
    BATCH,
    SEQUENCE,
    VOCABULARY,
    gradients_of,
    make_options,
    make_reference,
    reference_forward,
)
from tests.model.common import make_config as model_config

LAYERS, STEPS, SCALE, SEED = 4, 2, 3.0, 7


@dataclass(frozen=True)
class Case:
    """One training run. sizes: microbatches of each step. options: of get_forward_backward_func."""

    schedule: str
    sizes: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)
    tied: bool = True
    per_token: bool = False
    dropout: float = 0.0
    bare: bool = False
    """Without DistributedDataParallel and without finalize_model_grads."""
    bf16: bool = False
    overlap: bool = False
    cp_comm_type: str = "a2a"
    style: str = "llama"


def make_config(case: Case, **changes: Any) -> TransformerConfig:
    dtype = torch.bfloat16 if case.bf16 else torch.float32
    return model_config(
        case.style,
        num_layers=LAYERS,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=case.bf16,
        calculate_per_token_loss=case.per_token,
        hidden_dropout=case.dropout,
        attention_dropout=case.dropout,
        **changes,
    )


def make_model(case: Case, function: ForwardBackward) -> Any:
    config = make_config(case, pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size())
    layers = layers_of(make_config(case))
    further = config.mtp_num_layers
    pieces = function.pieces(layers, case.sizes[0], further_tokens=further)
    copies = function.copies(layers, case.sizes[0], further_tokens=further)
    options = replace(make_options(case.style, case.tied), cp_comm_type=case.cp_comm_type)
    model: Any = PipelineModel(config, options, pieces, seed=SEED, copies=copies)
    if case.bf16:
        model = Float16Module(config, model)
    if not case.bare:
        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=case.overlap)
        model = DistributedDataParallel(config, settings, model)
        config.finalize_model_grads_func = finalize_model_grads
        config.no_sync_func = model.no_sync if case.overlap else None
    config.grad_scale_func = lambda loss: loss * torch.tensor([SCALE])  # as an optimizer's, which gives a shape
    return model


def batches(count: int, step: int, data_rank: int = 0) -> list[Microbatch]:
    """The last of a step has no tokens that count."""
    generator = torch.Generator().manual_seed(100 * step + data_rank)
    draw = partial(torch.randint, 0, VOCABULARY, (BATCH, SEQUENCE), generator=generator)
    found = [Microbatch(draw(), draw(), torch.rand(BATCH, SEQUENCE, generator=generator)) for _ in range(count)]
    return found if count < 3 else [*found[:-1], Microbatch(draw(), draw(), torch.zeros(BATCH, SEQUENCE))]


def reference(case: Case, step: int, data_size: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of the first pipeline's microbatches and gradients, from megatron-core's GPTModel in one process; of
    further tokens, whose losses it divides by their number in float32, from our own model run whole."""
    config = make_config(case)
    head = Piece(HEAD_MTP if config.mtp_num_layers else "head")
    pieces = (*model_pieces(layers_of(config))[:-1], head)
    ours = PipelineModel(config, make_options(case.style, case.tied), pieces, seed=SEED)
    model: Any = ours
    if not config.mtp_num_layers:
        model = make_reference(case.style, case.tied, num_layers=LAYERS).to(ours.payload_dtype)
        model.load_state_dict(ours.state_dict())
    losses, tokens = [], 0.0
    for data_rank in range(data_size):
        for batch in batches(case.sizes[step], step, data_rank):
            count = batch.loss_mask.sum().item()
            if model is ours:
                (loss,) = ours.run(pieces, (), batch, UnitContext(step, 0))
            else:
                loss = torch.sum(reference_forward(model, batch, batch.labels) * batch.loss_mask)
            if not case.per_token:
                loss = loss / (count or 1.0)
            (loss * SCALE / (1 if case.per_token else case.sizes[step] * data_size)).backward()
            tokens += count
            if data_rank == 0:
                losses.append(loss.item())
    gradients = gradients_of(model)
    return losses, {name: value / tokens if case.per_token else value for name, value in gradients.items()}


def call(function: ForwardBackward, case: Case, model: Any, step: int, **arguments: Any) -> list[Any]:
    data_rank = parallel_state.get_data_parallel_rank()
    needed = any(piece.role in ("embed", "head") for piece in unwrapped(model).pieces)
    iterator: Iterator[Any] | None = iter(batches(case.sizes[step], step, data_rank)) if needed else None
    with redirect():
        found = function(
            forward_step_func=None,
            data_iterator=iterator,
            model=[model],
            num_microbatches=case.sizes[step],
            seq_length=SEQUENCE,
            micro_batch_size=BATCH,
            **arguments,
        )
    assert iterator is None or next(iterator, None) is None
    return found


def zero(model: Any) -> None:
    model.zero_grad_buffer() if hasattr(model, "zero_grad_buffer") else model.zero_grad()


def gather(case: Case, model: Any) -> dict[str, Tensor]:
    """Gradients of all pipeline ranks by name. Tied copies must agree where they have been summed, and are summed here
    where nothing finalized gradients."""
    inner: Any = unwrapped(model)
    copies = {id(copy): key for key, copy in inner.replicated_parameters().items()}
    own = {}
    for name, parameter in inner.named_parameters():
        gradient = getattr(parameter, "main_grad", parameter.grad)
        assert gradient is not None, name
        own[copies.get(id(parameter), name)] = gradient
    group = parallel_state.get_pipeline_model_parallel_group()
    found: dict[str, Tensor] = {}
    for part in gather_tensors(own, group):
        for name, value in part.items():
            if name in found and case.bare:
                found[name] = found[name] + value
            else:
                assert name not in found or torch.equal(found[name], value), name
                found[name] = value
    return found


def compare(rank: int, world_size: int, pp: int, cp: int, cases: list[Case]) -> list[dict[str, Any]]:
    """For each case and step, how far losses, validation and gradients are from one process's."""
    start(1, 1)
    expected = [[reference(case, step, world_size // pp // cp) for step in range(len(case.sizes))] for case in cases]
    start(1, pp, cp)
    results = []
    for case, steps in zip(cases, expected, strict=True):
        function = get_forward_backward_func(case.schedule, **case.options)
        model = make_model(case, function)
        found: dict[str, Any] = {"losses": [], "validation": [], "expected": [], "gradients": []}
        for step, (losses, gradients) in enumerate(steps):
            zero(model)
            found["losses"].append([each["lm loss"].item() for each in call(function, case, model, step)])
            found["gradients"].append(worst(gather(case, model), gradients))
            evaluated = call(function, case, model, step, forward_only=True)
            found["validation"].append([each["lm loss"].item() for each in evaluated])
            found["expected"].append(losses)
        assert function.iteration == len(steps)
        function.close()
        results.append(found)
    return results


def dropout(rank: int, world_size: int) -> list[list[float]]:
    """Losses under dropout: of three calls, then of a call whose iteration is set back to the second's, and by
    another schedule."""
    start(1, world_size)
    found = []
    for schedule, options in (("seq1f1b", {"chunks": 2}), ("seq1f1b-zb", {"chunks": 2})):
        case = Case(schedule, (3,), options, dropout=0.3)
        function = get_forward_backward_func(case.schedule, **case.options)
        model = make_model(case, function)
        for iteration in (None, None, 1):
            function.iteration = function.iteration if iteration is None else iteration
            zero(model)
            found.append([each["lm loss"].item() for each in call(function, case, model, 0)])
        function.close()
    return found


def optimize(rank: int, world_size: int, pp: int, case: Case) -> list[list[float]]:
    """Losses of three steps under Adam, with data parallelism: plain, and with all that overlaps, in small buckets."""
    start(1, pp)
    found = []
    for overlap in (False, True):
        function = get_forward_backward_func(case.schedule, **case.options)
        config = make_config(case, pipeline_model_parallel_size=pp)
        layers = layers_of(make_config(case))
        pieces, copies = function.pieces(layers, case.sizes[0]), function.copies(layers, case.sizes[0])
        ours = PipelineModel(config, make_options(case.style, case.tied), pieces, seed=SEED, copies=copies)
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=overlap,
            overlap_grad_reduce=overlap,
            overlap_param_gather=overlap,
            bucket_size=1000 if overlap else None,
        )
        model = DistributedDataParallel(config, ddp, ours)
        config.finalize_model_grads_func = finalize_model_grads
        config.no_sync_func = model.no_sync
        settings = OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            adam_eps=1e-2,
            use_distributed_optimizer=overlap,
            overlap_param_gather=overlap,
        )
        optimizer = get_megatron_optimizer(settings, [model], use_gloo_process_groups=False)
        losses = []
        for _ in range(3):
            zero(model)
            losses += [each["lm loss"].item() for each in call(function, case, model, 0)]
            optimizer.step()
            optimizer.zero_grad()
        found.append(losses)
        function.close()
    return found


def other_groups(name: str) -> ProcessGroupCollection:
    """megatron-core's, but that of `name` has the ranks of the pipeline."""
    groups = ProcessGroupCollection.use_mpu_process_groups()
    setattr(groups, name, groups.pp)
    return groups


def refusals(rank: int, world_size: int) -> list[str]:
    """Return what each mistake is told."""
    start(1, world_size)
    case = Case("seq1f1b", (2,))
    function = get_forward_backward_func("seq1f1b", chunks=2)
    model = make_model(case, function)
    plain: dict[str, Any] = {
        "forward_step_func": None,
        "data_iterator": iter(()),
        "model": model,
        "num_microbatches": 2,
        "seq_length": SEQUENCE,
        "micro_batch_size": BATCH,
    }
    mistakes: list[tuple[ForwardBackward, dict[str, Any]]] = [
        (function, {"forward_step_func": print}),
        (function, {"data_iterator": None}),
        (function, {"data_iterator": iter([1])}),
        (function, {"data_iterator": iter(batches(2, 0)), "micro_batch_size": BATCH + 1}),
        (function, {"collect_non_loss_data": True, "forward_only": True}),
        (function, {"decoder_seq_length": 1}),
        (function, {"data_iterator": [iter(()), iter(())], "model": [model, model]}),
        (get_forward_backward_func("seq1f1b", chunk_lengths=(5, 6)), {}),
        (get_forward_backward_func("helix"), {"num_microbatches": 4}),
        (get_forward_backward_func(function.program(2, 2, 1, 2 * LAYERS)), {}),
        (get_forward_backward_func(function.program(2, 3, 1, LAYERS)), {}),
        (function, {"model": torch.nn.Linear(1, 1)}),
        (function, {"pg_collection": other_groups("cp"), "p2p_communicator": object()}),
        (function, {"pg_collection": other_groups("tp"), "p2p_communicator": object()}),
    ]
    found = []
    for chosen, changes in mistakes:
        try:
            if isinstance(linear := changes.get("model"), torch.nn.Linear):
                linear.config = model.config
            chosen(**{**plain, **changes})
        except UserError as error:
            found.append(str(error))
        chosen.close()
    return found


def run_documented(rank: int, world_size: int, block: str) -> dict[str, Any]:
    """The code block about our own model in docs/megatron_core.md, against one process's model."""
    start(1, 1)
    case = Case("seq1f1b", (5,))
    losses, gradients = reference(case, 0, 1)
    start(1, world_size)
    config = make_config(case, pipeline_model_parallel_size=world_size)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = lambda loss: loss * SCALE
    names: dict[str, Any] = {
        "get_forward_backward_func": get_forward_backward_func,
        "config": config,
        "gpt_options": make_options("llama", True),
        "ddp_config": DistributedDataParallelConfig(),
        "DistributedDataParallel": DistributedDataParallel,
        "data_iterator": iter(batches(5, 0)),
        "num_microbatches": 5,
        "seq_length": SEQUENCE,
        "micro_batch_size": BATCH,
        "seed": SEED,
    }
    exec(block, names)
    return {
        "losses": [each["lm loss"].item() for each in names["losses"]],
        "expected": losses,
        "gradients": worst(gather(case, names["model"]), gradients),
    }
