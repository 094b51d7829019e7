"""The loss sums over megatron-core's own tensor-parallel group: another must not be taken in silence."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from helixpipe.common.errors import UserError
from helixpipe.model import PipelineModel
from helixpipe.program.stages import Piece
from tests.distributed import run_ranks
from tests.model.common import make_config, make_options, set_parallel


def build(rank: int, world_size: int) -> None:
    set_parallel(tp=2)
    own, alone = dist.new_group([0, 1]), [dist.new_group([each]) for each in range(world_size)]
    config, options = make_config("llama", tp=2), make_options("llama", tied=False)
    PipelineModel(config, options, (Piece("head"),), SimpleNamespace(tp=own, cp=None))
    with pytest.raises(UserError, match=r"pg_collection\.tp must have the ranks"):
        PipelineModel(config, options, (Piece("head"),), SimpleNamespace(tp=alone[rank], cp=None))


def test_a_tensor_parallel_group_of_other_ranks_is_refused() -> None:
    run_ranks(build, 2)
