"""A step over documents of all lengths: dealt over pipelines, packed into rows and ordered. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

from helixpipe.common.errors import ScheduleError
from helixpipe.lowering.lower import lower
from helixpipe.planning.capacity import fits, token_capacity
from helixpipe.planning.catalogue import Shape
from helixpipe.planning.chunk_times import ChunkTimes
from helixpipe.planning.dealing import Hands, deal
from helixpipe.planning.packing import Packing
from helixpipe.planning.recompute import RecomputeOptions
from helixpipe.planning.tuning import PackingOptions, tuned
from helixpipe.program.costs import Costs
from helixpipe.program.program import Program
from helixpipe.program.stages import even_stages
from helixpipe.program.workload import Slice, Workload
from helixpipe.simulate.simulator import simulate


def dealt(lengths: Sequence[int], costs: Costs, layers: int, pipelines: int) -> tuple[Hands, tuple[float, ...]]:
    """The documents of each of so many pipelines, by number, and what each document takes on paper: what it adds to a
    chunk of usual size. Raises UserError for fewer documents than pipelines."""
    times = ChunkTimes(costs, even_stages(layers, 1), 2.0)
    each = tuple(times.added(length, times.usual) for length in lengths)
    return deal(each, lengths, pipelines), each


MOST_ROWS_OF_PADDING = 64


@dataclass(frozen=True)
class StepPacker:
    """Makes a schedule's program of a pipeline's documents.

    build: the schedule's program of a shape with a `ragged` workload. shape: all but that; its costs must be known.
    adapts: whether the schedule itself recomputes what the memory asks for. alignment: tokens of a chunk are a multiple
    of it. least: tokens below which chunks waste the hardware.
    """

    build: Callable[[Shape], Program]
    shape: Shape
    options: PackingOptions
    adapts: bool = False
    alignment: int = 1
    least: int = 1

    def pack(self, lengths: Sequence[int], search: bool = True) -> tuple[Program, Packing]:
        """The program, with the best number of slices where that is left open. search: whether the fastest few on paper
        are simulated; else estimates decide, in a small part of the time. Raises UserError where nothing fits."""
        costs = self._costs
        times = ChunkTimes(costs, even_stages(self.shape.layers, 1), sum(lengths) / len(lengths))
        programs: dict[int, Program] = {}

        def made(workload: Workload) -> Program:
            if id(workload) not in programs:
                programs[id(workload)] = self.program(workload)
            return programs[id(workload)]

        def predict(packing: Packing) -> float:
            simulation = simulate(lower(made(packing.workload), costs), costs)
            limit = inf if self.shape.memory_limit is None else self.shape.memory_limit
            return simulation.makespan if max(simulation.device_needs) <= limit else inf

        held = self._capacity(lengths)
        found = tuned(
            lengths,
            times,
            self.shape.ranks,
            self.options,
            self.alignment,
            self.least,
            lambda packing: fits(packing.workload, held),
            predict if search else None,
        )
        return made(found.packing.workload), found.packing

    def program(self, workload: Workload) -> Program:
        """The schedule's, of these rows. Where it asks for a multiple of something, as helix does, rows of padding make
        up the number. Raises ScheduleError where no number is right."""
        refusals: list[ScheduleError] = []
        for missing in range(MOST_ROWS_OF_PADDING):
            rows = _with_padding(workload, missing, self.alignment)
            try:
                return self.build(replace(self.shape, microbatches=len(rows), ragged=rows))
            except ScheduleError as error:
                refusals.append(error)
        raise refusals[0]

    def _capacity(self, lengths: Sequence[int]) -> list[float]:
        """Tokens that each rank can hold, where the schedule recomputes what it has to with all layers recomputed."""
        recompute = self.shape.recompute
        if self.adapts and recompute.granularity is None:
            recompute = RecomputeOptions("full")
        stages = recompute.stages(even_stages(self.shape.layers, self.shape.ranks))
        tokens = min(max(sum(lengths) // (8 * self.shape.ranks), 1), max(lengths))
        return token_capacity(self._costs, stages, self.shape.memory_limit, tokens, 2.0)

    @property
    def _costs(self) -> Costs:
        assert self.shape.costs is not None
        return self.shape.costs


def _with_padding(workload: Workload, rows: int, tokens: int) -> Workload:
    """With so many more rows of so many tokens, each a document of its own, numbered after the others."""
    documents = 1 + max(part.document for chunks in workload.microbatches for chunk in chunks for part in chunk)
    added = tuple(((Slice(documents + number, 0, tokens),),) for number in range(rows))
    return Workload((*workload.microbatches, *added)) if rows else workload
