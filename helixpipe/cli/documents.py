"""A step of documents of all lengths (`--lengths`) for the programs of the `helixpipe` command."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from helixpipe.cli.model import ModelOnCluster, ModelOptions
from helixpipe.cli.options import ShapeOptions
from helixpipe.common.errors import UserError
from helixpipe.common.flags import dataclass_from_namespace, option
from helixpipe.draw.style import count
from helixpipe.planning.catalogue import Schedule, Shape
from helixpipe.planning.documents.baselines import concatenated, packed_whole, padded
from helixpipe.planning.documents.chunk_times import ChunkTimes
from helixpipe.planning.documents.document_steps import StepPacker, dealt
from helixpipe.planning.documents.filling import aligned
from helixpipe.planning.documents.lengths import DocumentLengths, LengthOptions, documents_of
from helixpipe.planning.documents.packing import Packing, spread
from helixpipe.planning.documents.tuning import PackingOptions
from helixpipe.planning.order.chunk_options import ChunkOptions
from helixpipe.program.program import Program
from helixpipe.program.workload import Workload
from helixpipe.simulate.simulator import Simulation


@dataclass(frozen=True)
class BatchOptions:
    """Options of how documents of all lengths become a batch."""

    document_packing: Literal["infinipipe", "pad", "whole", "concatenate", "isolate"] = option(
        "infinipipe",
        "What --lengths become. infinipipe: long ones cut, short ones packed; for comparison, rows of one chunk, as "
        "long as the longest document: pad: one each, filled up; whole: best-fit packing; concatenate: one after "
        "another and cut; isolate: so, and no document sees another.",
    )


@dataclass(frozen=True)
class DocumentBatch:
    """A batch of documents. documents: of a step. lengths: of those of the pipeline that is predicted to take longest,
    which is simulated. times: what each pipeline is predicted to take, relative to the mean.
    """

    documents: DocumentLengths
    lengths: tuple[int, ...]
    times: tuple[float, ...] = (1.0,)

    @property
    def longest(self) -> int:
        return max(self.documents.lengths)


def check_flags(namespace: argparse.Namespace) -> DocumentLengths | None:
    """Return the documents that the flags ask for. Raises UserError for flags that apply to equal sequences only, and
    for flags that need --lengths.
    """
    documents = documents_of(dataclass_from_namespace(LengthOptions, namespace))
    if documents is None:
        for cls in (PackingOptions, BatchOptions):
            for name, value in vars(dataclass_from_namespace(cls, namespace)).items():
                if value != getattr(cls, name):
                    raise UserError(f"--{name.replace('_', '-')} needs --lengths, which says how long documents are.")
        return None
    given = {
        "--microbatches": namespace.microbatches,
        "--chunks": namespace.chunks,
        "--seq-length": namespace.seq_length,
        "--micro-batch-size": namespace.micro_batch_size,
        "--global-batch-size": namespace.global_batch_size,
    }
    chunk_options = vars(dataclass_from_namespace(ChunkOptions, namespace))
    given |= {f"--{name.replace('_', '-')}": chunk_options[name] for name in chunk_options if name != "chunk_alignment"}
    instead = {"--seq-length": "--max-length", "--global-batch-size": "--documents"}
    for flag, value in given.items():
        if value is not None:
            use = instead.get(flag, "--infinipipe-chunks")
            raise UserError(f"{flag} {value} is for sequences that are all alike; with --lengths give {use}.")
    return documents


def model_options(options: ModelOptions, documents: DocumentLengths | None) -> ModelOptions:
    """Return the options with sequences as long as the longest document. Rows of documents run in no graphs."""
    if documents is None or not options.named:
        return options
    unit = 2 * (options.tensor_parallel or 1) * (options.context_parallel or 1)  # whatever way they share
    return replace(options, seq_length=aligned(max(documents.lengths), unit), cuda_graphs="off")


def batch_of(documents: DocumentLengths, plan: ModelOnCluster | None) -> DocumentBatch:
    """Deal the documents over the plan's pipelines."""
    if plan is None or plan.costs.data_parallel == 1:
        return DocumentBatch(documents, documents.lengths)
    hands, each = dealt(documents.lengths, plan.costs, plan.layers, plan.costs.data_parallel)
    sums = [sum(each[document] for document in hand) for hand in hands]
    slowest = hands[sums.index(max(sums))]
    mean = sum(sums) / len(sums)
    lengths = tuple(documents.lengths[document] for document in slowest)
    return DocumentBatch(documents, lengths, tuple(one / mean for one in sums))


@dataclass(frozen=True)
class Packer:
    """Makes the workloads of schedules from a batch."""

    batch: DocumentBatch
    packing: PackingOptions
    rows: BatchOptions
    alignment: int
    least: int

    def program(self, schedule: Schedule, shape: Shape, build: Callable[[Workload], Program]) -> Program:
        """Return the schedule's program of the batch. shape: its workload is replaced."""
        adapts = schedule.adapts(schedule.options()) and shape.recompute.granularity is None
        packer = StepPacker(shape, self.packing, adapts, self.alignment, self.least)
        fixed = self._fixed(packer.times(self.batch.lengths))
        return build((fixed or packer.pack(self.batch.lengths)).workload)

    def _fixed(self, times: ChunkTimes) -> Packing | None:
        """Return the packing if there is nothing to tune; else None."""
        lengths, how, longest = self.batch.lengths, self.rows.document_packing, self.batch.longest
        if how == "pad":
            return padded(lengths, times, aligned(longest, self.alignment))
        if how == "whole":
            return packed_whole(lengths, times, longest, self.alignment)
        if how == "infinipipe":
            return None
        return concatenated(lengths, times, aligned(longest, self.alignment), how == "isolate")


def packer_of(namespace: argparse.Namespace, plan: ModelOnCluster | None) -> Packer | None:
    """Return the packer that the flags ask for; None without --lengths."""
    documents = check_flags(namespace)
    if documents is None:
        return None
    size = dataclass_from_namespace(ShapeOptions, namespace)
    if size.virtual_stages is not None:
        raise UserError(f"--virtual-stages {size.virtual_stages} cannot be given beside --lengths.")
    unit = plan.costs.layout.unit if plan is not None else 1
    alignment = unit if namespace.chunk_alignment is None else namespace.chunk_alignment
    if alignment < 1 or alignment % unit:
        raise UserError(
            f"--chunk-alignment {alignment} must be a multiple of {unit}, which tensor- and context-parallel ranks can "
            "share."
        )
    least = plan.costs.hardware.short_chunk if plan is not None else 1
    packing = dataclass_from_namespace(PackingOptions, namespace)
    rows = dataclass_from_namespace(BatchOptions, namespace)
    return Packer(batch_of(documents, plan), packing, rows, alignment, least)


@dataclass(frozen=True)
class BatchReport:
    """The report on a batch of documents in a simulated step. Times and tokens are those of chunks, over all stages."""

    batch: DocumentBatch
    simulation: Simulation

    @property
    def chunk_times(self) -> list[float]:
        """Forward and backward, and what is recomputed, of every chunk."""
        times: dict[tuple[int, int], float] = {}
        for event in self.simulation.timeline.ops:
            unit = event.op.microbatch, event.op.chunk
            times[unit] = times.get(unit, 0.0) + event.end - event.start
        return list(times.values())

    def to_json(self) -> dict[str, Any]:
        workload, batch = self.simulation.lowered.program.workload, self.batch
        tokens = [each for row in range(len(workload)) for each in workload.tokens(row)]
        return {
            "source": batch.documents.source,
            "documents": len(batch.documents.lengths),
            "tokens": batch.documents.tokens,
            "longest": batch.longest,
            "left_out": batch.documents.left_out,
            "pipelines": list(batch.times),
            "documents_of_pipeline": len(batch.lengths),
            "tokens_of_pipeline": sum(batch.lengths),
            "padding_or_cut": sum(tokens) - sum(batch.lengths),
            "rows": len(workload),
            "chunks": len(tokens),
            "most_chunks": workload.most_chunks,
            "chunk_tokens": [min(tokens), max(tokens)],
            "spread_of_time": spread(self.chunk_times),
            "spread_of_tokens": spread(tokens),
        }

    def text(self) -> str:
        """Three lines or four."""
        figures = self.to_json()
        padding = figures["padding_or_cut"] / sum(self.batch.lengths)
        left = f"; {figures['left_out']} left out" if figures["left_out"] else ""
        lines = [
            f"{count(figures['documents'], 'document')} from {figures['source']}, {figures['tokens']} tokens, "
            f"the longest {figures['longest']}{left}",
            f"{count(figures['chunks'], 'chunk')} in {count(figures['rows'], 'microbatch', 'microbatches')}, up to "
            f"{figures['most_chunks']} in one, of {figures['chunk_tokens'][0]} to {figures['chunk_tokens'][1]} tokens, "
            f"{100 * padding:.1f} % of them padding",
            f"spread (standard deviation over mean of all chunks): time {100 * figures['spread_of_time']:.1f} %, "
            f"tokens {100 * figures['spread_of_tokens']:.1f} %",
        ]
        if len(self.batch.times) > 1:
            lines.insert(
                1,
                f"{len(self.batch.times)} pipelines, predicted to take {100 * min(self.batch.times):.2f} to "
                f"{100 * max(self.batch.times):.2f} % of their mean; simulated is the longest, with "
                f"{len(self.batch.lengths)} documents and {sum(self.batch.lengths)} tokens",
            )
        return "\n".join(lines)
