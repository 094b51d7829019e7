"""Divides the layers over the stages of a pipeline: as Megatron-LM's flags say, or so that all ranks have equal work.

A division is the number of layers of each stage, in the order of the model. The first stage, beside the embedding, and
the last, beside the head, may have none; every other has one or more.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from helixpipe.common.errors import UserError
from helixpipe.common.flags import option
from helixpipe.common.ranges import MOST_LAYERS

_TIMES = re.compile(r"(\([^()]*\)|[EtmL|])\*(\d+)")
_GROUP = re.compile(r"\(([^()*]*)\)")
_LONGEST = 100_000
_FLAG = "--pipeline-model-parallel-layout"


@dataclass(frozen=True)
class DivisionOptions:
    """Megatron-LM's three ways to say how many layers each stage has; without any, all have equally many."""

    decoder_first_pipeline_num_layers: int | None = option(
        None,
        "Layers of the first pipeline rank; the others share the rest evenly.",
        at_least=1,
        at_most=MOST_LAYERS,
    )
    decoder_last_pipeline_num_layers: int | None = option(
        None,
        "Layers of the last pipeline rank; the others share the rest evenly.",
        at_least=1,
        at_most=MOST_LAYERS,
    )
    account_for_embedding_in_pipeline_split: bool = option(
        False, "Count the embedding as a layer when layers are divided over stages."
    )
    account_for_loss_in_pipeline_split: bool = option(
        False, "Count output layer and loss as a layer when layers are divided over stages."
    )
    pipeline_model_parallel_layout: str | None = option(
        None,
        "The stages, in the order of the model, as Megatron-LM writes them: E (embedding), t (a layer), m (a further "
        "token) and L (loss), a bar between stages, and *N for N times: Et*3|(tt|)*6L, say.",
        metavar="LAYOUT",
    )

    @property
    def given(self) -> bool:
        """Whether a flag divides the layers."""
        return self != DivisionOptions()

    def stage_layers(self, layers: int, ranks: int, stages: int | None) -> tuple[int, ...] | None:
        """Return the layers of each stage; None: equally many. stages: of each rank; None: 1, or what a layout has.

        Raises UserError, naming the flag, for a division that this model or pipeline cannot have.
        """
        first, last = self.decoder_first_pipeline_num_layers, self.decoder_last_pipeline_num_layers
        counted = self.account_for_embedding_in_pipeline_split, self.account_for_loss_in_pipeline_split
        ends, accounted = (first, last) != (None, None), any(counted)
        layout = self.pipeline_model_parallel_layout
        if sum((ends, accounted, layout is not None)) > 1:
            raise UserError(
                "--decoder-first-pipeline-num-layers and its like, --account-for-embedding-in-pipeline-split and its "
                f"like, and {_FLAG} are three ways to divide the layers; give one."
            )
        if layout is not None:
            return _of_layout(layout, layers, ranks, stages)
        if ends:
            return _of_ends(first, last, layers, ranks, stages or 1)
        return _accounted(layers, ranks * (stages or 1), *counted) if accounted else None


def ways_to_divide(layers: int, ranks: int, stages: int) -> str:
    """Return words on flags that divide layers where stages of equally many do not.

    Args:
        layers: Layers of the model.
        ranks: Pipeline ranks.
        stages: Stages of all ranks together.

    Returns:
        Flags with values that are valid, to follow a sentence; empty if there are too few layers.
    """
    if layers < stages:
        return ""
    layout = layout_of([layers // stages + (stage < layers % stages) for stage in range(stages)])
    found = [f"{_FLAG} '{layout}'"]
    each, most = stages // ranks, -(-layers // stages)
    for of_stage in (most, layers // stages):
        last = layers - (ranks - 1) * of_stage * each
        if 0 < last <= most * each and last % each == 0:
            found.insert(0, f"--decoder-last-pipeline-num-layers {last}")
    return f", or divide them by {' or '.join(found[-2:])}"


def layout_of(division: Sequence[int], further: int = 0) -> str:
    """Return a division in the words of `--pipeline-model-parallel-layout`. further: layers of further tokens."""
    stages = ["t" * count if count < 2 else f"t*{count}" for count in division]
    stages[0] = "E" + stages[0]
    stages[-1] += "m" * further + "L"
    runs = ((stage, len(list(run))) for stage, run in groupby(stages))
    return "".join(_repeated(stage, count) for stage, count in runs).removesuffix("|")


def _repeated(stage: str, count: int) -> str:
    return f"{stage}|" * count if count == 1 or "*" in stage else f"({stage}|)*{count}"


def balanced(
    layer_time: float, ends: tuple[float, float], layers: int, ranks_of_stages: Sequence[int]
) -> tuple[int, ...] | None:
    """Return the division whose busiest rank has least to do, among equals that whose longest stage takes least.

    layer_time: of a layer; ends: of the embedding and of the head, in the same unit. ranks_of_stages: the rank that
    runs each stage. None: there are too few layers. Layers are given out one by one, each to the rank that then has
    least to do, which is best as all take equally long; of equal ranks to the later, which keeps fewer microbatches.
    """
    stages = len(ranks_of_stages)
    counts = [1 if 0 < stage < stages - 1 else 0 for stage in range(stages)]
    if sum(counts) > layers:
        return None
    of_stage = [count * layer_time for count in counts]
    of_stage[0] += ends[0]
    of_stage[-1] += ends[1]
    of_rank = [0.0] * (max(ranks_of_stages) + 1)
    for rank, time in zip(ranks_of_stages, of_stage, strict=True):
        of_rank[rank] += time
    for _ in range(layers - sum(counts)):
        stage = min(range(stages), key=lambda at: (of_rank[ranks_of_stages[at]], of_stage[at], -at))
        counts[stage] += 1
        of_stage[stage] += layer_time
        of_rank[ranks_of_stages[stage]] += layer_time
    return tuple(counts)


def _of_ends(first: int | None, last: int | None, layers: int, ranks: int, stages: int) -> tuple[int, ...]:
    """Return the layers of each stage: the first and last rank's as given, the others equal, each
    shared by its stages.
    """
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


def _accounted(layers: int, stages: int, embedding: bool, loss: bool) -> tuple[int, ...]:
    total = layers + embedding + loss
    if stages < 2 or total % stages:
        raise UserError(
            f"--num-layers {layers} and what else is accounted for, {total} together, must be a multiple of {stages} "
            "stages, at least 2."
        )
    counts = [total // stages] * stages
    counts[0] -= embedding
    counts[-1] -= loss
    return tuple(counts)


def further_tokens_of(layout: str) -> int:
    """Return the number of layers of further tokens (m) in a layout."""
    return "".join(_written_out(layout)).count("m")


def _of_layout(layout: str, layers: int, ranks: int, stages: int | None) -> tuple[int, ...]:
    """Return the layers of each stage of a layout that writes out the stages."""
    written = _written_out(layout)
    if re.fullmatch(r"Et*\|(t+\|)*t*m*L|Et*m*L", "|".join(written)) is None:
        raise UserError(
            f"{_FLAG} {layout} must have E at its start, L at its end, layers of further tokens (m) before L "
            "in its stage, and at least one t in every stage between, nothing else."
        )
    counts = tuple(stage.count("t") for stage in written)
    if sum(counts) != layers:
        raise UserError(f"{_FLAG} {layout} has {sum(counts)} layers (t), but --num-layers is {layers}.")
    if len(counts) % ranks or (stages is not None and len(counts) != ranks * stages):
        needed = f"{ranks * stages}" if stages is not None else f"a multiple of {ranks}"
        raise UserError(
            f"{_FLAG} {layout} has {len(counts)} stages, but --pipeline-model-parallel-size {ranks} needs {needed}."
        )
    return counts


def _written_out(layout: str) -> list[str]:
    """Return the stages with every `*N` expanded, without commas and a bar at the end, as in Megatron-LM."""
    text = re.sub(r"[,\s]", "", layout)
    while (repeated := _TIMES.search(text)) is not None:
        if len(repeated[2]) > 9 or len(text) + len(repeated[1]) * int(repeated[2]) > _LONGEST:
            raise UserError(f"{_FLAG} {layout} has more stages and layers than there can be.")
        text = text[: repeated.start()] + repeated[1].strip("()") * int(repeated[2]) + text[repeated.end() :]
    return _GROUP.sub(r"\1", text).split("|")
