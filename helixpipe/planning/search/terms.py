"""Breaks down the time of a step: what bounds a plan, why another one lost, and what dominates with more GPUs.

The terms of a step add up to it: what the mathematics needs; what is recomputed; collectives inside layers; how much
shorter the step would be if messages between ranks took no time; the rest of the pipeline's idle time; the reduction of
gradients over data-parallel ranks; the optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from helixpipe.costs.model_costs import ModelCosts
from helixpipe.lowering.lower import lower
from helixpipe.planning.search.documents import bounds_of
from helixpipe.planning.search.space import Candidate, Question, Saving
from helixpipe.planning.search.trial import Trials
from helixpipe.program.costs import Load
from helixpipe.program.transfer import TRANSFER_KINDS
from helixpipe.simulate.simulator import simulate

MOST_OPS = 8_000
"""The most ops of the program that is simulated without messages; for a larger step a program of fewer microbatches is
simulated, and the cost of messages is taken to grow with their number.
"""

ROUNDING = 1e-9
"""Part of a time that sums in another order may differ by."""


class Terms(NamedTuple):
    """Seconds of a step, of the mean rank. recomputing: also what chunks and slices take longer than the whole. inside:
    collectives of tensor- and context-parallel ranks."""

    computing: float
    recomputing: float
    inside: float
    messages: float
    bubble: float
    gradients: float
    optimizer: float

    @property
    def step(self) -> float:
        return sum(self)

    @property
    def losses(self) -> dict[str, float]:
        """The time of each term but computing, the largest first, by the names that are printed."""
        named = {NAMES[field]: seconds for field, seconds in self._asdict().items() if field != "computing"}
        return dict(sorted(named.items(), key=lambda item: -item[1]))


NAMES = {
    "computing": "computing",
    "recomputing": "recomputation and cuts",
    "inside": "TP and CP collectives",
    "messages": "messages",
    "bubble": "bubble",
    "gradients": "DP reduction",
    "optimizer": "optimizer",
}
"""The printed name of each term."""


@dataclass(frozen=True)
class _Unsent(ModelCosts):
    """Costs with which messages between ranks take no time."""

    def transfer_time(self, load: Load) -> float:
        return 0.0 if TRANSFER_KINDS[load.kind].resource == "link" else super().transfer_time(load)


def terms_of(trials: Trials, candidate: Candidate) -> Terms:
    """Return the terms of a step. Raises ScheduleError if the schedule does not take the shape."""
    question, sizes, saving = trials.question, candidate.sizes, candidate.setting.saving
    m, p = question.microbatches(sizes), sizes.ranks
    kept = Saving(None, saving.mlp, saving.loss)
    share = 1 / sizes.data if question.documents else m
    work = bounds_of(question).figures(sizes, kept).least_work * share / p
    unlinked = replace(question.hardware, nvlink=inf, network=inf, latency=0.0)
    alone = bounds_of(replace(question, hardware=unlinked)).figures(sizes, kept).least_work * share / p
    number = m
    # Interleaved schedules take multiples of the ranks.
    while number > 2 * p and number % (2 * p) == 0 and trials.ops(candidate, number) > MOST_OPS:
        number //= 2
    costs = trials.costs(sizes, saving)
    simulation = trials.simulation(candidate, number)
    program = simulation.lowered.program
    free = _Unsent(**{name: getattr(costs, name) for name in ModelCosts.__dataclass_fields__})
    unsent = simulate(lower(program, free), free, "s").makespan
    idle, exposed = simulation.bubble_time, max(simulation.makespan - unsent, 0.0)
    exposed = min(exposed, idle)
    busy = simulation.ideal * m / number
    reduction, optimizer = costs.after_time(program)
    messages = exposed * m / number
    again = busy - work if busy - work > ROUNDING * busy else 0.0
    return Terms(alone, again, work - alone, messages, idle - exposed, reduction, optimizer)


class Difference(NamedTuple):
    """The difference of two plans: the seconds that the second takes longer in each term, the largest first."""

    longer: float
    terms: tuple[tuple[str, float], ...]


def compared(first: Terms, second: Terms) -> Difference:
    """Return the terms by which the second takes longer."""
    each = {NAMES[name]: getattr(second, name) - getattr(first, name) for name in Terms._fields}
    return Difference(second.step - first.step, tuple(sorted(each.items(), key=lambda item: -abs(item[1]))))


class AtSize(NamedTuple):
    """The best plan for a number of GPUs, of few trials; None if nothing fits."""

    gpus: int
    candidate: Candidate | None
    terms: Terms | None


def taking_over(sizes: Sequence[AtSize]) -> dict[str, int | None]:
    """Return, for each loss, the first number of GPUs at which it is the largest; None if it never is."""
    first_gpus: dict[str, int | None] = {NAMES[name]: None for name in Terms._fields if name != "computing"}
    for each in sizes:
        if each.terms is not None:
            largest = next(iter(each.terms.losses))
            if first_gpus[largest] is None:
                first_gpus[largest] = each.gpus
    return first_gpus


def smaller(question: Question) -> list[Question]:
    """Return the question with half of the GPUs, a quarter, and so on down to one node."""
    questions, gpus = [], question.gpus
    while gpus >= question.hardware.gpus_per_node and gpus % question.hardware.gpus_per_node == 0:
        questions.append(replace(question, gpus=gpus, offload=False))
        if gpus % 2:
            break
        gpus //= 2
    return questions[::-1]
