"""What the flags about chunks come to for the programs of the `helixpipe` command. No torch here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from helixpipe.cli.model import Plan
from helixpipe.cli.model_report import report
from helixpipe.costs.profile_costs import ProfileCosts
from helixpipe.planning.chunk_lengths import best_chunks, chunk_counts, short_chunks
from helixpipe.planning.chunk_options import ChunkOptions
from helixpipe.program.costs import Costs
from helixpipe.program.program import Program
from helixpipe.simulate.simulator import Simulation

Lengths = tuple[int, ...] | None


@dataclass(frozen=True)
class Chunking:
    """The flags with the costs they are resolved on; plan: of --model, else None."""

    options: ChunkOptions
    costs: Costs
    plan: Plan | None

    def lengths(self, chunks: int, layers: int) -> Lengths:
        """Tokens of each of so many chunks."""
        if isinstance(self.costs, ProfileCosts):
            profile = self.costs.profile
            return self.options.resolve(chunks, self.costs, layers, profile.seq_length, profile.layout.tensor_parallel)
        if self.plan is None:
            return self.options.resolve(chunks, self.costs, layers)
        costs = self.plan.costs
        return self.options.resolve(chunks, costs, layers, costs.seq_length, costs.layout.tensor_parallel)

    def of_file(self, program: Program) -> Program:
        """A file has no chunk lengths; the flags give them."""
        return dataclasses.replace(program, chunk_lengths=self.lengths(program.num_chunks, program.num_layers))

    def program(self, make: Callable[[int, Lengths], Program], chunks: int | None, layers: int) -> Program:
        """The program of so many chunks; None: of the best number of them."""

        def cut(count: int) -> Program:
            return make(count, self.lengths(count, layers))

        if chunks is not None:
            return cut(chunks)
        plan = self.plan
        if plan is None:
            return best_chunks(cut, self.costs)

        def fits(simulation: Simulation) -> bool:
            step = report(simulation, plan)
            return step.peak <= step.limit

        costs = plan.costs
        counts = chunk_counts(costs.seq_length, costs.layout.micro_batch_size, costs.hardware)
        return best_chunks(cut, costs, fits, counts)


def chunk_warning(plan: Plan, program: Program) -> str | None:
    """A line about chunks that waste the hardware, None where they do not."""
    costs = plan.costs
    sentence = short_chunks(costs.seq_length, program.num_chunks, costs.layout.micro_batch_size, costs.hardware)
    return None if sentence is None else f"Warning: {sentence}"
