"""How many pieces of each kind an op works on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from helixpipe.common.bounded import FEW, BoundedDict
from helixpipe.program.stages import Piece


class CountsByKind:
    """kinds: (kind, shares, number) of pieces that are of each kind."""

    def __init__(self, pieces: Sequence[Piece]):
        counts = Counter((piece.kind, piece.shares) for piece in pieces)
        self.kinds = tuple((*kind, count) for kind, count in counts.items())


class PieceCounts:
    """Counts of equal pieces are one object. Most pieces are asked about again and again, and to compare all of a model
    takes longer than an answer: the same tuple of them is known by its identity.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Piece, ...], CountsByKind] = BoundedDict(FEW)
        self._same: dict[int, tuple[tuple[Piece, ...], CountsByKind]] = BoundedDict(FEW)

    def of(self, pieces: tuple[Piece, ...]) -> CountsByKind:
        same = self._same.get(id(pieces))
        if same is None or same[0] is not pieces:
            counts = self._known.get(pieces)
            if counts is None:
                counts = self._known[pieces] = CountsByKind(pieces)
            same = self._same[id(pieces)] = pieces, counts
        return same[1]
