"""The training program's configuration: one frozen dataclass a group of flags, gathered in `Config`."""

from __future__ import annotations

from megatron.training.config.checkpoint import CheckpointConfig
from megatron.training.config.container import Config
from megatron.training.config.data import DataConfig
from megatron.training.config.log import LoggingConfig
from megatron.training.config.model import ModelConfig
from megatron.training.config.parallel import LaunchConfig, ParallelConfig
from megatron.training.config.training import TrainingConfig

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
