"""The search where a step is documents of all lengths, packed and dealt as training does it.

What is simulated is the whole step of the pipeline that is predicted to take longest; chunks are what the packing
finds.
"""

from __future__ import annotations

from dataclasses import replace

from helixpipe.planning.documents.document_steps import StepPacker, dealt, row_program
from helixpipe.planning.documents.tuning import PackingOptions
from helixpipe.planning.search.bounds import Bounds
from helixpipe.planning.search.figures import Figures, Measured
from helixpipe.planning.search.space import Candidate, ParallelSizes, Question, Saving, Setting
from helixpipe.planning.search.trial import Trial, Trials
from helixpipe.program.program import Program
from helixpipe.program.workload import Extent, Slice, Workload

CHUNK = 8192
"""Tokens of a chunk in estimates of the bubble."""


class DocumentTrials(Trials):
    """Trials of a question with documents."""

    def program(self, candidate: Candidate, microbatches: int | None = None) -> Program:
        question, sizes, setting = self.question, candidate.sizes, candidate.setting
        costs, saving = self.costs(sizes, setting.saving), setting.saving
        shape = self.setup(candidate).shape()
        schedule = question.catalogue[setting.schedule]
        packer = StepPacker(
            shape,
            PackingOptions() if schedule.chunks else PackingOptions(infinipipe_chunks="1"),
            schedule.adapts(setting.options) and saving.recompute is None,
            costs.layout.unit,
            costs.hardware.short_chunk,
        )
        packing = packer.pack(self._longest_hand(sizes), search=False)
        return row_program(
            lambda own: question.catalogue.build(setting.schedule, own, setting.options),
            shape,
            packing.workload,
            costs.layout.unit,
        )

    def whole(self, candidate: Candidate) -> Trial:
        return replace(super().whole(candidate), whole=True)

    def quick(self, candidate: Candidate, slowest: float) -> Trial:
        return self.whole(candidate)

    def ops(self, candidate: Candidate, microbatches: int) -> int:
        return 0  # whatever they are, they are simulated

    def _longest_hand(self, sizes: ParallelSizes) -> list[int]:
        """Return the documents of the pipeline that takes longest."""
        lengths = self.question.documents
        if sizes.data == 1:
            return list(lengths)
        hands, each = dealt(lengths, self.costs(sizes, Saving()), self.question.model.layers, sizes.data)
        slowest = max(hands, key=lambda hand: sum(each[number] for number in hand))
        return [lengths[number] for number in slowest]


class DocumentBounds(Bounds):
    """Time: as if all documents were one chunk, in which weights are read once, evenly over all pipelines and ranks.
    Memory: of weights, gradients and optimizer alone."""

    def _measured(self, sizes: ParallelSizes, saving: Saving) -> Figures:
        extents = tuple(Extent(length, 0) for length in self.question.documents)
        measured = Measured(self.question.costs(sizes, saving), saving, extents=extents).figures
        return replace(measured, kept=0.0, kept_layers=0.0)

    def flops(self, sizes: ParallelSizes) -> float:
        rows = tuple(((Slice(number, 0, length),),) for number, length in enumerate(self.question.documents))
        costs = self.question.costs(sizes)
        whole = Measured(costs, Saving()).whole
        return costs.step_flops(replace(whole, workload=Workload(rows))) / sizes.data

    def share(self, sizes: ParallelSizes) -> float:
        return 1 / sizes.data

    def time(self, sizes: ParallelSizes, setting: Setting) -> float:
        figures = self.figures(sizes, setting.saving)
        return (figures.least_work / sizes.data + figures.after) / sizes.ranks

    def estimate(self, sizes: ParallelSizes, setting: Setting) -> float:
        chunks = max(sum(self.question.documents) / (sizes.data * CHUNK), 1.0)
        return self.time(sizes, setting) * (1 + (sizes.ranks - 1) / chunks)

    def estimated_memory(self, sizes: ParallelSizes, setting: Setting) -> float:
        return self.memory(sizes, setting.saving)

    def memory(self, sizes: ParallelSizes, saving: Saving, setting: Setting | None = None) -> float:
        return super().memory(sizes, saving)


def trials_of(question: Question) -> Trials:
    return DocumentTrials(question) if question.documents else Trials(question)


def bounds_of(question: Question) -> Bounds:
    return DocumentBounds(question) if question.documents else Bounds(question)
