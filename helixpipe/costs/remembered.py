"""Costs that are asked once: for searches that bind the same costs to one program after another."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from helixpipe.program.costs import Contents, Costs, Load, Work
from helixpipe.program.stages import Activations, LayerKinds, Piece
from helixpipe.program.workload import Workload

Likeness = tuple[str, int, int, int, bool]
"""What the size of a buffer of a program depends on."""


@dataclass
class KnownAnswers:
    """What costs have answered of programs that have all in common but their orders and their units' activations.

    Keys have identities of extents, which live as long as the workload, and of activations. `BoundCosts` fills it.
    """

    workload: Workload | None = None
    activations: dict[Activations, Activations] = field(default_factory=dict)
    op_times: dict[tuple[object, ...], float] = field(default_factory=dict)
    recompute_times: dict[tuple[int, int, int], float] = field(default_factory=dict)
    transfer_times: dict[tuple[str, Hashable, Likeness], float] = field(default_factory=dict)
    handling_times: dict[tuple[str, int, Likeness, bool], float] = field(default_factory=dict)
    sizes: dict[Likeness, float] = field(default_factory=dict)
    workspaces: dict[tuple[str, Likeness], float] = field(default_factory=dict)


class RememberedCosts:
    """The answers of `costs`, kept by what was asked."""

    def __init__(self, costs: Costs):
        self._costs = costs
        self._known: dict[Work | Load | Contents, float] = {}
        self._answers: dict[Hashable, KnownAnswers] = {}

    def answers(self, about: Hashable) -> KnownAnswers:
        """Return what was answered of programs that have `about` in common, to be added to."""
        return self._answers.setdefault(about, KnownAnswers())

    @property
    def by_kind(self) -> bool:
        return getattr(self._costs, "by_kind", False)

    @property
    def link_class(self) -> Callable[[int, int], Hashable] | None:
        return getattr(self._costs, "link_class", None)

    @property
    def captures(self) -> bool:
        return getattr(self._costs, "captures", False)

    @property
    def memory_unit(self) -> str:
        return self._costs.memory_unit

    def layer_kinds(self, layers: int) -> tuple[LayerKinds, ...]:
        return self._costs.layer_kinds(layers)

    @property
    def head_kind(self) -> str:
        return self._costs.head_kind

    def op_time(self, work: Work) -> float:
        found = self._known.get(work)
        if found is None:
            found = self._known[work] = self._costs.op_time(work)
        return found

    def transfer_time(self, load: Load) -> float:
        found = self._known.get(load)
        if found is None:
            found = self._known[load] = self._costs.transfer_time(load)
        return found

    def handling_time(self, load: Load, sends: bool) -> float:
        return self._costs.handling_time(load, sends)

    def size(self, contents: Contents) -> float:
        found = self._known.get(contents)
        if found is None:
            found = self._known[contents] = self._costs.size(contents)
        return found

    def static_memory(self, pieces: Sequence[Piece]) -> float:
        return self._costs.static_memory(pieces)

    def static_host_memory(self, pieces: Sequence[Piece]) -> float:
        return self._costs.static_host_memory(pieces)

    def update_memory(self, pieces: Sequence[Piece]) -> float:
        return self._costs.update_memory(pieces)
