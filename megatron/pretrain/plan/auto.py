"""`--pipeline-schedule auto`: the search of `helixpipe plan` with the sizes that are given.

All ranks search for themselves and find the same, as a search depends on nothing but the flags. What it has chosen is
a list of flags, as if they had been given, and a checkpoint keeps them (`auto_schedule` of its arguments).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from helixpipe.common.errors import UserError
from helixpipe.costs.hardware import GIB
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.planning.search.explore import Search
from helixpipe.planning.search.figures import FigureTable
from helixpipe.planning.search.flags import setting_flags
from helixpipe.planning.search.outcome import TriedCandidate
from helixpipe.planning.search.space import FixedChoices, Question
from helixpipe.planning.search.terms import compared, terms_of
from helixpipe.planning.search.trial import Trials
from helixpipe.planning.search.workers import SerialCrew
from megatron.pretrain.config import Config
from megatron.pretrain.plan.costs import memory_limit, training_costs
from schedules import CATALOGUE

AUTO = "auto"

OPS = 40_000
"""The ops that the search simulates: some seconds of one core."""

FOUND = (
    "chunk_lengths",
    "pipe_sp_strategy",
    "chunk_alignment",
    "offload_activations",
    "recompute_activations",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "num_layers_per_virtual_pipeline_stage",
)
"""Flags about what the search finds, which it does not take as given."""

KEPT = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "pipeline_model_parallel_size",
    "data_parallel_size",
    "global_batch_size",
    "micro_batch_size",
    "seq_length",
    "num_layers",
)
"""Values with which a checkpoint's choice goes on."""


class Chosen(NamedTuple):
    """The chosen flags. words: the flags as words. why: a sentence or two."""

    words: tuple[str, ...]
    why: str


def stand_in(config: Config) -> Config:
    """Return the configuration with a schedule that takes the given flags, so that all others can be checked."""
    if config.data.variable_seq_lengths:
        raise UserError(
            "--pipeline-schedule auto is for sequences that are all alike; for documents of all lengths give "
            "infinipipe."
        )
    virtual = config.parallel.num_virtual_stages_per_pipeline_rank is not None
    chunked = CATALOGUE.default(virtual_stages=virtual, chunks=True) if config.chunks.cutting_flag() else None
    return config.replace("parallel", pipeline_schedule=chunked)


def search(config: Config, given: Mapping[str, str]) -> Chosen:
    """Find a schedule. config: validated, of `stand_in`. given: the flags that were given, by the name of their field.

    Raises UserError where flags contradict the search, where it is not known what a GPU has, and where nothing fits.
    """
    own = {name for schedule in CATALOGUE.values() for name in schedule.options.__dataclass_fields__}
    for name in (*FOUND, *sorted(own)):
        if name in given:
            raise UserError(f"{given[name]} says what --pipeline-schedule auto finds; leave one of them out.")
    question = _question(config, given)
    crew = SerialCrew(question)
    outcome = Search(question, crew, 2, ops=OPS).run()
    if outcome.interrupted:
        raise KeyboardInterrupt
    if not outcome.best:
        raise UserError(_nothing(question, outcome.least))
    best = outcome.best[0]
    setting = best.candidate.setting
    division = FigureTable(question).division(best.candidate.sizes, setting)
    flags = setting_flags(CATALOGUE[setting.schedule], setting, division)
    return Chosen(tuple(shlex.split(" ".join(flags))), _why(question, outcome.best))


def kept(config: Config, saved: Mapping[str, Any] | None) -> Chosen | None:
    """Return the flags that the checkpoint's run had chosen; None if there are none, if flags ask for a new search, or
    if sizes on which the choice depends have changed.
    """
    words = (saved or {}).get("auto_schedule")
    if saved is None or not words or config.parallel.search_schedule_anew:
        return None
    now = config.flat()
    if any(saved.get(name) != now.get(name) for name in KEPT):
        return None
    return Chosen(tuple(words.split()), "kept from the checkpoint (--search-schedule-anew searches again)")


def _question(config: Config, given: Mapping[str, str]) -> Question:
    parallel, costs = config.parallel, training_costs(config)
    if parallel.hardware is None or not isinstance(costs, ModelCosts):
        raise UserError(
            "--pipeline-schedule auto needs --hardware, whose costs and memory it plans with, and no --cost-profile."
        )
    if parallel.stage_layers is not None:
        raise UserError(
            "--pipeline-schedule auto plans with equally many layers in each stage; leave the flags out that divide "
            "them otherwise."
        )
    limit = memory_limit(config)
    assert limit is not None  # that of the hardware
    chunks = config.chunks.count()
    return Question(
        CATALOGUE,
        tuple(CATALOGUE),
        costs.model,
        costs.hardware,
        config.launch.world_size,
        config.training.global_batch_size or 1,
        replace(costs.layout, mlp_chunk=0, loss_chunk=0),
        limit,
        costs.distributed_optimizer,
        costs.adam_on_host,
        FixedChoices(
            parallel.tensor_model_parallel_size,
            parallel.context_parallel_size,
            parallel.pipeline_model_parallel_size,
            parallel.cp_comm_type[0],
            parallel.shards_weights,
            parallel.gathered_once,
            chunks if "pipe_sp_splits" in given and not config.chunks.auto else None,
            parallel.num_virtual_stages_per_pipeline_rank,
            config.model.chunk_size if "chunk_size" in given else None,
            config.model.loss_chunk_size,
            config.recompute.granularity,
        ),
        fp32_kv_gradients=costs.fp32_kv_gradients,
        vocabulary=config.vocabulary,
    )


def _why(question: Question, best: Sequence[TriedCandidate]) -> str:
    first = best[0]
    told = f"{first.trial.step:.4g} s a step on paper, {first.trial.peak / GIB:.1f} GiB of the fullest GPU"
    if len(best) == 1:
        return f"{told}; no other schedule fits"
    second, trials = best[1], Trials(question)
    difference = compared(terms_of(trials, first.candidate), terms_of(trials, second.candidate))
    name, seconds = max(difference.terms, key=lambda term: term[1])
    longer = 100 * (second.trial.step / first.trial.step - 1)
    other = second.candidate.setting.schedule
    return f"{told}; {other} takes {longer:.2g} % longer (most of it: {name}, {seconds:+.3g} s)"


def _nothing(question: Question, least: TriedCandidate | None) -> str:
    sizes = question.given
    shown = f"--tensor-model-parallel-size {sizes.tensor} and --pipeline-model-parallel-size {sizes.ranks}"
    if least is None:
        return f"--pipeline-schedule auto: no schedule takes {shown} with this model and batch in the memory there is."
    return (
        f"--pipeline-schedule auto: with {shown} nothing fits into {question.limit / GIB:.1f} GiB a GPU; the least "
        f"that was found needs {least.trial.peak / GIB:.1f}."
    )
