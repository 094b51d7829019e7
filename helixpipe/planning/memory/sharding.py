"""A program whose weights are in parts over data-parallel ranks."""

from __future__ import annotations

from dataclasses import replace

from helixpipe.common.errors import ScheduleError
from helixpipe.program.program import Op, Program, Unit
from helixpipe.program.stages import LAYER_PIECES, Activations, Piece, Stage

_Runs = tuple[tuple[Piece, ...], ...]


def shared_out(program: Program, ranks: int, gathered_once: bool = False) -> Program:
    """Return the program with every rank's weights, gradients and optimizer state sharded over `ranks` data-parallel
    ranks.

    A stage's whole weights are in memory while its op runs; so that this is not more than a layer's, stages whose
    weights stay on their ranks are cut between layers, after the embedding and before the head, and their ops run one
    after the other. What runs where, and when, is as before. With one rank nothing changes. gathered_once: as of
    `Program`. Raises ScheduleError for a program that is already sharded over another number of ranks, or otherwise.
    """
    if program.sharded != 1 and program.sharded != ranks:
        raise ScheduleError(
            f"the program has weights in parts over {program.sharded} data-parallel ranks, and there are {ranks} that "
            "share them."
        )
    if ranks == program.sharded:
        if ranks > 1 and program.gathered_once != gathered_once:
            raise ScheduleError(
                "the program has weights in parts that are gathered "
                + (
                    "once a step (--data-parallel-sharding-strategy optim_grads)."
                    if program.gathered_once
                    else "for each op (--data-parallel-sharding-strategy optim_grads_params)."
                )
            )
        return program
    parts = [_parts(stage) for stage in program.stages]
    first, count = [], 0
    for own in parts:
        first.append(count)
        count += len(own)
    stages = tuple(stage for own in parts for stage in own)

    def cut(op: Op) -> list[Op]:
        numbers = range(first[op.stage], first[op.stage] + len(parts[op.stage]))
        ordered = numbers if op.kind in "FR" else reversed(numbers)
        ops = [Op(op.kind, number, op.microbatch, op.chunk) for number in ordered]
        return [each for each in ops if op.kind != "R" or recompute_of(each.unit)]

    activations = {
        Unit(first[unit.stage] + place, unit.microbatch, unit.chunk): _within(own, part, len(parts[unit.stage]))
        for unit, own in program.activations.items()
        for place, part in enumerate(parts[unit.stage])
    }

    def recompute_of(unit: Unit) -> _Runs:
        return activations[unit].recompute if unit in activations else stages[unit.stage].recompute

    orders = tuple(tuple(each for op in ops for each in cut(op)) for ops in program.ranks)
    return replace(
        program, stages=stages, ranks=orders, activations=activations, sharded=ranks, gathered_once=gathered_once
    )


def _parts(stage: Stage) -> list[Stage]:
    """Split a stage that holds whole layers into its layers; return any other unchanged."""
    if stage.owner is not None or not any(_is_layer(stage.pieces, at) for at in range(len(stage.pieces))):
        return [stage]
    cuts = [at for at in range(1, len(stage.pieces)) if _begins(stage.pieces, at)]
    bounds = zip([0, *cuts], [*cuts, len(stage.pieces)], strict=True)
    pieces = [stage.pieces[start:end] for start, end in bounds]
    return [replace(stage, pieces=own, recompute=_inside(stage.recompute, own)) for own in pieces]


def _is_layer(pieces: tuple[Piece, ...], at: int) -> bool:
    own = pieces[at : at + len(LAYER_PIECES)]
    return tuple(piece.role for piece in own) == LAYER_PIECES and len({piece.layer for piece in own}) == 1


def _begins(pieces: tuple[Piece, ...], at: int) -> bool:
    """Whether a layer or the head begins at this piece, or what remains after the embedding."""
    return pieces[at].role in ("norm", "head") or pieces[at - 1].kind == "embed"


def _inside(runs: _Runs, pieces: tuple[Piece, ...]) -> _Runs:
    kept = (tuple(piece for piece in run if piece in pieces) for run in runs)
    return tuple(run for run in kept if run)


def _within(activations: Activations, part: Stage, parts: int) -> Activations:
    offload = ((tuple(piece for piece in run if piece in part.pieces), share) for run, share in activations.offload)
    return Activations(
        _inside(activations.recompute, part.pieces),
        tuple((run, share) for run, share in offload if run),
        activations.ahead * parts,
    )
