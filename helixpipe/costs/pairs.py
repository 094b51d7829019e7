"""Time of a forward and of a backward of another unit that run at the same time (`Program.pairs`).

What `helixpipe/model/steps.py` does, on a clock (`steps.py`): the forward takes its first step (`Layout.pauses`), then
a step whenever the backward pauses, and at the end those that are left. Embedding and head have no pauses and run
apart; so does what the backward recomputes.
"""

from __future__ import annotations

from helixpipe.common.alternate import alternate
from helixpipe.costs.steps import SteppedPieces, Streams


class PairTimes:
    """Times of pairs of a forward on one chunk and a backward on another, or on one alike. interference: the share of a
    hidden collective's time for which it holds up kernels."""

    def __init__(self, forward: SteppedPieces, backward: SteppedPieces, interference: float):
        self._forward, self._backward, self._interference = forward, backward, interference
        self._known: dict[tuple[tuple[str, ...], tuple[str, ...], str], float] = {}

    def time(self, forward: tuple[str, ...], backward: tuple[str, ...], op: str) -> float:
        """Of an F and an I or B on pieces of layers of these kinds."""
        key = forward, backward, op
        if key not in self._known:
            clock, of_forward, of_backward = Streams(), self._forward, self._backward
            own = of_forward.forward(of_forward.chain(forward), clock)
            other = of_backward.backward(of_backward.chain(backward), clock, op == "B")
            if of_forward.layout.pauses:
                alternate(own, other)
            else:
                alternate(other, own, behind=0)
            self._known[key] = clock.taken(self._interference)
        return self._known[key]
