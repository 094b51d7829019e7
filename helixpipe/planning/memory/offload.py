"""Offloading of activations: its flags, and their effect on a program.

What a unit offloads is part of the program (`Activations.offload`), and so is how early it is copied back (`ahead`).
With a share every unit offloads as much; with `auto` a search decides what to keep, to offload and to recompute
(`offload_choice.choose`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from types import MappingProxyType

from helixpipe.common.errors import ScheduleError
from helixpipe.common.flags import check_ranges, option
from helixpipe.costs.counted_bytes import CountsBytes
from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.build import graph_of
from helixpipe.lowering.graph import Graph
from helixpipe.lowering.lower import scheduled
from helixpipe.lowering.order import TaskTimes
from helixpipe.program.costs import Costs
from helixpipe.program.program import Program, Unit
from helixpipe.program.stages import PIECE_KINDS, Piece

MODULES: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "norm",
        "qkv_linear": "qkv",
        "core_attn": "attn",
        "attn_proj": "proj",
        "mlp": "mlp",
        "embedding": "embed",
        "output_layer": "head",
    }
)
"""Values of `--offload-modules`, Megatron-LM's where it has them, and the role of the pieces that each means."""

LATENESS = 1.25
"""The factor by which a copy to the device may exceed its predicted time before its op has to wait."""


@dataclass(frozen=True)
class OffloadOptions:
    """Flags about activations in the host's memory; names and defaults are Megatron-LM's where it has them."""

    offload_activations: str | None = option(
        None,
        "Activations that wait in the host's memory from the forward to the backward: auto, as many as the memory "
        "limit needs, beside recomputation, at the least predicted time (nothing where all fits); a share from 0 to 1, "
        "of every unit alike; off (default: off; auto for sppo).",
        metavar="auto|SHARE|off",
        at_least=0,
        at_most=1,
        words=("auto", "off"),
        whole=False,
    )
    offload_modules: tuple[str, ...] | None = option(
        None, "What may be offloaded (default: everything).", choices=tuple(MODULES), nargs="+"
    )
    min_offloaded_tensor_size: int = option(
        1024 * 1024, "Saved tensors of fewer elements stay on the device.", metavar="ELEMENTS", at_least=0
    )
    kv_blocks: bool = option(
        False,
        "Keep keys and values of a sequence in chunks, and the sums of their gradients, in a block for each chunk that "
        "goes when its backward has run; attention runs block by block.",
    )

    @property
    def auto(self) -> bool:
        return self.offload_activations == "auto"

    @property
    def share(self) -> float:
        """The share that every unit offloads; 0 for off."""
        text = self.offload_activations
        return 0.0 if text in (None, "off", "auto") else float(text or "")

    def check(self) -> None:
        """Raise ScheduleError, naming the flag, for values that cannot be."""
        check_ranges(self, ScheduleError)
        if not self.auto and not self.share and self.offload_modules is not None:
            raise ScheduleError("--offload-modules needs --offload-activations auto or a share.")

    def runs(self, pieces: Iterable[Piece]) -> tuple[tuple[Piece, ...], ...]:
        """Return the runs of a stage's pieces that may be offloaded."""
        roles = {MODULES[module] for module in self.offload_modules} if self.offload_modules else set(PIECE_KINDS)
        return tuple(tuple(run) for may, run in groupby(pieces, key=lambda piece: piece.role in roles) if may)


def with_shares(program: Program, options: OffloadOptions, shares: Mapping[Unit, float], costs: Costs) -> Program:
    """Return the program with these units offloading these shares of what may be offloaded, all above 0, and no others.
    `with_ahead` says when it is copied back.
    """
    own = {unit: replace(each, offload=()) for unit, each in program.activations.items()}
    runs = [options.runs(stage.pieces) for stage in program.stages]
    for unit, share in shares.items():
        offload = tuple((run, share) for run in runs[unit.stage])
        own[unit] = replace(program.activations_of(unit), offload=offload)
    element = costs.bytes.layout.element_bytes if isinstance(costs, CountsBytes) else 0
    return replace(program, activations=own, min_offloaded_bytes=options.min_offloaded_tensor_size * element)


def with_ahead(program: Program, costs: Costs, graph: Graph, times: TaskTimes) -> Program:
    """Return the program with everything that is offloaded copied back just early enough in the simulation.

    graph, times: of the program, or of one with the same ops. Copies in of a rank follow each other, so the last one
    has to have ended when its op starts, and the one before when both that one and its own op start.
    """
    bound, activations = BoundCosts(program, costs), dict(program.activations)
    for tasks in graph.rank_tasks:
        places = {graph.ops[task]: place for place, task in enumerate(tasks)}
        next_start = float("inf")
        for place in range(len(tasks) - 1, -1, -1):
            op = graph.ops[tasks[place]]
            own = program.activations_of(op.unit)
            first = op.kind == "R" or (op.kind in "BI" and op._replace(kind="R") not in places)
            if not own.offload or not first:
                continue
            duration = costs.transfer_time(bound.load("fetch", (0,), op.unit)) * LATENESS
            next_start = min(times.start[tasks[place]], next_start) - duration
            ahead = 0  # ops that have to be waiting for the copy at most
            while place - ahead - 1 >= 0 and times.end[tasks[place - ahead - 1]] > next_start:
                ahead += 1
            activations[op.unit] = replace(own, ahead=ahead)
    return replace(program, activations=activations)


def timed(program: Program, costs: Costs) -> tuple[Graph, TaskTimes]:
    return graph_of(program), scheduled(program, costs)


def offloaded(program: Program, options: OffloadOptions, costs: Costs) -> Program:
    """Return the program with a share of every unit offloaded, as the options say; unchanged for `auto`, and if nothing
    is to be offloaded or there is no backward.
    """
    options.check()
    share = options.share
    if not share or program.forward_only:
        return program
    program = with_shares(program, options, dict.fromkeys(program.units(), share), costs)
    return with_ahead(program, costs, *timed(replace(program, activations={}), costs))


def check_offloads(name: str, program: Program, options: OffloadOptions) -> None:
    """Raise ScheduleError where flags ask a file, which says itself what is offloaded, for something else."""
    options.check()
    if options.offload_activations not in (None, "off") and any(each.offload for each in program.activations.values()):
        raise ScheduleError(f"{name} says itself what is offloaded; leave --offload-activations out.")
