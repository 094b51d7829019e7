"""Lower bounds on a step's time and memory, whatever the order of its ops, and estimates that say what to try first.

Bounds hold for every program of the catalogue (tested for all of them). Where each stage is on one rank, known from the
schedule, a step takes at least, for every rank: what comes before its first op (forwards of the stages before its
first, and their messages); then all its ops, or all but those of weights' gradients and after them the backwards of the
stages before its first; and where weights are in parts, the gathers and scatters of its stages, which run one at a
time. Nor is it shorter than the messages of one link. Where it is not known, all ops evenly over the ranks. After
either come the reduction of gradients and the optimizer. Memory: the weights, gradients and optimizer of the fullest
rank, and what one microbatch keeps there, which is all there when the first of its backwards begins. Cutting a sequence
makes no op shorter than its share of the whole.

Estimates add the bubble and the memory that the catalogue's formulas say, and what messages take where few microbatches
are alive.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import ceil

from helixpipe.planning.catalogue import Schedule
from helixpipe.planning.search.figures import Figures, FigureTable, Measured
from helixpipe.planning.search.formulas import value
from helixpipe.planning.search.space import ParallelSizes, Question, Saving, Setting

TURN = 0.1
"""Part of a rank's forward and backward of a microbatch that is taken to be WeiPipe's t in estimates."""


class Bounds(FigureTable):
    """Lower bounds for one question."""

    def flops(self, sizes: ParallelSizes) -> float:
        """Return the FLOPs of a step's mathematics, over all GPUs."""
        costs = self.question.costs(sizes)
        return self.question.microbatches(sizes) * costs.step_flops(Measured(costs, Saving()).whole)

    def __init__(self, question: Question):
        super().__init__(question)
        self._known: dict[tuple[ParallelSizes, Setting], list[_PlacedPipeline] | None] = {}

    def share(self, sizes: ParallelSizes) -> float:
        """Return how often a pipeline does the work that the figures have."""
        return self.question.microbatches(sizes)

    def time(self, sizes: ParallelSizes, setting: Setting) -> float:
        """Return the seconds that no step can beat."""
        saving = setting.saving
        some = saving.offload or saving.recomputed_layers  # of what is kept, some recomputes
        figures = self.figures(sizes, Saving(None, saving.mlp, saving.loss) if some else saving)
        m, chunks = self.question.microbatches(sizes), setting.chunks
        if (pipelines := self._pipelines(sizes, setting, figures)) is not None:
            return min(each.time(m, chunks) for each in pipelines)
        shared = 0.0
        schedule = self.question.catalogue[setting.schedule]
        if not (schedule.spread and schedule.own_stages):  # these ship weights instead
            shared = m * chunks * self._shared_at_least(figures, setting, sizes.ranks)
        return max((m * figures.least_work + figures.after) / sizes.ranks, shared / sizes.ranks)

    def _shared_at_least(self, figures: Figures, setting: Setting, ranks: int) -> float:
        """Return the seconds of gathers and scatters of a unit of all stages, less those that neighbours share."""
        layers = self.question.model.layers
        stages = ranks * self.question.catalogue[setting.schedule].stages_of(setting.virtual_stages)
        gathers = figures.gathers[0] + layers * figures.gathers[1] + figures.gathers[2]
        scatters = figures.scatters[0] + layers * figures.scatters[1] + figures.scatters[2]
        return max(2 * (gathers - stages * max(figures.gathers)), 0.0) + scatters

    def _pipelines(self, sizes: ParallelSizes, setting: Setting, figures: Figures) -> list[_PlacedPipeline] | None:
        """Return where the stages may be; None if the schedule does not say."""
        schedule = self.question.catalogue[setting.schedule]
        if sizes.ranks == 1 or schedule.own_stages or schedule.spread or self.question.vocabulary.over_pipeline:
            return None
        key = sizes, replace(setting, options=None, chunks=1)
        if key not in self._known:
            self._known[key] = self._placed(sizes, setting, figures, schedule)
        return self._known[key]

    def _placed(
        self, sizes: ParallelSizes, setting: Setting, figures: Figures, schedule: Schedule
    ) -> list[_PlacedPipeline]:
        stages = sizes.ranks * schedule.stages_of(setting.virtual_stages)
        layers = self.question.model.layers
        division = self.division(sizes, setting) or (layers // stages,) * stages
        places = [schedule.places(sizes.ranks, setting.virtual_stages)]
        if schedule.zigzag and schedule.stages == 2:  # zbv may lay them in a line
            places.append(tuple(stage // 2 for stage in range(stages)))
        return [_PlacedPipeline(figures, division, each, layers, schedule.splits) for each in places]

    def memory(self, sizes: ParallelSizes, saving: Saving, setting: Setting | None = None) -> float:
        """Return the bytes that the fullest GPU needs at least; with a setting, where its stages are."""
        figures = self.figures(sizes, saving)
        if setting is not None and (pipelines := self._pipelines(sizes, setting, figures)) is not None:
            return min(each.memory(not saving.offload) for each in pipelines)
        # Not of the head: one whose forward runs just before each chunk's backward (`sppo`) keeps a chunk's logits.
        kept = 0.0 if saving.offload else figures.kept_layers
        return (figures.static + kept) / sizes.ranks

    def estimate(self, sizes: ParallelSizes, setting: Setting) -> float:
        """Return the approximate seconds of a step."""
        figures, m, p = self.figures(sizes, setting.saving), self.question.microbatches(sizes), sizes.ranks
        schedule = self.question.catalogue[setting.schedule]
        bubble = max(value(schedule.bubble, self._names(sizes, setting, figures)) or 0.0, 0.0)
        if (pipelines := self._pipelines(sizes, setting, figures)) is not None:
            placed = pipelines[0]
            alive = value(schedule.memory, self._names(sizes, setting, figures)) or m
            each = max(placed.busiest(m, setting.chunks) / m, placed.held_time / (alive * setting.chunks))
            return max(m * each + bubble + placed.after, *(one.time(m, setting.chunks) for one in pipelines))
        work = figures.least_work / p
        spread = schedule.spread or self.question.vocabulary.over_pipeline or schedule.own_stages
        slowest = work if spread else max(work, figures.least_layers / p + max(figures.ends))
        return max(m * slowest + bubble + figures.after / p, self.time(sizes, setting))

    def estimated_memory(self, sizes: ParallelSizes, setting: Setting) -> float:
        """Return the approximate bytes of the fullest GPU."""
        figures, p = self.figures(sizes, setting.saving), sizes.ranks
        schedule = self.question.catalogue[setting.schedule]
        microbatches = value(schedule.memory, self._names(sizes, setting, figures)) or 1.0
        ends = 0.0 if setting.saving.loss else max(figures.kept - figures.kept_layers, 0.0) / setting.chunks
        return figures.static / p + figures.kept_layers * microbatches / p + ends

    def _names(self, sizes: ParallelSizes, setting: Setting, figures: Figures) -> dict[str, float]:
        p, k = sizes.ranks, setting.chunks
        forward = figures.forward / p
        backward = (figures.backward + figures.again) / p
        return {
            "p": p, "k": k, "v": setting.virtual_stages or 1, "m": self.question.microbatches(sizes),
            "L": self.question.model.layers, "r": 0, "a": 1, "g": ceil(p / k),
            "F": forward, "B": backward, "I": figures.inputs / p, "W": figures.weights / p,
            "A": figures.attention / p, "t": TURN * (forward + backward),
        }  # fmt: skip


@dataclass(frozen=True)
class _PlacedPipeline:
    """Stages of so many layers (division), each on a rank (places), of a model of so many layers. splits: whether a
    backward may run as I and W."""

    figures: Figures
    division: tuple[int, ...]
    places: tuple[int, ...]
    layers: int
    splits: bool

    def time(self, microbatches: int, chunks: int) -> float:
        """Return the seconds that no order of the ops can beat."""
        longest = 0.0
        for rank, first in enumerate(self.first):
            before, behind = self._chains(first, chunks)
            work = microbatches * self.work[rank]
            later = microbatches * self.weights[rank] if self.splits else 0.0
            shared = microbatches * chunks * self.shared[rank]
            longest = max(longest, before + max(work, work - later + behind), shared)
        return max(longest, microbatches * self.link) + self.after

    def busiest(self, microbatches: int, chunks: int) -> float:
        """Return the seconds of the rank that has most to do, without what it waits for."""
        ranks = zip(self.work, self.shared, strict=True)
        return microbatches * max(self.link, *(max(work, chunks * shared) for work, shared in ranks))

    @cached_property
    def held_time(self) -> float:
        """Seconds for which the rank that holds a microbatch longest has it, on average over its layers: from the
        forward of each to its backward. With memory for only so many, so many begin in that time (Little's law)."""
        held = [0.0] * len(self.held)
        stages = zip(self.places, self.division, self._layers_before, self._messages_before, strict=False)
        for rank, count, layers, messages in stages:
            remaining = self.figures.least_work * (1 - layers / self.layers)
            held[rank] += count * (remaining + 2 * (self._messages_before[-1] - messages))
        return max(time / max(count, 1) for time, count in zip(held, self.held, strict=True))

    def memory(self, keeps: bool) -> float:
        """Return the bytes that the fullest rank needs at least. keeps: whether it keeps a microbatch's activations."""
        kept = keeps * self.figures.kept_layers / self.layers
        return max(own + count * kept for own, count in zip(self.static, self.held, strict=True))

    @cached_property
    def static(self) -> list[float]:
        """Bytes of each rank's weights, with their gradients and optimizer state. Embedding and head may share theirs
        where they are on one rank."""
        figures, (first, last) = self.figures, (self.places[0], self.places[-1])
        own = [count * figures.static_layers / self.layers for count in self.held]
        if first == last:
            own[first] += figures.static - figures.static_layers
        else:
            own[first] += figures.static_ends[0]
            own[last] += figures.static_ends[1]
        return own

    @cached_property
    def held(self) -> list[int]:
        """The layers of each rank."""
        counts = [0] * (max(self.places) + 1)
        for rank, count in zip(self.places, self.division, strict=True):
            counts[rank] += count
        return counts

    @cached_property
    def first(self) -> list[int]:
        """The first stage of each rank."""
        return [self.places.index(rank) for rank in range(len(self.held))]

    @cached_property
    def work(self) -> list[float]:
        """Seconds of each rank's ops on a microbatch."""
        each = self.figures.least_layers / self.layers
        return self._with_ends([count * each for count in self.held], *self.figures.ends)

    @cached_property
    def weights(self) -> list[float]:
        """Seconds of W in that, which nothing of the step waits for."""
        each = self.figures.weights / self.layers
        return self._with_ends([count * each for count in self.held], *self.figures.ends_weights)

    @cached_property
    def shared(self) -> list[float]:
        """Seconds of gathers and scatters of each rank for a chunk, but for those that one op may leave to the next."""
        figures = self.figures
        totals = [0.0] * len(self.held)
        last = len(self.places) - 1
        for stage, (rank, count) in enumerate(zip(self.places, self.division, strict=True)):
            gathers = [figures.gathers[1]] * (count > 0)
            gathers += [figures.gathers[0]] * (stage == 0) + [figures.gathers[2]] * (stage == last)
            total = count * figures.gathers[1] + sum(gathers[count > 0 :])
            scatters = count * figures.scatters[1] + figures.scatters[0] * (stage == 0)
            scatters += figures.scatters[2] * (stage == last)
            totals[rank] += 2 * (total - max(gathers, default=0.0)) + scatters
        return totals

    @cached_property
    def after(self) -> float:
        """Seconds of the reduction and the optimizer, which go with the weights of the rank that has most."""
        return self.figures.after * max(max(self.static) / self.figures.static, 1 / len(self.static))

    def _with_ends(self, of_rank: list[float], embedding: float, head: float) -> list[float]:
        of_rank[self.places[0]] += embedding
        of_rank[self.places[-1]] += head
        return of_rank

    def _chains(self, stage: int, chunks: int) -> tuple[float, float]:
        """Return the seconds before the first op of a stage, and after its last backward, of a sequence's first chunk:
        it is no shorter than the others, and what it attends to is a square of its part."""
        figures, before = self.figures, self._layers_before[stage] / self.layers
        part, square = 1 / chunks, 1 / chunks**2
        forward = (figures.forward - figures.attention) * part + figures.attention * square
        whole = figures.inputs if self.splits else figures.backward
        backward = (whole - figures.attention_inputs) * part + figures.attention_inputs * square
        messages = self._messages_before[stage] * part
        return before * forward + messages, before * backward + messages

    @cached_property
    def _layers_before(self) -> list[int]:
        return list(accumulate(self.division, initial=0))

    @cached_property
    def _messages_before(self) -> list[float]:
        """Seconds of the messages on the way to each stage."""
        return list(accumulate((self._message(*cut) for cut in pairwise(self.places)), initial=0.0))

    def _message(self, source: int, target: int) -> float:
        """Return the seconds of a microbatch's activation, or its gradient, between neighbouring ranks."""
        if source == target:
            return 0.0
        return self.figures.messages[target if target == source - 1 else source]

    @cached_property
    def link(self) -> float:
        """Seconds of a microbatch's messages on the busiest link, in its busier direction."""
        cuts = Counter(pairwise(self.places))
        return max((cuts[a, b] + cuts[b, a]) * self._message(a, b) for a, b in cuts)
