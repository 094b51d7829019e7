"""Costs that are asked once: for searches that bind the same costs to one program after another."""

from __future__ import annotations

from collections.abc import Sequence

from helixpipe.program.costs import Contents, Costs, Payload, Sharing, Work
from helixpipe.program.stages import Piece


class RememberedCosts:
    """What `costs` say, kept by what was asked."""

    def __init__(self, costs: Costs):
        self._costs = costs
        self._known: dict[Work | Payload | Contents, float] = {}

    @property
    def memory_unit(self) -> str:
        return self._costs.memory_unit

    def op_time(self, work: Work) -> float:
        found = self._known.get(work)
        if found is None:
            found = self._known[work] = self._costs.op_time(work)
        return found

    def message_time(self, payload: Payload) -> float:
        found = self._known.get(payload)
        if found is None:
            found = self._known[payload] = self._costs.message_time(payload)
        return found

    def sharing_time(self, sharing: Sharing) -> float:
        return self._costs.sharing_time(sharing)

    def size(self, contents: Contents) -> float:
        found = self._known.get(contents)
        if found is None:
            found = self._known[contents] = self._costs.size(contents)
        return found

    def copy_time(self, nbytes: float, inward: bool) -> float:
        return self._costs.copy_time(nbytes, inward)

    def handling_time(self, payload: Payload, sends: bool) -> float:
        return self._costs.handling_time(payload, sends)

    def copying_time(self, nbytes: float, inward: bool) -> float:
        return self._costs.copying_time(nbytes, inward)

    def static_memory(self, pieces: Sequence[Piece]) -> float:
        return self._costs.static_memory(pieces)

    def static_host_memory(self, pieces: Sequence[Piece]) -> float:
        return self._costs.static_host_memory(pieces)
