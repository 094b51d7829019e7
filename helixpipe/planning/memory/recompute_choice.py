"""Chooses what the layers of one stage recompute, for the least time under a memory limit.

Layers are taken to be alike, each the mean of those that the model has, so only how many of them recompute what is
chosen; what is found so is judged with the layers that it has. Of a stage's layers the ones that make much again come
first: a backward starts with the last layer, and once it has come to the first ones, what the others kept is gone (as
Megatron-LM's `--recompute-method block` places them).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from math import gcd
from typing import NamedTuple

from helixpipe.common.bounded import FEW, BoundedDict
from helixpipe.costs.piece_kinds import MODULES, WITHOUT_CORE_ATTENTION
from helixpipe.lowering.bound import BoundCosts
from helixpipe.planning.memory.room import entering
from helixpipe.program.costs import Costs
from helixpipe.program.program import Op, Program
from helixpipe.program.stages import LAYER_PIECES, LayerKinds, Piece, Stage, layer_pieces, role_of
from helixpipe.program.tasks import Buffer
from helixpipe.program.workload import uniform

Runs = tuple[tuple[str, ...], ...]
"""What a layer recomputes: runs of pieces, by their roles."""

CHOICES: tuple[Runs, ...] = (
    (),
    ((MODULES["mlp"],),),
    ((MODULES["core_attn"],),),
    WITHOUT_CORE_ATTENTION,
    (LAYER_PIECES,),
)
"""The choices: nothing; the MLP; core attention (Korthikanti et al., 2022); all but core attention; the whole layer."""

TOLERANCE = 1e-9
"""Part of a limit that rounding may exceed."""


def make_stage(
    layers: Sequence[Runs],
    first: int = 0,
    embed: bool = False,
    head: bool = False,
    kinds: Sequence[LayerKinds] = (LAYER_PIECES,),
) -> Stage:
    """Return a stage of whole layers, numbered from `first`, with the recomputation that `layers` gives for each.
    kinds: of their pieces, repeated from the first if they are fewer.
    """
    pieces = [Piece("embed")] * embed
    runs: list[tuple[Piece, ...]] = []
    for layer, (recomputed, own) in enumerate(zip(layers, cycle(kinds)), first):
        pieces += layer_pieces((own,), layer)
        runs += [tuple(Piece(kind, layer) for kind in own if role_of(kind) in run) for run in recomputed]
    pieces += [Piece("head")] * head
    return Stage(tuple(pieces), recompute=tuple(runs))


def recomputing(stage: Stage, runs: Runs, share: float) -> Stage:
    """Return the stage with its first layers recomputing these runs; unchanged if it recomputes already."""
    layers = sorted({piece.layer for piece in stage.pieces if piece.layer >= 0})
    own: list[tuple[Piece, ...]] = []
    for layer in layers[: round(share * len(layers))]:
        for run in runs:
            pieces = tuple(piece for piece in stage.pieces if piece.layer == layer and piece.role in run)
            if pieces:
                own.append(pieces)
    return replace(stage, recompute=tuple(own)) if own else stage


class Measures:
    """Times and memory of one stage by itself, from `costs` and in their units."""

    def __init__(self, costs: Costs, stages: Sequence[Stage]):
        self._costs = costs
        self._bound = [_alone(costs, stage) for stage in stages]

    def time(self, kind: str) -> float:
        return self._mean([self._costs.op_time(bound.work(Op(kind, 0, 0))) for bound in self._bound])

    def kept(self, during_backward: bool = False) -> float:
        """Return the memory that a unit keeps from F to B, or its maximum during its B."""
        kinds = ("saved", "recomputed") if during_backward else ("saved",)
        return self._mean([sum(bound.size(Buffer(kind, 0, 0, 0, 0)) for kind in kinds) for bound in self._bound])

    def _mean(self, values: Sequence[float]) -> float:
        return sum(values) / len(values)


@dataclass(frozen=True)
class LayerRecompute:
    """A layer that recomputes `runs`. time: of that. kept: by a unit from F to B. backward: at most during its B."""

    runs: Runs
    time: float
    kept: float
    backward: float


class StageRecompute(NamedTuple):
    """A choice of what the layers of a stage recompute. time: of recomputation, a microbatch. kept: by a unit from F to
    B. backward: at most during its B. counts: layers of each kind, the last of the stage first.
    """

    time: float
    kept: float
    backward: float
    counts: tuple[int, ...]


class ChoiceTables:
    """The `LayerChoices` that makers of programs have asked for, for those of other steps and other ranks."""

    def __init__(self) -> None:
        self._known: BoundedDict[tuple[object, ...], tuple[Costs, LayerChoices]] = BoundedDict(FEW)

    def choices(
        self, costs: Costs, most: int, embed: bool, head: bool, free: bool, kinds: Sequence[LayerKinds]
    ) -> LayerChoices:
        """Return the choices for stages of up to `most` layers or more."""
        key = id(costs), embed, head, free, tuple(kinds)  # of costs that are kept here
        known = self._known.get(key)
        if known is None or known[1].most < most:
            known = self._known[key] = costs, LayerChoices(costs, most, embed, head, free, kinds)
        return known[1]


class LayerChoices:
    """The choices worth making in stages of up to `most` layers, all of one place in the pipeline.

    embed, head: whether the stages have those beside their layers. free: recomputation is taken to cost no time, which
    leaves the choices that need the least memory. kinds: of the pieces of the model's layers.
    """

    def __init__(
        self,
        costs: Costs,
        most: int,
        embed: bool,
        head: bool,
        free: bool = False,
        kinds: Sequence[LayerKinds] = (LAYER_PIECES,),
    ):
        self.most, self.embed, self.head = most, embed, head
        self._costs, self._kinds, counts = costs, kinds, Counter(kinds)
        divisor = gcd(*counts.values())
        self._mixed = [own for own, count in counts.items() for _ in range(count // divisor)]
        nothing = self._measures(())
        self.forward_and_backward = nothing.time("F") + nothing.time("B")
        whole = self._measures((), embed=embed, head=head)
        self.ends = whole.time("F") + whole.time("B") - self.forward_and_backward
        self._embedding = self._measures((), embed=embed).kept() - nothing.kept()
        self._around = _Around(costs, embed, head, kinds, self._mixed)
        # From the back to the front: what a layer makes again beside what it kept grows.
        self.layers = sorted(self._layers(free), key=lambda layer: layer.backward - layer.kept)
        self.plain: list[StageRecompute] = []
        self._found = self._combine(most)

    def kinds(self, choice: StageRecompute) -> list[Runs]:
        """Return the pieces that each layer of a stage recomputes, the first layer first."""
        pairs = zip(self.layers, choice.counts, strict=True)
        return [layer.runs for layer, count in reversed(list(pairs)) for _ in range(count)]

    def memory(self, choice: StageRecompute, units: int) -> float:
        """Return the most that a rank has for that many units of the stage and an op; see `always` for the rest."""
        pairs = zip(reversed(self.layers), reversed(choice.counts), strict=True)
        runs = tuple(layer.runs for layer, count in pairs for _ in range(min(count, 2)))
        beside = (units - 1) * choice.kept + units * self._embedding
        return beside + self._around.backward(runs, choice.kept, choice.backward)

    def always(self, count: int) -> float:
        """Return the memory that a rank with `count` layers needs beside its units: weights and optimizer, and what
        enters the stage.
        """
        stage = make_stage([()] * count, embed=self.embed, head=self.head, kinds=self._kinds)
        return self._costs.static_memory(stage.pieces) + self._around.messages

    def _measures(self, runs: Runs, embed: bool = False, head: bool = False) -> Measures:
        """Return the measures of stages of one layer that recomputes `runs`."""
        return Measures(self._costs, [make_stage([runs], 0, embed, head, (own,)) for own in self._mixed])

    def _layers(self, free: bool) -> list[LayerRecompute]:
        """Return the choices of recomputation worth using for a layer: of equal ones, the first."""
        layers: list[LayerRecompute] = []
        for runs in CHOICES:
            alone = self._measures(runs)
            layer = LayerRecompute(
                runs, alone.time("R") if runs and not free else 0.0, alone.kept(), alone.kept(during_backward=True)
            )
            if not any(
                other.time <= layer.time and other.kept <= layer.kept and other.backward <= layer.backward
                for other in layers
            ):
                layers.append(layer)
        return layers

    def cheapest(self, count: int, units: int, limit: float) -> StageRecompute | None:
        """Return the fastest choice for `count` layers that keeps `units` microbatches in `limit`; None if none does.
        Nothing is recomputed if that fits.
        """
        bound = limit + TOLERANCE * abs(limit)
        for choice in (self.plain[count], *self._found[count]):
            if self.memory(choice, units) <= bound:
                return choice
        return None

    def worthwhile(self, count: int) -> list[StageRecompute]:
        """Return the choices for `count` layers that no other betters in time and in memory, by time."""
        return self._found[count]

    def smallest(self, count: int, units: int) -> float:
        """Return the least memory that any choice for `count` layers needs for that many units."""
        return min(self.memory(choice, units) for choice in self._found[count])

    def _combine(self, most: int) -> list[list[StageRecompute]]:
        """Return, for each number of layers, the choices that no other betters in time and memory, sorted by time."""
        by_count: list[list[StageRecompute]] = [[] for _ in range(most + 1)]
        for index, layer in enumerate(self.layers):
            one = tuple(int(at == index) for at in range(len(self.layers)))
            last = self._measures(layer.runs, head=self.head)
            for count in range(1, most + 1):
                added = (
                    [StageRecompute(layer.time, last.kept(), last.kept(during_backward=True), one)]
                    if count == 1
                    else []
                )
                for time, kept, backward, counts in by_count[count - 1]:
                    added.append(
                        StageRecompute(
                            time + layer.time,
                            kept + layer.kept,
                            max(backward + layer.kept, layer.backward),
                            (*counts[:index], counts[index] + 1, *counts[index + 1 :]),
                        )
                    )
                by_count[count] = _undominated(by_count[count] + added)
            if not layer.runs:
                self.plain = [choices[0] if choices else _NO_LAYERS for choices in by_count]
        return by_count


class _Around:
    """What there is around an op of such a stage between its neighbours beside what its units keep.

    messages: the activation and the gradient that enter it; those that leave it come when others have gone.
    """

    def __init__(self, costs: Costs, embed: bool, head: bool, kinds: Sequence[LayerKinds], mixed: Sequence[LayerKinds]):
        self._costs, self._mixed = costs, mixed
        layer, own = (make_stage([()], 0, *ends, kinds) for ends in ((False, False), (embed, head)))
        stages = (*(() if embed else (layer,)), own, *(() if head else (layer,)))
        bound = BoundCosts(Program("neighbours", stages, ((),) * len(stages), uniform(1)), costs)
        self.messages = sum(entering(bound, 0 if embed else 1))
        self._known: dict[tuple[Runs, ...], float] = {}
        self._at_head = self._most([()], ("workspace",), head=True) if head else 0.0
        self._at_embedding = self._most([], ("saved", "workspace"), embed=True) if embed else 0.0

    def backward(self, runs: tuple[Runs, ...], kept: float, backward: float) -> float:
        """Return the most that there is in the backward of a unit which keeps `kept`, and `backward` with what is made
        again: at the head, when nothing has been made again; at a layer; or at the embedding, when all else has gone.
        runs: what layers of the stage recompute, the first layers' first, each at most twice.
        """
        if runs not in self._known:
            self._known[runs] = self._most(runs, ("workspace",))
        return max(kept + self._at_head, backward + self._known[runs], self._at_embedding)

    def _most(self, runs: Sequence[Runs], kinds: Sequence[str], embed: bool = False, head: bool = False) -> float:
        """Return what such buffers of a stage with these layers have."""
        stages = [make_stage(runs, 0, embed, head, (own,)) for own in self._mixed]
        return max(
            sum(bound.size(Buffer(kind, 0, 0, 0, 0)) for kind in kinds)
            for bound in (_alone(self._costs, stage) for stage in stages)
        )


def _alone(costs: Costs, stage: Stage) -> BoundCosts:
    return BoundCosts(Program("one stage", (stage,), ((Op("F", 0, 0), Op("B", 0, 0)),), uniform(1)), costs)


_NO_LAYERS = StageRecompute(0.0, 0.0, 0.0, ())


def _undominated(choices: list[StageRecompute]) -> list[StageRecompute]:
    """Return the choices that no other betters in time and memory, sorted by time."""
    kept: list[float] = []  # of those that none so far betters in memory: what they keep, rising,
    backward: list[float] = []  # and what they need in a backward, falling
    remaining = []
    for choice in sorted(choices):
        at = bisect_right(kept, choice.kept)
        if at and backward[at - 1] <= choice.backward:
            continue
        end = at
        while end < len(kept) and backward[end] >= choice.backward:
            end += 1
        kept[at:end], backward[at:end] = [choice.kept], [choice.backward]
        remaining.append(choice)
    return remaining
