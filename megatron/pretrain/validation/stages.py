"""Computes the number of layers of each pipeline stage, where Megatron-LM's flags ask for stages that differ."""

from __future__ import annotations

import re

from helixpipe.common.errors import UserError
from megatron.pretrain.config import Config
from megatron.pretrain.validation.wording import checked

_TIMES = re.compile(r"(\([^()]*\)|[EtL|])\*(\d+)")
_GROUP = re.compile(r"\(([^()*]*)\)")
_LONGEST = 100_000
_FLAG = "--pipeline-model-parallel-layout"


def stage_layers(config: Config) -> Config:
    """Set each stage's layers from a layout, from the first and last rank's numbers of layers, or from what counts as
    one.
    """
    parallel = config.parallel
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    counted = parallel.account_for_embedding_in_pipeline_split, parallel.account_for_loss_in_pipeline_split
    ends, accounted = (first, last) != (None, None), any(counted)
    layout = parallel.pipeline_model_parallel_layout
    if sum((ends, accounted, layout is not None)) > 1:
        raise UserError(
            "--decoder-first-pipeline-num-layers and its like, --account-for-embedding-in-pipeline-split and its like, "
            f"and {_FLAG} are three ways to divide the layers; give one."
        )
    if layout is not None:
        return _of_layout(config, layout)
    if ends:
        return config.replace("parallel", stage_layers=_of_ends(config, first, last))
    return config.replace("parallel", stage_layers=_accounted(config, *counted)) if accounted else config


def _of_ends(config: Config, first: int | None, last: int | None) -> tuple[int, ...]:
    """Return the layers of each stage: the first and last rank's as given, the others equal, each
    shared by its stages.
    """
    parallel, layers = config.parallel, checked(config.model.num_layers)
    ranks, stages = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size or 1
    others = ranks - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    flags = " and ".join(
        f"--decoder-{which}-pipeline-num-layers {count}"
        for which, count in (("first", first), ("last", last))
        if count is not None
    )
    if others < 0 or rest < others or (rest % others if others else rest):
        raise UserError(
            f"{flags} leave {rest} of --num-layers {layers} to {max(others, 0)} other pipeline ranks, which must share "
            "them evenly, one or more each."
        )
    of_rank = [rest // others if others else 0] * ranks
    of_rank[0] = first or of_rank[0]
    of_rank[-1] = last or of_rank[-1]
    odd = [count for count in of_rank if count % stages]
    if odd:
        raise UserError(f"{flags}: the {odd[0]} layers of a pipeline rank must be a multiple of its {stages} stages.")
    return tuple(count // stages for _ in range(stages) for count in of_rank)


def _accounted(config: Config, embedding: bool, loss: bool) -> tuple[int, ...]:
    parallel, layers = config.parallel, checked(config.model.num_layers)
    count = parallel.pipeline_model_parallel_size * (parallel.virtual_pipeline_model_parallel_size or 1)
    total = layers + embedding + loss
    if count < 2 or total % count:
        raise UserError(
            f"--num-layers {layers} and what else is accounted for, {total} together, must be a multiple of {count} "
            "stages, at least 2."
        )
    counts = [total // count] * count
    counts[0] -= embedding
    counts[-1] -= loss
    return tuple(counts)


def _of_layout(config: Config, layout: str) -> Config:
    """Set each stage's layers from a layout that writes out the stages. Raises UserError if it does not divide this
    model.
    """
    parallel, layers = config.parallel, checked(config.model.num_layers)
    ranks, given = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    stages = _written_out(layout)
    if re.fullmatch(r"Et*\|(t+\|)*t*L|Et*L", "|".join(stages)) is None:
        raise UserError(
            f"{_FLAG} {layout} must have E at its start, L at its end, and at least one t in every stage between, "
            "nothing else."
        )
    counts = tuple(stage.count("t") for stage in stages)
    if sum(counts) != layers:
        raise UserError(f"{_FLAG} {layout} has {sum(counts)} layers (t), but --num-layers is {layers}.")
    if len(counts) % ranks or (given is not None and len(counts) != ranks * given):
        needed = f"{ranks * given}" if given is not None else f"a multiple of {ranks}"
        raise UserError(
            f"{_FLAG} {layout} has {len(counts)} stages, but --pipeline-model-parallel-size {ranks} needs {needed}."
        )
    virtual = len(counts) // ranks if len(counts) > ranks else given
    return config.replace("parallel", stage_layers=counts, virtual_pipeline_model_parallel_size=virtual)


def _written_out(layout: str) -> list[str]:
    """Return the stages with every `*N` expanded, without commas and a bar at the end, as in Megatron-LM."""
    text = re.sub(r"[,\s]", "", layout)
    while (repeated := _TIMES.search(text)) is not None:
        if len(repeated[2]) > 9 or len(text) + len(repeated[1]) * int(repeated[2]) > _LONGEST:
            raise UserError(f"{_FLAG} {layout} has more stages and layers than there can be.")
        text = text[: repeated.start()] + repeated[1].strip("()") * int(repeated[2]) + text[repeated.end() :]
    return _GROUP.sub(r"\1", text).split("|")
