"""Reports the configuration of a run before its first step: a summary on the terminal, and all values in a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import megatron.core
import torch
import torch.distributed as dist

from helixpipe.common.errors import UserError
from helixpipe.common.files import whole_file
from helixpipe.common.output import complain, say
from helixpipe.costs.layer_patterns import kinds_of_layers, shape_fields
from helixpipe.costs.model_config import ModelConfig
from helixpipe.draw.style import count
from helixpipe.draw.text import stage_count, stage_lines
from helixpipe.model.releases import untested
from helixpipe.program.stages import NO_ROPE, WINDOW
from megatron.pretrain.config import Config

ARGUMENTS_FILE = "arguments.txt"
"""The file in the folder of --save with the values of the last run that wrote there."""

MOST_LINES = 20
"""The most lines of a summary: with those on kernels, arguments and checkpoint a run prints fewer than 25."""


def format_arguments(config: Config) -> str:
    """Return Megatron-LM's dump: a line ` name ....... value` for each value, dots to column 48, sorted by name."""
    lines = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in config.flat().items()]
    head = f"{'-' * 24} arguments {'-' * 24}"
    tail = f"{'-' * 20} end of arguments {'-' * 21}"
    return "\n".join([head, *sorted(lines, key=str.lower), tail])


def print_arguments(config: Config) -> None:
    """Print the warnings (standard error) and, with --log-arguments, all values (standard output), on rank 0."""
    if config.launch.rank == 0:
        for sentence in (*config.warnings, *untested(megatron.core.__version__)):
            complain(f"WARNING: {sentence}")
        if config.logging.log_arguments:
            say(format_arguments(config))
        if (schedule := config.parallel.auto_schedule) is not None:
            say(f" > --pipeline-schedule auto: {schedule}\n   {config.parallel.auto_schedule_why}")


def record_arguments(config: Config) -> None:
    """Write all values beside the checkpoints, if any are saved, on rank 0; warn if that fails."""
    if config.launch.rank != 0 or config.checkpoint.save is None or config.training.skip_train:
        return
    path = Path(config.checkpoint.save) / ARGUMENTS_FILE
    try:
        with whole_file(path) as temporary:
            temporary.write_text(format_arguments(config) + "\n", encoding="utf-8")
    except UserError as error:
        complain(f"WARNING: {error}")
    else:
        if not config.logging.log_arguments:
            say(f" > all arguments: {path} (--log-arguments prints them)")


def spread(count: int, device: torch.device) -> tuple[int, int]:
    """Return the least and the greatest of a number that every rank has. Collective over all ranks."""
    ends = torch.tensor([-count, count], dtype=torch.int64, device=device)
    dist.all_reduce(ends, op=dist.ReduceOp.MAX)
    return -int(ends[0]), int(ends[1])


def summary(config: Config, pipeline: Any, num_microbatches: int, parameters: int, ends: tuple[int, int]) -> str:
    """Return the summary of the run that starts: model, step, ranks, and the plan of a step.

    pipeline: this rank's `Pipeline`. num_microbatches: of a full step. parameters: of the whole model. ends: the fewest
    and the most parameters on a rank.
    """
    program = pipeline.program(num_microbatches)
    lines = [model_line(config, parameters), step_line(config, num_microbatches), ranks_line(config, ends)]
    if config.data.variable_seq_lengths:
        each = f"{config.parallel.plan_ahead} steps of documents planned ahead, {stage_count(program.stages)}"
    else:
        each = (
            f"{num_microbatches} microbatches a step, {stage_count(program.stages)}; simulated bubble "
            f"{pipeline.bubble(num_microbatches)}"
        )
    lines += [f"pipeline schedule {program.schedule}: {program.num_ranks} ranks, {each}", *stage_lines(program.stages)]
    slices = config.model.loss_chunk_size
    if slices and config.model.loss_slices_why:
        lines.append(f"--loss-chunk-size {slices}: {config.model.loss_slices_why}")
    lines += [*pipeline.memory(), *pipeline.chunks(num_microbatches), *pipeline.offloading(num_microbatches)]
    return "\n".join(f" > {line}" for line in first_of(lines))


def first_of(lines: Sequence[str]) -> list[str]:
    """Return the lines, or as many as fit and the number of those left out."""
    if len(lines) <= MOST_LINES:
        return list(lines)
    return [*lines[: MOST_LINES - 1], f"({len(lines) - MOST_LINES + 1} lines more, of `helixpipe simulate`)"]


def model_line(config: Config, parameters: int) -> str:
    """Return `model: 824,448 parameters; 4 layers of width 128, 8 heads in 2 groups, ...`."""
    model: ModelConfig = config.model
    groups = f" in {model.num_query_groups} groups" if model.group_query_attention else ""
    groups += f" with latents of {model.kv_lora_rank}" if model.multi_latent_attention else ""
    gate = "gated " if model.swiglu else ""
    return (
        f"model: {parameters:,} parameters; {model.num_layers} layers of width {model.hidden_size}, "
        f"{gate}MLP {model.ffn_hidden_size}, {model.num_attention_heads} heads{groups}, {model.normalization}, "
        f"positions {model.position_embedding_type}, vocabulary {config.data.padded_vocab_size:,}"
        f"{_unlike_layers(model)}"
    )


def _unlike_layers(model: ModelConfig) -> str:
    """Return `, windows of 512 tokens in 3 layers, no RoPE in 1`."""
    shape = shape_fields(model.window_size, model.window_attn_skip_freq, model.no_rope_freq)
    kinds = Counter(chain(*kinds_of_layers(model.num_layers or 0, shape["windowed"], shape["unrotated"])))
    windows = f", windows of {shape['window']} tokens in {count(kinds[WINDOW], 'layer')}" if kinds[WINDOW] else ""
    windows += ", gated attention" * model.attention_output_gate
    windows += f", {model.softmax_type} softmax" if model.softmax_type != "vanilla" else ""
    if model.num_experts is not None:
        windows += (
            f", {model.num_experts} experts of width {model.moe_ffn_hidden_size}, {model.moe_router_topk} a token"
        )
    if model.mtp_num_layers:
        windows += f", {count(model.mtp_num_layers, 'further token')} predicted"
    return windows + (f", no RoPE in {count(kinds[NO_ROPE], 'layer')}" if kinds[NO_ROPE] else "")


def step_line(config: Config, num_microbatches: int) -> str:
    """Return `step: 32 sequences of 256 tokens, 8 microbatches of 4 on each of 1 data-parallel ranks`."""
    training, data, ranks = config.training, config.data, config.parallel.data_parallel_size
    shared = f" on each of {ranks} data-parallel ranks" if ranks > 1 else ""
    if data.variable_seq_lengths:
        size = f"{data.max_tokens:,} tokens of" if data.max_tokens is not None else f"{training.global_batch_size}"
        return f"step: {size} documents of at most {config.model.seq_length:,} tokens, dealt{shared or ' whole'}"
    return (
        f"step: {training.global_batch_size} sequences of {config.model.seq_length:,} tokens, "
        f"{num_microbatches} microbatches of {training.micro_batch_size}{shared}"
    )


def ranks_line(config: Config, ends: tuple[int, int]) -> str:
    """Return `ranks: tensor 1 x pipeline 2 x data 1, 412,288 to 477,824 parameters each`."""
    parallel = config.parallel
    context = f"context {parallel.context_parallel_size} x " if parallel.context_parallel_size > 1 else ""
    each = f"{ends[0]:,} parameters" if ends[0] == ends[1] else f"{ends[0]:,} to {ends[1]:,} parameters"
    return (
        f"ranks: tensor {parallel.tensor_model_parallel_size} x {context}"
        f"pipeline {parallel.pipeline_model_parallel_size} x data {parallel.data_parallel_size}, {each} each"
    )
