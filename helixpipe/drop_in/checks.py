"""Checks that a schedule and the user's model fit each other; whatever does not is refused in a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import LayerType

from helixpipe.common.errors import ScheduleError, UserError
from helixpipe.program.program import Op, Program
from helixpipe.program.stages import Stage

_REFUSED_SETTINGS = {
    "variable_seq_lengths": "no rank tells another the shape of a message",
    "hybrid_context_parallel": "it is a schedule of its own",
    "overlap_moe_expert_parallel_comm": "it is a schedule of its own",
    "num_microbatches_with_partial_activation_checkpoints": "it counts on 1F1B's order",
    "defer_embedding_wgrad_compute": "it counts on 1F1B's order",
    "delay_wgrad_compute": "a schedule says itself when weight gradients are computed",
    "fine_grained_activation_offloading": "it counts on 1F1B's order",
}
"""Settings of megatron-core's configuration that its own schedules implement, and why these here do not."""


def unwrapped(chunk: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside DistributedDataParallel, Float16Module and the like."""
    while isinstance(inner := getattr(chunk, "module", None), torch.nn.Module):
        chunk = inner
    return chunk


def check_config(config: TransformerConfig) -> None:
    """Check the configuration. Raises UserError for a setting that only megatron-core's own schedules know."""
    for name, reason in _REFUSED_SETTINGS.items():
        value = getattr(config, name, None)
        if value is not None and value is not False:
            raise UserError(f"{name}={value} is not supported with schedules of helixpipe: {reason}.")
    if (graphs := getattr(config, "cuda_graph_impl", "none")) != "none":  # a ModelParallelConfig has none
        raise UserError(f'cuda_graph_impl="{graphs}" is not supported with schedules of helixpipe.')


def check_program(program: Program, num_ranks: int, num_microbatches: int) -> None:
    """Check that chunks of whole layers can run the program. Raises ScheduleError."""
    name = program.schedule
    if (program.num_ranks, program.num_microbatches) != (num_ranks, num_microbatches):
        raise ScheduleError(
            f"schedule {name} is a program for {program.num_ranks} ranks and {program.num_microbatches} microbatches, "
            f"but the run has {num_ranks} and {num_microbatches}."
        )
    if program.forward_only:
        raise ScheduleError(f"schedule {name} has no backward: it is an evaluation program.")
    if program.kv_blocks:
        raise ScheduleError(
            f"schedule {name} keeps keys and values in blocks (kv_blocks): only a helixpipe.model.PipelineModel can."
        )
    for number, stage in enumerate(program.stages):
        if stage.part is not None:
            raise ScheduleError(
                f"schedule {name} divides the output layer over the pipeline: only a helixpipe.model.PipelineModel has "
                "a part of it, not a GPTModel of one's own."
            )
        if stage.placement != "resident":
            raise ScheduleError(
                f"schedule {name} has {stage.placement} stages, but the weights of a model of one's own stay in place."
            )
        if stage.pieces[0].role not in ("embed", "norm", "head") or stage.pieces[-1].role not in (
            "embed",
            "mlp",
            "head",
        ):
            raise ScheduleError(
                f"schedule {name} cuts the model inside a layer, after {stage.pieces[-1]}: only a "
                "helixpipe.model.PipelineModel can be cut there, not a GPTModel of one's own."
            )
        if stage.recompute:
            raise ScheduleError(
                f"stage {number} of schedule {name} is recomputed by the schedule; with a GPTModel of one's own, "
                "its configuration says what is recomputed (recompute_granularity)."
            )
    for unit, activations in sorted(program.activations.items()):
        whole = [run for run, _ in activations.offload] in ([], [program.stages[unit.stage].pieces])
        if activations.recompute or not whole:
            raise ScheduleError(
                f"schedule {name} treats the activations of the unit of {Op('F', *unit)} piece by piece: only those of "
                "a helixpipe.model.PipelineModel can be; of a GPTModel of one's own a unit offloads a share of all."
            )
    for rank, ops in enumerate(program.ranks):
        if not ops:
            raise ScheduleError(f"schedule {name} gives pipeline rank {rank} nothing to run.")
        for stage_number in {op.stage for op in ops}:
            order = [op.microbatch for op in ops if op.kind == "F" and op.stage == stage_number and op.chunk == 0]
            if order != sorted(order):
                raise ScheduleError(
                    f"stage {stage_number} of schedule {name} runs microbatches in the order {order}, but a data "
                    "iterator gives them by number."
                )


def check_chunks(program: Program, rank: int, chunks: Sequence[torch.nn.Module]) -> None:
    """Check that the chunks are the program's stages on this pipeline rank. Raises UserError."""
    stages = stages_of(program, rank)
    if len(chunks) != len(stages):
        raise UserError(
            f"schedule {program.schedule} has {_count(len(stages), 'stage')} on pipeline rank {rank} "
            f"({', '.join(map(str, stages))} of {len(program.stages)}), but model has {_count(len(chunks), 'chunk')}: "
            "build one chunk for each stage."
        )
    last = len(program.stages) - 1
    for index, stage in enumerate(stages):
        model: Any = unwrapped(chunks[index])
        for attribute, expected in (("pre_process", stage == 0), ("post_process", stage == last)):
            if getattr(model, attribute, expected) != expected:
                raise UserError(
                    f"model[{index}] on pipeline rank {rank} is stage {stage} of {len(program.stages)} under schedule "
                    f"{program.schedule}: build it with {attribute}={expected}."
                )
        if getattr(model, "share_embeddings_and_output_weights", False):
            _check_tied(program)


def check_deferral(program: Program, chunks: Sequence[torch.nn.Module], config: TransformerConfig) -> None:
    """Check that weight gradients can be computed apart from the backward if the program does so. Raises UserError."""
    if not any(op.kind == "W" for ops in program.ranks for op in ops):
        return
    if config.enable_autocast:
        raise UserError(f"schedule {program.schedule} puts weight gradients off, which enable_autocast does not allow.")
    for index, chunk in enumerate(chunks):
        layers = getattr(unwrapped(chunk), "decoder", chunk)
        owners = {type(m).__name__: m for m in layers.modules() if _has_matrix(m)}
        if owners and not any(isinstance(m, (ColumnParallelLinear, RowParallelLinear)) for m in owners.values()):
            raise UserError(
                f"schedule {program.schedule} puts weight gradients off, which the layers of model[{index}] "
                f"({', '.join(sorted(owners))}) cannot do: build it with megatron-core's local layers "
                "(get_gpt_layer_local_spec), or choose a schedule without W, such as 1f1b."
            )


def stages_of(program: Program, rank: int) -> list[int]:
    """Return the numbers of the stages that a rank runs, in model order."""
    return sorted({op.stage for op in program.ranks[rank]})


def stages_with_mtp(program: Program, config: TransformerConfig) -> Sequence[Stage]:
    """Return the stage of multi-token prediction and those after it.

    There are none unless megatron-core's layout places it on a rank before the last.
    """
    if not getattr(config, "mtp_standalone", False):
        return ()
    layout = config.pipeline_model_parallel_layout.layout
    here = [LayerType.mtp in stage for turn in zip(*layout, strict=True) for stage in turn]
    return program.stages[here.index(True) :]


def ranks_of_head(program: Program) -> list[int]:
    """Return the ranks that run the head: several, each for some of the microbatches, if it is replicated."""
    last = len(program.stages) - 1
    return [rank for rank, ops in enumerate(program.ranks) if any(op.stage == last for op in ops)]


def _check_tied(program: Program) -> None:
    """Check that tied weights are on the first and the last rank, where megatron-core sums the gradients of both
    copies.
    """
    last = len(program.stages) - 1
    first_rank = next(rank for rank, ops in enumerate(program.ranks) if any(op.stage == 0 for op in ops))
    ends = (first_rank, ranks_of_head(program)[0])
    if last > 0 and (ends != (0, program.num_ranks - 1) or ends[0] == ends[1]):
        raise UserError(
            f"schedule {program.schedule} has the embedding on pipeline rank {ends[0]} and the head on rank {ends[1]}, "
            "but megatron-core ties their weights only over the first and the last rank: build the model with "
            "share_embeddings_and_output_weights=False (--untie-embeddings-and-output-weights)."
        )


def _has_matrix(module: torch.nn.Module) -> bool:
    return any(parameter.dim() == 2 for parameter in module.parameters(recurse=False))


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
