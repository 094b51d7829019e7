"""Recomputation: which pieces drop their activations after the forward, and when they are recomputed.

What a stage recomputes is part of the program (`Stage.recompute`). When is too: a unit with an R op recomputes there,
and one without does it inside its backward, run by run, once the gradient has come. `place_early` adds R ops where a
rank would otherwise wait, which takes recomputation off the path from one rank's backward to the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from helixpipe.common.errors import ScheduleError
from helixpipe.common.flags import check_ranges, option
from helixpipe.common.ranges import MOST_LAYERS
from helixpipe.costs.piece_kinds import KINDS, MODULES
from helixpipe.program.program import Program
from helixpipe.program.stages import Piece, Stage


@dataclass(frozen=True)
class RecomputeOptions:
    """Megatron-LM's flags, and two of our own: `without-attention` (HelixPipe, 2025) and `--no-recompute-early`."""

    recompute_granularity: Literal["selective", "full", "without-attention"] | None = option(
        None,
        "Recompute activations in the backward: full, whole layers; selective, core attention alone (Korthikanti et "
        "al., 2022); without-attention, all but core attention and its projection, queries, keys and values as well.",
    )
    recompute_activations: bool = option(False, "The same as --recompute-granularity selective.")
    recompute_method: Literal["uniform", "block"] | None = option(
        None,
        "With full: uniform, all layers, in groups of --recompute-num-layers; block, the first --recompute-num-layers "
        "of each stage, one by one (default: uniform). With without-attention: block.",
    )
    recompute_num_layers: int | None = option(
        None,
        "Layers recomputed together (uniform) or in each stage (block) (default: 1).",
        at_least=1,
        at_most=MOST_LAYERS,
    )
    recompute_modules: tuple[str, ...] | None = option(
        None, "With selective: what to recompute (default: core_attn).", choices=tuple(MODULES), nargs="+"
    )
    recompute_early: bool = option(True, "Recompute in idle time, before the gradient comes, where memory allows.")

    @property
    def granularity(self) -> str | None:
        return "selective" if self.recompute_activations else self.recompute_granularity

    def check(self) -> None:
        """Raise ScheduleError, naming the flag, for options that do not go together."""
        check_ranges(self, ScheduleError)
        given = self.recompute_granularity
        if self.recompute_activations and given not in (None, "selective"):
            raise ScheduleError(f"--recompute-activations means selective, but --recompute-granularity is {given}.")
        granularity = self.granularity
        for flag, value, needed in (
            ("--recompute-method", self.recompute_method, "full"),
            ("--recompute-num-layers", self.recompute_num_layers, "full"),
            ("--recompute-modules", self.recompute_modules, "selective"),
        ):
            if value is None or granularity == needed:
                continue
            if granularity == "without-attention" and needed == "full" and self.recompute_method in (None, "block"):
                if self.recompute_method == "block":
                    continue
                needed = f"{granularity} --recompute-method block"
            shown = " ".join(value) if isinstance(value, tuple) else value
            raise ScheduleError(f"{flag} {shown} needs --recompute-granularity {needed}.")

    def stages(self, stages: Iterable[Stage]) -> tuple[Stage, ...]:
        """Return the stages with what these options recompute."""
        return tuple(replace(stage, recompute=self.runs(stage.pieces)) for stage in stages)

    def runs(self, pieces: Sequence[Piece]) -> tuple[tuple[Piece, ...], ...]:
        """Return the runs of a stage's pieces that these options recompute; embed and head are never among them."""
        granularity = self.granularity
        if granularity is None:
            return ()
        if granularity == "full":
            layers = [tuple(group) for layer, group in groupby(pieces, key=lambda piece: piece.layer) if layer >= 0]
            count = self.recompute_num_layers or 1
            if self.recompute_method == "block":
                return tuple(layers[:count])
            return tuple(sum(layers[at : at + count], ()) for at in range(0, len(layers), count))
        if granularity == "selective":
            chosen = {MODULES[module] for module in self.recompute_modules or ("core_attn",)}
            return tuple((piece,) for piece in pieces if piece.role in chosen)
        own = list(dict.fromkeys(piece.layer for piece in pieces if piece.layer >= 0))
        some = frozenset(own[: self.recompute_num_layers or 1] if self.recompute_method == "block" else own)
        runs = groupby(pieces, key=lambda piece: KINDS[piece.kind].kept_for_attention or piece.layer not in some)
        return tuple(tuple(run) for keep, run in runs if not keep)


def check_recomputes(name: str, program: Program, options: RecomputeOptions) -> None:
    """Raise ScheduleError where the options ask for something else than the program of a file, which says itself what
    is recomputed and where."""
    options.check()
    if options.granularity is not None and (program.activations or options.stages(program.stages) != program.stages):
        raise ScheduleError(f"{name} says itself what is recomputed, which is not what the recompute flags ask for.")
    if not options.recompute_early and any(op.kind == "R" for ops in program.ranks for op in ops):
        raise ScheduleError(f"--no-recompute-early does not fit {name}, which says itself where to recompute.")
