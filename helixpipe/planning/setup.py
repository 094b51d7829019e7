"""Defines what a schedule is given in every step: the pipeline, the model's costs and the memory there is."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf

from helixpipe.planning.catalogue import Shape
from helixpipe.planning.memory.offload import OffloadOptions
from helixpipe.planning.memory.recompute import RecomputeOptions
from helixpipe.planning.memory.recompute_choice import ChoiceTables
from helixpipe.planning.vocabulary.choice import VocabularyOptions
from helixpipe.program.costs import Costs
from helixpipe.program.workload import Workload


@dataclass(frozen=True)
class Setup:
    """A model on a pipeline. The fields are those of `Shape` of the same names; `shape` adds what differs from step to
    step. The command, the planner's search and training each make one from their flags, and nothing of it again."""

    ranks: int
    layers: int
    costs: Costs
    virtual_stages: int | None = None
    recompute: RecomputeOptions = field(default_factory=RecomputeOptions)
    memory_limit: float | None = None
    offload: OffloadOptions = field(default_factory=OffloadOptions)
    host_limit: float = inf
    sharded: int = 1
    gathered_once: bool = False
    stage_layers: tuple[int, ...] | None = None
    vocabulary: VocabularyOptions = field(default_factory=VocabularyOptions)
    tables: ChoiceTables = field(default_factory=ChoiceTables, compare=False, repr=False)

    def shape(
        self,
        microbatches: int = 1,
        chunks: int = 1,
        chunk_lengths: tuple[int, ...] | None = None,
        ragged: Workload | None = None,
    ) -> Shape:
        """Return the shape of a step of `microbatches` microbatches, cut into chunks. Raises ScheduleError for what is
        below 1.
        """
        return Shape(microbatches=microbatches, chunks=chunks, chunk_lengths=chunk_lengths, ragged=ragged, **vars(self))

    def of(self, ranks: int, layers: int, virtual_stages: int | None) -> Setup:
        """Return the setup of the same model on another pipeline."""
        return replace(self, ranks=ranks, layers=layers, virtual_stages=virtual_stages)
