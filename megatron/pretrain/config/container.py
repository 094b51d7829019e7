"""The one configuration object that is passed around, and what other parts read from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from helixpipe.costs.model_config import ModelConfig
from helixpipe.planning.division import DivisionOptions
from helixpipe.planning.documents.tuning import PackingOptions
from helixpipe.planning.memory.offload import OffloadOptions
from helixpipe.planning.memory.recompute import RecomputeOptions
from helixpipe.planning.order.chunk_options import ChunkOptions
from helixpipe.planning.vocabulary.choice import VocabularyOptions
from megatron.pretrain.config.adapt import AdaptConfig
from megatron.pretrain.config.checkpoint import CheckpointConfig
from megatron.pretrain.config.data import DataConfig
from megatron.pretrain.config.log import LoggingConfig
from megatron.pretrain.config.parallel import LaunchConfig, ParallelConfig
from megatron.pretrain.config.training import TrainingConfig

GROUPS: Mapping[str, tuple[str, type]] = {
    "model": ("model", ModelConfig),
    "parallel": ("parallelism", ParallelConfig),
    "chunks": ("sequence chunks", ChunkOptions),
    "packing": ("documents in chunks", PackingOptions),
    "division": ("layers of pipeline stages", DivisionOptions),
    "recompute": ("recomputation", RecomputeOptions),
    "offload": ("offloading of activations", OffloadOptions),
    "vocabulary": ("vocabulary over the pipeline", VocabularyOptions),
    "training": ("training", TrainingConfig),
    "data": ("data and tokenizer", DataConfig),
    "checkpoint": ("checkpoints", CheckpointConfig),
    "adapt": ("watching and planning anew", AdaptConfig),
    "logging": ("evaluation and logs", LoggingConfig),
}
"""Field of `Config` -> heading in --help, dataclass of its flags."""


@dataclass(frozen=True)
class Config:
    """Everything a run was asked to do. Immutable; `megatron.pretrain.arguments.parse_args` returns a validated one.

    schedule_options: the chosen schedule's own options dataclass, None for a file.
    warnings: sentences to print once, on rank 0.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    chunks: ChunkOptions = field(default_factory=ChunkOptions)
    packing: PackingOptions = field(default_factory=PackingOptions)
    division: DivisionOptions = field(default_factory=DivisionOptions)
    recompute: RecomputeOptions = field(default_factory=RecomputeOptions)
    offload: OffloadOptions = field(default_factory=OffloadOptions)
    vocabulary: VocabularyOptions = field(default_factory=VocabularyOptions)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    adapt: AdaptConfig = field(default_factory=AdaptConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    schedule_options: Any = None
    warnings: tuple[str, ...] = ()

    @property
    def padded_vocabulary(self) -> int:
        """Rows of the model's embedding, which reading the command line has settled."""
        if self.data.padded_vocab_size is None:
            raise ValueError("the configuration's vocabulary was not settled")
        return self.data.padded_vocab_size

    def replace(self, group: str, **changes: Any) -> Config:
        """Return a copy with fields of one group changed: `config.replace("training", lr=1e-4)`."""
        return dataclasses.replace(self, **{group: dataclasses.replace(getattr(self, group), **changes)})

    def warn(self, sentence: str) -> Config:
        """Return a copy with one more warning."""
        return dataclasses.replace(self, warnings=(*self.warnings, sentence))

    def flat(self) -> dict[str, Any]:
        """Return every value by its Megatron-LM name, as the argument dump prints it and a checkpoint keeps it in
        `args`.
        """
        values: dict[str, Any] = {}
        groups = [getattr(self, name) for name in (*GROUPS, "launch")]
        groups += [self.schedule_options] if dataclasses.is_dataclass(self.schedule_options) else []
        for group in groups:
            for item in dataclasses.fields(group):
                value = getattr(group, item.name)
                values[item.name] = list(value) if isinstance(value, tuple) else value
        return values
