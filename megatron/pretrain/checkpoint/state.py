"""Collects this rank's part of the state that a checkpoint holds."""

from __future__ import annotations

import random
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from helixpipe.model.latent import local_name
from megatron.pretrain.checkpoint import tensors
from megatron.pretrain.checkpoint.optimizer import SHARDING


@dataclass
class TrainingProgress:
    """The progress of training: iterations, samples and floating-point operations.

    index_samples: the samples of train, validation and test for which the order of samples was made
    (`data.datasets.index_counts`), with an entry for each run that needed more than those before it.
    """

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_train_samples: int = 0
    num_floating_point_operations_so_far: float = 0.0
    index_samples: tuple[tuple[int, int, int], ...] = ()


def sharding(groups: ProcessGroupCollection) -> dict[str, Any]:
    """Return the `metadata` argument of megatron-core's `sharded_state_dict` methods."""
    return {**SHARDING, "dp_cp_group": groups.dp_cp}


def model_state(
    model: Any, groups: ProcessGroupCollection, saved: Container[str] = (), local_names: bool = False
) -> dict[str, Any]:
    """Return the sharded state of a model.

    Args:
        model: A PipelineModel or its wrapper.
        groups: Its process groups.
        saved: The names in a checkpoint that is to be read.
        local_names: Whether it is to be saved under the names that megatron-core's local layers have; else tensors have
            these names only where `saved` has them and not the others.
    """
    model = tensors.unwrap(model)
    state: dict[str, Any] = model.sharded_state_dict(metadata=sharding(groups))
    for tensor in nested_values(state):
        name = local_name(tensor.key, model.config.multi_latent_attention)
        if local_names or (tensor.key not in saved and name in saved):
            tensor.key = name
    return state


def rng_state(groups: ProcessGroupCollection) -> ShardedObject:
    """Return the generators of this rank, one entry for each tensor- and pipeline-parallel rank, as in Megatron-LM."""
    tp, pp = groups.tp, groups.pp
    grid, place = (pp.size(), tp.size()), (pp.rank(), tp.rank())
    return ShardedObject("rng_state", [generators()], grid, place, replica_id=groups.dp_cp.rank())


def generators() -> dict[str, Any]:
    """Return the states of this rank's random generators, which `tensors.set_rng_state` takes."""
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": get_cuda_rng_tracker().get_states(),
    }
