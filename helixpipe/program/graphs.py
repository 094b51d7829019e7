"""What can run as CUDA graphs (`helixpipe.model.graphs`): which pieces, and which stages of a rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from helixpipe.program.program import Program
from helixpipe.program.stages import EXPERTS, LATENT_QKV, Piece


def in_graphs(piece: Piece) -> bool:
    """Whether a piece can be part of a captured run: no experts, and of latent attention none with its keys."""
    return piece.role in ("norm", "qkv", "proj", "mlp") and piece.kind not in (EXPERTS, LATENT_QKV)


def runs(pieces: Sequence[Piece]) -> Iterator[tuple[bool, tuple[Piece, ...]]]:
    """Yield the runs of pieces that are captured together, and those between them, each with which of both it is."""
    return ((captured, tuple(part)) for captured, part in groupby(pieces, in_graphs))


def stages_in_graphs(program: Program, rank: int) -> frozenset[int]:
    """Return the stages whose ops can run as graphs on a rank: with its own whole weights, and with backwards that make
    all gradients, one after another."""
    ops = program.ranks[rank]
    if program.sharded > 1 or program.pairs or program.forward_only:
        return frozenset()
    split = {op.stage for op in ops if op.kind == "W"}
    return frozenset(op.stage for op in ops) - split - frozenset(program.copied_stages(rank))
