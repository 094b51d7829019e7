"""Computes the number of layers of each pipeline stage, where Megatron-LM's flags ask for stages that differ."""

from __future__ import annotations

from megatron.pretrain.config import Config
from megatron.pretrain.validation.wording import checked


def stage_layers(config: Config) -> Config:
    """Set each stage's layers from the flags that divide them; a layout says, too, how many stages a rank has."""
    parallel, layers = config.parallel, checked(config.model.num_layers)
    ranks, stages = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    counts = config.division.stage_layers(layers, ranks, stages)
    if counts is None:
        return config
    stages = len(counts) // ranks if len(counts) > ranks else stages
    return config.replace("parallel", stage_layers=counts, virtual_pipeline_model_parallel_size=stages)
