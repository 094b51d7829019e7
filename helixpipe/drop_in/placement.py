"""Lets megatron-core build, number and feed the model's chunks where a schedule places its stages.

megatron-core knows one placement: virtual stage v of pipeline rank r is stage v·p + r. In a V it is another stage (the
head is on the first rank). What megatron-core answers for a virtual stage is asked of the rank and virtual stage where
its own placement has the same stage, so layers are built, numbered and saved as that stage's.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import transformer_block, transformer_layer

from helixpipe.common.errors import UserError
from helixpipe.program.program import Program

StagesOfRank = Callable[[int, int, int], Sequence[int]]
"""Stages of a pipeline rank in model order, from the rank, the number of ranks and of virtual stages a rank."""


def stages_of_rank(placed: Callable[[int, int], Program]) -> StagesOfRank:
    """Return the stages that a schedule places on each rank. placed: its program for p ranks of v virtual stages."""

    def stages(rank: int, ranks: int, virtual: int) -> Sequence[int]:
        program = placed(ranks, virtual)
        here = sorted({op.stage for op in program.ranks[rank]})
        if len(here) != virtual:
            raise UserError(
                f"schedule {program.schedule} has {len(here)} stages a rank; give "
                f"--num-virtual-stages-per-pipeline-rank {len(here)}."
            )
        return here

    return functools.lru_cache(stages)


def install(stages: StagesOfRank) -> None:
    """Put a schedule's placement in place of megatron-core's, in all modules that have imported it or will."""

    def stage_of(vp_stage: int | None, pp_rank: int | None) -> tuple[int, int] | None:
        """Return the number of a virtual stage's stage, and of ranks; None without virtual stages."""
        virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
        if vp_stage is None or virtual is None:
            return None
        ranks = parallel_state.get_pipeline_model_parallel_world_size()
        rank = parallel_state.get_pipeline_model_parallel_rank() if pp_rank is None else pp_rank
        return stages(rank, ranks, virtual)[vp_stage], ranks

    def is_end(original: Callable[..., bool], last: bool) -> Callable[..., bool]:
        def is_pipeline_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
            here = None if ignore_virtual else stage_of(vp_stage, None)
            if here is None:
                return original(ignore_virtual, vp_stage)
            virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
            return here[0] == (here[1] * virtual - 1 if last else 0)

        return is_pipeline_stage

    def of_layers(original: Callable[..., int]) -> Callable[..., int]:
        def layers(config: Any, vp_stage: int | None = None, pp_rank: int | None = None) -> int:
            if (here := stage_of(vp_stage, pp_rank)) is None:
                return original(config, vp_stage, pp_rank)
            stage, ranks = here
            own = stage // ranks, stage % ranks
            rank = parallel_state.get_pipeline_model_parallel_rank() if pp_rank is None else pp_rank
            if config.pipeline_model_parallel_layout is not None and (stage % ranks, stage // ranks) != (
                rank,
                vp_stage,
            ):
                raise UserError(
                    "--pipeline-model-parallel-layout places stages itself; leave it out, or give a schedule with "
                    "that placement, such as interleaved-1f1b."
                )
            return original(config, *own)

        return layers

    def check_alone() -> None:
        """Check that a rank has one stage, where the run has no virtual stages. Raises UserError."""
        ranks = parallel_state.get_pipeline_model_parallel_world_size()
        if ranks > 1 and parallel_state.get_virtual_pipeline_model_parallel_world_size() is None:
            stages(parallel_state.get_pipeline_model_parallel_rank(), ranks, 1)

    first, last = parallel_state.is_pipeline_first_stage, parallel_state.is_pipeline_last_stage
    _replace(first, is_first := is_end(first, last=False))
    _replace(last, is_last := is_end(last, last=True))
    for original in (transformer_layer.get_transformer_layer_offset, transformer_block.get_num_layers_to_build):
        _replace(original, of_layers(original))
    for model in (GPTModel, _model("hybrid.hybrid_model", "HybridModel"), _model("mamba", "MambaModel")):
        if model is not None:
            model.__init__ = _ended(model.__init__, is_first, is_last, check_alone)
    # Releases before 0.17 leave it to the trainer, and a trainer may have its own after that.
    modules = [importlib.import_module(each) for each in ("megatron.core.utils", "megatron.training.utils")]
    name = "get_batch_on_this_tp_rank"

    def has_both_ends() -> bool:
        virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
        ends = [[ask(ignore_virtual=False, vp_stage=each) for each in range(virtual)] for ask in (is_first, is_last)]
        return virtual > 1 and all(map(any, ends))

    for original in {getattr(module, name) for module in modules if hasattr(module, name)}:
        _replace(original, _with_labels(original, has_both_ends))


def _model(module: str, name: str) -> Any:
    """Return a model of megatron-core's, None where the release has none of that name."""
    try:
        return getattr(importlib.import_module(f"megatron.core.models.{module}"), name, None)
    except ImportError:
        return None


def _ended(
    original: Callable[..., None],
    is_first: Callable[..., bool],
    is_last: Callable[..., bool],
    check_alone: Callable[[], None],
) -> Any:
    """Return a model's constructor that has embedding and head where the schedule places the model's ends."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(*arguments: Any, **named: Any) -> None:
        given = signature.bind(*arguments, **named)
        if (vp_stage := given.arguments.get("vp_stage")) is not None:
            for name, ask in (("pre_process", is_first), ("post_process", is_last)):
                given.arguments[name] = ask(ignore_virtual=False, vp_stage=vp_stage)
        else:
            check_alone()
        original(*given.args, **given.kwargs)

    return __init__


def _with_labels(original: Callable[..., Any], has_both_ends: Callable[[], bool]) -> Callable[..., Any]:
    """Return Megatron-LM's distribution of a batch, which keeps all of it on a rank with both ends of the model.

    Of the tokens and the labels it keeps one, but on ranks of multi-token prediction, which need both.
    """

    @functools.wraps(original)
    def get_batch(*arguments: Any, **named: Any) -> Any:
        return original(*arguments, **{**named, "mtp_on_this_rank": True} if has_both_ends() else named)

    return get_batch


def _replace(original: Any, new: Any) -> None:
    """Put a function in place of one of megatron-core's wherever that has been imported."""
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron."):
            for attribute in [each for each, value in vars(module).items() if value is original]:
                setattr(module, attribute, new)
