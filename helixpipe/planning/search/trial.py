"""A candidate tried: its program made, lowered and simulated, with few microbatches where it has many.

After its first microbatches a schedule repeats itself: a microbatch more makes the step longer by as much, and the
memory larger by as much, each time. So a step of many microbatches is tried with few, at two numbers of them, and what
lies between says what each more would add, but no less than the busiest rank's work. That is exact where the order does
repeat, and within a percent where a search found it. Those that are shown in the end are simulated as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from helixpipe.common.errors import ScheduleError, UserError
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.lowering.lower import lower
from helixpipe.planning.memory.recompute_choice import ChoiceTables
from helixpipe.planning.order.chunk_lengths import balanced_lengths, default_alignment
from helixpipe.planning.search.figures import FigureTable
from helixpipe.planning.search.space import Candidate, ParallelSizes, Question, Saving
from helixpipe.planning.setup import Setup
from helixpipe.program.program import Program
from helixpipe.program.stages import even_stages
from helixpipe.simulate.simulator import Simulation, simulate
from helixpipe.simulate.verdict import cached_workspaces

MOST_OPS = 40_000
"""The most ops of a program that is simulated; some seconds. Programs that have more with few microbatches are left
out.
"""

WHOLE_OPS = 12_000
"""The most ops of a step that is simulated with all its microbatches; larger ones are extrapolated from few."""


@dataclass(frozen=True)
class Trial:
    """The result of trying a candidate. step: seconds; what few microbatches promise at least if `bound`, as trials
    that cannot be best end early. needs: bytes of each rank's GPU; host: of host memory that one needs. bubble: idle
    part of the pipeline's time. whole: simulated with all its microbatches. refused: why the schedule does not take the
    shape. ops: the number simulated. cached: as `MemoryVerdict`.
    """

    step: float = inf
    needs: tuple[float, ...] = ()
    host: float = 0.0
    bubble: float = 0.0
    bound: bool = False
    whole: bool = False
    refused: str = ""
    ops: int = 0
    cached: float = 0.0

    @property
    def peak(self) -> float:
        return max(self.needs, default=inf)


def cut_alike(candidate: Candidate) -> tuple[ParallelSizes, int]:
    """Return what candidates have in common whose chunks have the same lengths."""
    return _cut_alike(candidate.sizes, candidate.setting.chunks)


def _cut_alike(sizes: ParallelSizes, chunks: int) -> tuple[ParallelSizes, int]:
    return replace(sizes, ranks=1, data=1, parts=False, gathered_once=False, in_pairs=False), chunks


class Trials:
    """Trials of one question; costs and chunk lengths are computed once."""

    def __init__(self, question: Question):
        self.question = question
        self.measures = FigureTable(question)
        self._costs: dict[tuple[ParallelSizes, int, int], ModelCosts] = {}
        self._tables = ChoiceTables()
        self._lengths: dict[tuple[ParallelSizes, int], tuple[int, ...] | None] = {}

    def costs(self, sizes: ParallelSizes, saving: Saving) -> ModelCosts:
        key = sizes, saving.mlp, saving.loss
        if key not in self._costs:
            self._costs[key] = self.question.costs(sizes, saving)
        return self._costs[key]

    def setup(self, candidate: Candidate) -> Setup:
        """Return what is the same for the candidate's schedule in every step."""
        setting = candidate.setting
        costs, saving = self.costs(candidate.sizes, setting.saving), setting.saving
        return Setup(
            candidate.sizes.ranks,
            costs.model.layers,
            costs,
            setting.virtual_stages,
            saving.recompute_options,
            self.question.limit,
            saving.offload_options,
            costs.host_memory,
            costs.sharded,
            costs.gathered_once,
            self.measures.division(candidate.sizes, setting),
            vocabulary=self.question.vocabulary,
            tables=self._tables,
        )

    def program(self, candidate: Candidate, microbatches: int | None = None) -> Program:
        """Return the program of a step, or of one of fewer microbatches. Raises ScheduleError if the schedule does not
        take the shape.
        """
        sizes, setting = candidate.sizes, candidate.setting
        count = microbatches or self.question.microbatches(sizes)
        shape = self.setup(candidate).shape(count, setting.chunks, self._chunk_lengths(sizes, setting.chunks))
        return self.question.catalogue.build(setting.schedule, shape, setting.options)

    def simulation(self, candidate: Candidate, microbatches: int | None = None) -> Simulation:
        """Simulate a candidate. Raises ScheduleError if the schedule does not take the shape."""
        costs = self.costs(candidate.sizes, candidate.setting.saving)
        return simulate(lower(self.program(candidate, microbatches), costs), costs, "s")

    def whole(self, candidate: Candidate) -> Trial:
        """Try a candidate with all its microbatches."""
        sizes = candidate.sizes
        if self.ops(candidate, self.question.microbatches(sizes)) > WHOLE_OPS:
            quick = self._quick(candidate, inf)
            if quick is not None:
                return quick
        try:
            return self._trial(candidate, self.simulation(candidate))
        except UserError as error:
            return Trial(refused=str(error))

    def quick(self, candidate: Candidate, slowest: float) -> Trial:
        """Try a candidate with few microbatches. slowest: a step that takes longer is of no use."""
        return self._quick(candidate, slowest) or self.whole(candidate)

    def _quick(self, candidate: Candidate, slowest: float) -> Trial | None:
        """Try a candidate with few microbatches; None if it has few anyway."""
        m, p = self.question.microbatches(candidate.sizes), candidate.sizes.ranks
        if self.ops(candidate, min(m, 3 * p)) > MOST_OPS:
            return Trial(refused="its program is too long to be tried")
        try:
            for more in (p, 2 * p):
                few = 2 * p + m % more
                if m <= few + more:
                    return None
                extrapolated = self._extrapolated(candidate, few, more, slowest)
                if extrapolated is not None:
                    return extrapolated
        except UserError as error:
            return Trial(refused=str(error))
        return Trial(refused="no number of microbatches was found to try it with")

    def _extrapolated(self, candidate: Candidate, few: int, more: int, slowest: float) -> Trial | None:
        """Extrapolate from `few` microbatches and `more` in addition; None if the schedule does not take the larger
        number.
        """
        left = self.question.microbatches(candidate.sizes) - few
        first = self.simulation(candidate, few)
        start = self._trial(candidate, first)
        # In the steady state the rank with the most work is busy all the time, at best. That is no bound where further
        # microbatches fill what was idle at first.
        least = start.step + left * max(first.busy) / few
        if least >= slowest:
            return Trial(least, start.needs, start.host, start.bubble, bound=True, ops=start.ops)
        try:
            second = self.simulation(candidate, few + more)
        except ScheduleError:
            return None
        end = self._trial(candidate, second)
        times = left / more
        # What was idle at first may be filled up by those in addition, but once it is, the busiest rank's work remains.
        longer = max(second.makespan - first.makespan, more * max(second.busy) / (few + more))
        makespan = second.makespan + (times - 1) * longer
        ideal = first.ideal + times * (second.ideal - first.ideal)
        return Trial(
            makespan + end.step - second.makespan,
            tuple(max(a + times * (b - a), b) for a, b in zip(start.needs, end.needs, strict=True)),
            max(end.host, start.host + times * (end.host - start.host)),
            1 - ideal / makespan,
            ops=start.ops + end.ops,
            cached=max(start.cached, end.cached),
        )

    def _trial(self, candidate: Candidate, simulation: Simulation) -> Trial:
        program = simulation.lowered.program
        costs = self.costs(candidate.sizes, candidate.setting.saving)
        needs = simulation.device_needs
        return Trial(
            simulation.makespan + sum(costs.after_time(program)),
            tuple(needs),
            max(simulation.host_needs),
            simulation.bubble_ratio,
            whole=program.num_microbatches == self.question.microbatches(candidate.sizes),
            ops=sum(map(len, program.ranks)),
            cached=cached_workspaces(simulation, needs.index(max(needs))),
        )

    def ops(self, candidate: Candidate, microbatches: int) -> int:
        """About as many as its program has."""
        setting = candidate.setting
        return 2 * candidate.sizes.ranks * microbatches * setting.chunks * (setting.virtual_stages or 1)

    def _chunk_lengths(self, sizes: ParallelSizes, chunks: int) -> tuple[int, ...] | None:
        """Return the lengths of chunks that take equally long, as training has them; None for one chunk."""
        if chunks == 1:
            return None
        key = _cut_alike(sizes, chunks)
        if key not in self._lengths:
            costs = self.costs(sizes, Saving())
            alignment = default_alignment(costs.seq_length, chunks, costs.layout.unit)
            stages = even_stages(costs.layer_kinds(costs.model.layers), 1)
            self._lengths[key] = balanced_lengths(costs, stages, costs.seq_length, chunks, alignment)
        return self._lengths[key]
