"""Turns the flags about chunks into the workload of the `helixpipe` command's programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from helixpipe.cli.model import ModelOnCluster
from helixpipe.cli.model_report import report
from helixpipe.common.errors import ScheduleError
from helixpipe.costs.models import Layout
from helixpipe.costs.profile_costs import ProfileCosts
from helixpipe.planning.order.chunk_lengths import best_chunks, chunk_counts, short_chunks
from helixpipe.planning.order.chunk_options import NOMINAL_LENGTH, ChunkOptions
from helixpipe.program.costs import Costs
from helixpipe.program.program import Program
from helixpipe.program.workload import Workload, uniform
from helixpipe.simulate.simulator import Simulation

Lengths = tuple[int, ...] | None


@dataclass(frozen=True)
class Chunking:
    """The flags with the costs they are resolved on; plan: of --model, else None."""

    options: ChunkOptions
    costs: Costs
    plan: ModelOnCluster | None

    def _sequence(self) -> tuple[int | None, Layout]:
        """Return the sequence's length in tokens, None if times are given by hand, and its layout."""
        if isinstance(self.costs, ProfileCosts):
            return self.costs.profile.seq_length, self.costs.profile.layout
        if self.plan is not None:
            return self.plan.costs.seq_length, self.plan.costs.layout
        return None, Layout()

    def lengths(self, chunks: int, layers: int) -> Lengths:
        """Return the tokens of each of `chunks` chunks; only their proportions count if no sequence length is known."""
        seq_length, layout = self._sequence()
        return self.options.resolve(chunks, self.costs, layers, seq_length, layout.tensor_parallel, layout.unit)

    def workload(self, microbatches: int, chunks: int, layers: int) -> Workload:
        """Return the workload of so many microbatches, each cut alike, as a file that leaves it open is given it."""
        return self._in_unit(uniform(microbatches, chunks, self.lengths(chunks, layers)))

    def _in_unit(self, workload: Workload) -> Workload:
        """Return a workload with its chunk lengths as proportions if nothing says how long a sequence is."""
        if self._sequence()[0] is not None or self.options.lengths is not None or workload.proportional:
            return workload
        return workload.in_proportions()

    def of_file(self, name: str, program: Program) -> Program:
        """Return a file's program with the chunk lengths of the flags, which a CSV file never says and a JSON file may.
        Raises ScheduleError if flags and file differ, ProgramError if it does not fit the sequence.
        """
        workload, flags = program.workload, self.options
        if workload == uniform(len(workload), program.num_chunks):
            workload = self.workload(len(workload), program.num_chunks, program.num_layers)
            return dataclasses.replace(program, workload=workload)
        other_lengths = flags.chunk_lengths if flags.lengths != program.chunk_lengths else None
        for flag, given in (
            ("--chunk-lengths", other_lengths),
            ("--pipe-sp-strategy", flags.pipe_sp_strategy),
            ("--chunk-alignment", flags.chunk_alignment),
        ):
            if given is not None:
                raise ScheduleError(f"{flag} {given} does not fit {name}, which says itself how long its chunks are.")
        if (seq_length := self._sequence()[0]) is not None:
            workload.of_sequences(seq_length)  # refuses lengths that do not add up to it
        return program

    def program(self, make: Callable[[int, Lengths], Program], chunks: int | None, layers: int) -> Program:
        """Return the program of `chunks` chunks; None: of the best number of them."""

        def cut(count: int) -> Program:
            program = make(count, self.lengths(count, layers))
            return dataclasses.replace(program, workload=self._in_unit(program.workload))

        if chunks is not None:
            return cut(chunks)
        plan, (seq_length, layout) = self.plan, self._sequence()
        hardware = None if plan is None else plan.costs.hardware
        counts = chunk_counts(seq_length or NOMINAL_LENGTH, layout.micro_batch_size, hardware, layout.unit)

        def fits(simulation: Simulation) -> bool:
            return plan is None or report(simulation, plan).fits

        return best_chunks(cut, self.costs if plan is None else plan.costs, fits, counts)


def chunk_warning(plan: ModelOnCluster, program: Program) -> str | None:
    """Return a line about chunks that waste the hardware, None if they do not."""
    costs = plan.costs
    sentence = short_chunks(costs.seq_length, program.num_chunks, costs.layout.micro_batch_size, costs.hardware)
    return None if sentence is None else f"Warning: {sentence}"
