"""Lower bounds on a step's time and memory, whatever the order of its ops, and estimates that say what to try first.

Bounds hold for every program of the catalogue (tested for all of them). Time: all ops, what is recomputed among them,
evenly over the ranks, then the reduction of gradients and the optimizer for an even share of the weights. Memory: an
even share of weights, gradients and optimizer, and of what one microbatch keeps, which is all there when the first of
its backwards begins. Cutting a sequence makes no op shorter than its share of the whole.

Estimates add the bubble and the memory that the catalogue's formulas say.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil

from helixpipe.costs.model_costs import ModelCosts
from helixpipe.lowering.bound import BoundCosts
from helixpipe.planning.search.formulas import value
from helixpipe.planning.search.space import ParallelSizes, Question, Saving, Setting
from helixpipe.program.costs import Work
from helixpipe.program.program import Op, Program
from helixpipe.program.stages import Piece, Stage, even_stages, layer_pieces
from helixpipe.program.tasks import Buffer
from helixpipe.program.workload import Extent, Extents, uniform

TURN = 0.1
"""Part of a rank's forward and backward of a microbatch that is taken to be WeiPipe's t in estimates."""


@dataclass(frozen=True)
class Figures:
    """Figures of a model divided by `ParallelSizes`, with a `Saving`. forward, backward, inputs, weights, again:
    seconds of F, B, I, W and R of all layers on a microbatch; attention: of core attention's F. ends: F and B of
    embedding and head; after: of gradients and optimizer for all weights. static: bytes of all weights with their
    gradients and optimizer state; kept: of what a microbatch keeps in all layers and at the ends.
    """

    forward: float
    backward: float
    inputs: float
    weights: float
    again: float
    attention: float
    ends: tuple[float, float]
    after: float
    static: float
    kept: float
    kept_layers: float

    @property
    def least_work(self) -> float:
        """Seconds of all ops on a microbatch, whichever form the backward has."""
        split = min(self.backward, self.inputs + self.weights)
        return self.forward + split + self.again + sum(self.ends)


class Bounds:
    """Lower bounds for one question; figures are computed once for each sizes and saving."""

    def __init__(self, question: Question):
        self.question = question
        self._figures: dict[tuple[ParallelSizes, str | None, int, int], Figures] = {}

    def figures(self, sizes: ParallelSizes, saving: Saving) -> Figures:
        key = sizes, saving.recompute, saving.mlp, saving.loss
        if key not in self._figures:
            self._figures[key] = Measured(self.question.costs(sizes, saving), saving).figures
        return self._figures[key]

    def flops(self, sizes: ParallelSizes) -> float:
        """Return the FLOPs of a step's mathematics, over all GPUs."""
        costs = self.question.costs(sizes)
        return self.question.microbatches(sizes) * costs.step_flops(Measured(costs, Saving()).whole)

    def time(self, sizes: ParallelSizes, setting: Setting) -> float:
        """Return the seconds that no step can beat."""
        saving = setting.saving
        figures = self.figures(sizes, Saving(None, saving.mlp, saving.loss) if saving.offload else saving)
        return (self.question.microbatches(sizes) * figures.least_work + figures.after) / sizes.ranks

    def memory(self, sizes: ParallelSizes, saving: Saving) -> float:
        """Return the bytes that the fullest GPU needs at least."""
        figures = self.figures(sizes, saving)
        return (figures.static + (0.0 if saving.offload else figures.kept)) / sizes.ranks

    def estimate(self, sizes: ParallelSizes, setting: Setting) -> float:
        """Return the approximate seconds of a step."""
        figures, m, p = self.figures(sizes, setting.saving), self.question.microbatches(sizes), sizes.ranks
        schedule = self.question.catalogue[setting.schedule]
        work = figures.least_work / p
        layers = (figures.forward + figures.backward + figures.again) / p
        spread = schedule.spread or self.question.vocabulary.over_pipeline
        slowest = work if spread else max(work, layers + max(figures.ends))
        bubble = value(schedule.bubble, self._names(sizes, setting, figures)) or 0.0
        return m * slowest + max(bubble, 0.0) + figures.after / p

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


class Measured:
    """Times of layers that differ and of the ends, from the costs: for a whole microbatch, or a chunk
    of these extents.
    """

    def __init__(self, costs: ModelCosts, saving: Saving, extents: Extents = ()):
        self.costs, self.saving, self.layers = costs, saving, costs.model.layers
        self.layer_kinds = costs.layer_kinds(self.layers)
        self.extents = extents or (Extent(costs.seq_length, 0),)

    @property
    def figures(self) -> Figures:
        layers, ends = self.layers, [Piece("embed"), Piece("head")]
        chain = layer_pieces(self.layer_kinds)
        times = {kind: self._time(kind, chain) for kind in "FBIW"}
        runs = self.saving.recompute_options.runs(chain)
        again = self._time("R", tuple(piece for run in runs for piece in run)) if runs else 0.0
        attention = self._time("F", tuple(piece for piece in chain if piece.role == "attn"))
        at_ends = [
            self._time("F", (piece,))
            + min(self._time("B", (piece,)), self._time("I", (piece,)) + self._time("W", (piece,)))
            for piece in ends
        ]
        # Layers keep the same each, but the first and the last beside the ends: two layers more than one say what.
        one, two = (self._kept(self._one_rank(even_stages(self.layer_kinds[:count], 1))) for count in (1, 2))
        kept_layers = layers * (two - one if layers > 1 else one)
        kept = one + (layers - 1) * (two - one)
        return Figures(
            times["F"], times["B"], times["I"], times["W"], again, attention,
            (at_ends[0], at_ends[1]), sum(self.costs.after_time(self.whole)),
            self.costs.static_memory(self.whole.stages[0].pieces), kept, kept_layers,
        )  # fmt: skip

    @cached_property
    def whole(self) -> Program:
        """A microbatch on one rank."""
        return self._one_rank(even_stages(self.layer_kinds, 1))

    def _time(self, kind: str, pieces: tuple[Piece, ...]) -> float:
        return self.costs.op_time(Work(kind, pieces, self.extents, self.costs.seq_length))

    def _one_rank(self, stages: tuple[Stage, ...]) -> Program:
        stages = self.saving.recompute_options.stages(stages)
        workload = uniform(1, 1, None)
        return Program("", stages, ((Op("F", 0, 0), Op("B", 0, 0)),), workload, sharded=self.costs.sharded)

    def _kept(self, program: Program) -> float:
        return BoundCosts(program, self.costs).size(Buffer("saved", 0, 0, 0, 0))
