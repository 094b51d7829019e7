"""Costs scaled to what a run has measured: each rank's ops, each link's messages and each rank's copies by a factor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from helixpipe.adapt.reports import Link, Stage
from helixpipe.program.costs import Contents, Costs, Load, Work
from helixpipe.program.program import Program
from helixpipe.program.stages import LayerKinds, Piece

ALIKE: Mapping[str, str] = {"F": "FR", "R": "RF", "B": "BIW", "I": "IBW", "W": "WBI"}
"""The kinds of ops whose factor stands for a kind's, the first that was measured."""


@dataclass(frozen=True)
class MeasuredCosts:
    """`base`, and what its times are multiplied by.

    home: the stage that each piece was measured in. stages: factors of the ops of a kind in a stage. links: of messages
    from one rank to another. copies: of copies to the host and back, on the slowest rank: costs do not know of which
    rank a copy is. A link or stage that was not measured takes the median of those that were.
    """

    base: Costs
    home: Mapping[Piece, int]
    stages: Mapping[Stage, float]
    links: Mapping[Link, float]
    copies: float = 1.0

    @property
    def captures(self) -> bool:
        return getattr(self.base, "captures", False)

    @property
    def memory_unit(self) -> str:
        return self.base.memory_unit

    def layer_kinds(self, layers: int) -> tuple[LayerKinds, ...]:
        return self.base.layer_kinds(layers)

    @property
    def head_kind(self) -> str:
        return self.base.head_kind

    def op_time(self, work: Work) -> float:
        return self.base.op_time(work) * self._factor(work)

    def transfer_time(self, load: Load) -> float:
        time = self.base.transfer_time(load)
        if load.contents.kind == "offloaded":
            return time * self.copies
        if len(load.ranks) != 2:
            return time
        return time * self.links.get((load.ranks[0], load.ranks[1]), _middle(self.links.values()))

    def handling_time(self, load: Load, sends: bool) -> float:
        return self.base.handling_time(load, sends)

    def size(self, contents: Contents) -> float:
        return self.base.size(contents)

    def static_memory(self, pieces: Sequence[Piece]) -> float:
        return self.base.static_memory(pieces)

    def static_host_memory(self, pieces: Sequence[Piece]) -> float:
        return self.base.static_host_memory(pieces)

    def update_memory(self, pieces: Sequence[Piece]) -> float:
        return self.base.update_memory(pieces)

    def _factor(self, work: Work) -> float:
        """Return the mean factor of the stages that the pieces were measured in."""
        if not work.pieces:
            return 1.0
        homes = [self.home.get(piece, -1) for piece in work.pieces]
        return sum(self._of_stage(work.kind, home) for home in homes) / len(homes)

    def _of_stage(self, kind: str, stage: int) -> float:
        for other in ALIKE[kind]:
            if (other, stage) in self.stages:
                return self.stages[other, stage]
        return _middle(self.stages.values())


def measured_costs(
    base: Costs,
    program: Program,
    stages: Mapping[Stage, float],
    links: Mapping[Link, float],
    copies: float = 1.0,
) -> MeasuredCosts:
    """Return the costs of what was measured while `program` ran."""
    home = {piece: number for number, stage in enumerate(program.stages) for piece in stage.pieces}
    return MeasuredCosts(base, home, dict(stages), dict(links), copies)


def where_they_run(costs: Costs, program: Program) -> Costs:
    """Return the costs of a program whose layers may be in other stages than they were measured in: there they take so
    many times what they should as what was measured there."""
    if not isinstance(costs, MeasuredCosts):
        return costs
    return measured_costs(costs.base, program, costs.stages, costs.links, costs.copies)


def slowed(
    costs: MeasuredCosts, stages: Mapping[int, float], links: Mapping[Link, float], copies: float = 1.0
) -> MeasuredCosts:
    """Return the costs where these have become slower. stages: factors by stage; of the others it is 1."""
    return replace(
        costs,
        stages={(kind, stage): factor * stages.get(stage, 1.0) for (kind, stage), factor in costs.stages.items()},
        links={link: factor * links.get(link, 1.0) for link, factor in costs.links.items()},
        copies=costs.copies * copies,
    )


def _middle(factors: Iterable[float]) -> float:
    values = sorted(factors)
    return values[len(values) // 2] if values else 1.0
