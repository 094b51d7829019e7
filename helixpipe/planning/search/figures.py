"""Times and bytes of a model divided over GPUs, from which bounds, estimates and divisions of the layers follow.

Layers are taken to be alike: each has the mean of all, which a stage of many of them comes to.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from helixpipe.costs.model_costs import ModelCosts
from helixpipe.lowering.bound import BoundCosts
from helixpipe.planning.division import balanced
from helixpipe.planning.memory.sharding import shared_out
from helixpipe.planning.search.space import ParallelSizes, Question, Saving, Setting
from helixpipe.program.costs import Work
from helixpipe.program.program import Op, Program, Unit
from helixpipe.program.stages import Piece, Stage, even_stages, layer_pieces
from helixpipe.program.tasks import Buffer
from helixpipe.program.transfer import Transfer
from helixpipe.program.workload import Extent, Extents, uniform


@dataclass(frozen=True)
class Figures:
    """Figures of a model divided by `ParallelSizes`, with a `Saving`. forward, backward, inputs, weights, again:
    seconds of F, B, I, W and R of all layers on a microbatch; attention: of core attention's F; attention_inputs: of
    its I. ends: F and B of embedding and head; ends_weights: the W in these. after: of gradients and optimizer for all
    weights. static: bytes of all weights with their gradients and optimizer state, on one rank; static_layers: of all
    layers in that; static_ends: of embedding and head, each on a rank of its own. kept: of what a microbatch keeps in
    all layers and at the ends. kept_layers: in the layers alone. gathers, scatters: of weights in parts, seconds for
    the embedding, a layer and the head, for each op. messages: seconds of a whole microbatch's activation from each
    rank to the next, and from the last to the first.
    """

    forward: float
    backward: float
    inputs: float
    weights: float
    again: float
    attention: float
    attention_inputs: float
    ends: tuple[float, float]
    ends_weights: tuple[float, float]
    after: float
    static: float
    static_layers: float
    static_ends: tuple[float, float]
    kept: float
    kept_layers: float
    gathers: tuple[float, float, float] = (0.0, 0.0, 0.0)
    scatters: tuple[float, float, float] = (0.0, 0.0, 0.0)
    messages: tuple[float, ...] = ()

    @property
    def least_layers(self) -> float:
        """Seconds of all layers' ops on a microbatch, whichever form the backward has."""
        return self.forward + min(self.backward, self.inputs + self.weights) + self.again

    @property
    def least_work(self) -> float:
        """Seconds of all ops on a microbatch, whichever form the backward has."""
        return self.least_layers + sum(self.ends)


class FigureTable:
    """Figures and divisions for one question; each is computed once."""

    def __init__(self, question: Question):
        self.question = question
        self._figures: dict[tuple[ParallelSizes, str | None, int, int], Figures] = {}
        self._divisions: dict[tuple[ParallelSizes, str, int | None, str | None], tuple[int, ...] | None] = {}

    def figures(self, sizes: ParallelSizes, saving: Saving) -> Figures:
        """Return the figures; of a saving that recomputes in some layers, those of all layers that do."""
        key = sizes, saving.recompute, saving.mlp, saving.loss
        if key not in self._figures:
            self._figures[key] = self._measured(sizes, saving.in_all_layers)
        return self._figures[key]

    def _measured(self, sizes: ParallelSizes, saving: Saving) -> Figures:
        return Measured(self.question.costs(sizes, saving), saving, sizes.ranks).figures

    def division(self, sizes: ParallelSizes, setting: Setting) -> tuple[int, ...] | None:
        """Return the layers of each stage, so that no rank has much more to do than others; None: equally many."""
        if not setting.balanced:
            return None
        key = sizes, setting.schedule, setting.virtual_stages, setting.saving.recompute
        if key not in self._divisions:
            figures, layers = self.figures(sizes, setting.saving), self.question.model.layers
            places = self.question.catalogue[setting.schedule].places(sizes.ranks, setting.virtual_stages)
            ends = (0.0, 0.0) if self.question.vocabulary.over_pipeline else figures.ends
            found = balanced(figures.least_layers / layers, ends, layers, places)
            self._divisions[key] = None if found is not None and len(set(found)) == 1 else found
        return self._divisions[key]

    def settled(self, sizes: ParallelSizes, setting: Setting) -> Setting:
        """Return the setting without `balanced` where that changes nothing."""
        return setting if self.division(sizes, setting) is not None else setting.evenly


class Measured:
    """Times of layers that differ and of the ends, from the costs: for a whole microbatch, or a chunk
    of these extents. ranks: of the pipeline.
    """

    def __init__(self, costs: ModelCosts, saving: Saving, ranks: int = 1, extents: Extents = ()):
        self.costs, self.saving, self.layers, self.ranks = costs, saving, costs.model.layers, ranks
        self.layer_kinds = costs.layer_kinds(self.layers)
        self.extents = extents or (Extent(costs.seq_length, 0),)

    @property
    def figures(self) -> Figures:
        layers, ends = self.layers, [Piece("embed"), Piece("head")]
        chain = layer_pieces(self.layer_kinds)
        times = {kind: self._time(kind, chain) for kind in "FBIW"}
        runs = self.saving.recompute_options.runs(chain)
        again = self._time("R", tuple(piece for run in runs for piece in run)) if runs else 0.0
        attention = tuple(piece for piece in chain if piece.role == "attn")
        at_ends = [
            self._time("F", (piece,))
            + min(self._time("B", (piece,)), self._time("I", (piece,)) + self._time("W", (piece,)))
            for piece in ends
        ]
        # Layers keep the same each, but the first and the last beside the ends: two layers more than one say what.
        one, two = (self._kept(self._one_rank(even_stages(self.layer_kinds[:count], 1))) for count in (1, 2))
        kept_layers = layers * (two - one if layers > 1 else one)
        kept = one + (layers - 1) * (two - one)
        gathers, scatters = self._sharing()
        return Figures(
            times["F"], times["B"], times["I"], times["W"], again, self._time("F", attention),
            self._time("I", attention), (at_ends[0], at_ends[1]),
            (self._time("W", (ends[0],)), self._time("W", (ends[1],))), sum(self.costs.after_time(self.whole)),
            self.costs.static_memory(self.whole.stages[0].pieces), self.costs.static_memory(chain),
            (self.costs.static_memory((ends[0],)), self.costs.static_memory((ends[1],))),
            kept, kept_layers, gathers, scatters, self._messages(),
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

    def _sharing(self) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
        """Return the times of a gather and of a scatter for the embedding, the shortest layer and the head."""
        holders = self.costs.sharded
        if holders == 1:
            return Figures.gathers, Figures.scatters
        kinds = tuple(dict.fromkeys(self.layer_kinds))
        plain = Program("", even_stages(kinds, 1), ((Op("F", 0, 0), Op("B", 0, 0)),), uniform(1, 1, None))
        program = shared_out(plain, holders)
        bound = BoundCosts(program, self.costs)
        stages = range(len(program.stages))
        found = []
        for kind in ("gather", "scatter"):
            first, *layers, last = (bound.transfer_time(Transfer(0, kind, (0,), Unit(at, -1, -1))) for at in stages)
            found.append((first, min(layers), last))
        return Figures.gathers if self.costs.gathered_once else found[0], found[1]

    def _messages(self) -> tuple[float, ...]:
        if self.ranks == 1:
            return ()
        stages = even_stages(self.layer_kinds[:1] * self.ranks, self.ranks)
        pipeline = tuple((Op("F", rank, 0), Op("B", rank, 0)) for rank in range(self.ranks))
        costs = BoundCosts(Program("", stages, pipeline, uniform(1, 1, None)), self.costs)
        pairs = [(rank, (rank + 1) % self.ranks) for rank in range(self.ranks)]
        return tuple(costs.transfer_time(Transfer(0, "activation", pair, Unit(1, 0, 0))) for pair in pairs)
