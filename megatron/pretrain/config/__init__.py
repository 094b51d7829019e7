"""The training program's configuration: one frozen dataclass a group of flags, gathered in `Config`."""

from __future__ import annotations

from helixpipe.costs.model_config import ModelConfig
from megatron.pretrain.config.checkpoint import CheckpointConfig
from megatron.pretrain.config.container import Config
from megatron.pretrain.config.data import DataConfig
from megatron.pretrain.config.log import LoggingConfig
from megatron.pretrain.config.parallel import LaunchConfig, ParallelConfig
from megatron.pretrain.config.training import TrainingConfig

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "LaunchConfig",
    "LoggingConfig",
    "ModelConfig",
    "ParallelConfig",
    "TrainingConfig",
]
