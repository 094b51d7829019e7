"""The ranks of a model's groups are those it is given: no part of it may take megatron-core's own in silence."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from megatron.core import parallel_state

from helixpipe.common.errors import UserError
from helixpipe.model import PipelineModel
from helixpipe.program.stages import Piece
from tests.distributed import run_ranks
from tests.model.common import CHAIN, make_batch, make_config, make_options, run_parts, score, set_parallel


def build(rank: int, world_size: int) -> None:
    """Refused whatever the rank holds: the loss, on whichever rank it is, sums over megatron-core's own group."""
    set_parallel(tp=2)
    own, alone = dist.new_group([0, 1]), [dist.new_group([each]) for each in range(world_size)]
    config, options = make_config("llama", tp=2), make_options("llama", tied=False)
    for kind in ("embed", "norm", "qkv", "attn", "proj", "mlp", "head"):
        piece = Piece(kind) if kind in ("embed", "head") else Piece(kind, 0)
        PipelineModel(config, options, (piece,), SimpleNamespace(tp=own, cp=None))
        with pytest.raises(UserError, match=r"pg_collection\.tp must have the ranks"):
            PipelineModel(config, options, (piece,), SimpleNamespace(tp=alone[rank], cp=None))


def test_a_tensor_parallel_group_of_other_ranks_is_refused() -> None:
    run_ranks(build, 2)


def collectives(rank: int, world_size: int) -> dict[str, tuple[int, int]]:
    """How many collectives a forward and backward without loss makes in the group that the model was given, and in
    megatron-core's, which has the same ranks."""
    set_parallel(tp=2)
    found = {}
    for sequence_parallel in (False, True):
        for style in ("gpt", "llama"):
            own, cores = dist.new_group([0, 1]), parallel_state.get_tensor_model_parallel_group()
            config = make_config(style, tp=2, sequence_parallel=sequence_parallel, qk_layernorm=style == "llama")
            options = replace(make_options(style, tied=True), chunk_size=6)
            model = PipelineModel(config, options, CHAIN, SimpleNamespace(tp=own, cp=None))
            model.weight_gradients()  # linear layers that can put off their weight gradients
            before = [group._get_sequence_number_for_group() for group in (own, cores)]
            run_parts([(model, CHAIN)], make_batch(), score)
            after = [group._get_sequence_number_for_group() for group in (own, cores)]
            found[f"{style}, sequence_parallel={sequence_parallel}"] = (after[0] - before[0], after[1] - before[1])
    return found


def test_every_part_communicates_in_the_group_that_the_model_was_given() -> None:
    for found in run_ranks(collectives, 2):
        assert all(given >= 8 and cores == 0 for given, cores in found.values()), found
