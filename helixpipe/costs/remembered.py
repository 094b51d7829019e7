"""Costs that are asked once: for searches that bind the same costs to one program after another."""

from __future__ import annotations

from collections.abc import Sequence

from helixpipe.program.costs import Contents, Costs, Load, Work
from helixpipe.program.stages import LayerKinds, Piece


class RememberedCosts:
    """The answers of `costs`, kept by what was asked."""

    def __init__(self, costs: Costs):
        self._costs = costs
        self._known: dict[Work | Load | Contents, float] = {}

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
