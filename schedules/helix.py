"""HelixPipe: the attention of one layer for different microbatches runs on different ranks at the same time.

Geng Zhang, Shenggan Cheng, Xuanlei Zhao, Ziming Liu, Yang You, "HelixPipe: Efficient Distributed Training of Long
Sequence Transformers with Attention Parallel Pipeline Parallelism" (2025). Core attention has no weights, so only what
lies between two layers' attention, the combined stage, is tied to a rank: that after layer l-1 and before layer l is on
rank l mod p. Microbatches run in loops of p slots, a slot holds f of them (the folds), and the attention of layer l
runs on rank (l + slot + 1) mod p: that of the last slot where its QKV was, that of the first where its output
projection will be. The bubble holds combined stages alone, however long the sequence. What is shipped to run beside
attention, weights and all, leaves the combined stage and with it the bubble.

In the paper rank 0 has the head of all microbatches, one after the other, for which all others wait. Here every rank
has a copy of the head and runs that of one slot, as it would the attention of a layer after the last. Where simulation
says that this is faster, the last slot's are divided otherwise.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from types import MappingProxyType
from typing import Literal

from helixpipe.common.flags import option
from helixpipe.common.ranges import MOST_MICROBATCHES
from helixpipe.costs.by_hand import unit_costs
from helixpipe.lowering.lower import scheduled
from helixpipe.planning.catalogue import Shape
from helixpipe.planning.memory.early import peak_memory
from helixpipe.planning.order.orders import require_multiple
from helixpipe.program.costs import Costs
from helixpipe.program.program import Op, Program
from helixpipe.program.stages import Stage, even_stages, model_pieces

SHIPPED = MappingProxyType(
    {
        "none": frozenset({"attn"}),
        "qkv": frozenset({"qkv", "attn"}),
        "attention": frozenset({"norm", "qkv", "attn", "proj"}),
    }
)
"""The kinds of pieces that run with a layer's attention, for each value of `--helix-ship`."""


@dataclass(frozen=True)
class HelixOptions:
    """Options of `helix`."""

    helix_folds: int = option(
        2,
        "Microbatches a slot holds: messages of one travel while another computes.",
        at_least=1,
        at_most=MOST_MICROBATCHES,
    )
    helix_ship: Literal["none", "qkv", "attention"] = option(
        "attention",
        "Weights that travel with attention, so that less waits in the combined stage: none; qkv (the paper's); "
        "attention, which is norm, QKV and output projection.",
    )
    helix_recompute: bool = option(
        True,
        "Unless --recompute-granularity says what to recompute: as little as fits, where costs and a memory limit are "
        "known, and else all but attention.",
    )
    helix_spread_head: bool = option(
        True, "A copy of the output layer on every rank, so that heads of different microbatches run at the same time."
    )


def helix(shape: Shape, options: HelixOptions) -> Program:
    """HelixPipe: all forwards, then all backwards in exactly the reverse order (Zhang et al., HelixPipe, 2025).

    With t_c the forward of a combined stage and backwards twice that, the bubble is 3(p-1)t_c with f = 1, and more by
    (p-1) times what of a combined stage is recomputed inside the backward; at most twice that with f = 2. A head t_h,
    forward and backward, adds nothing to it where heads are spread (f = 1), and up to m(p-1)/p t_h where not. Every
    rank keeps the activations of all m microbatches of L/p layers, and copies of all shipped weights. Needs L to be a
    multiple of p, and m of pf.
    """
    p, folds = shape.ranks, options.helix_folds
    even_stages(shape.layer_kinds, p)  # refuses layers that the ranks cannot share evenly
    require_multiple("helix", shape.microbatches, p * folds, "the pipeline size times --helix-folds,")
    spread = options.helix_spread_head and p > 1
    stages = _stages(shape, SHIPPED[options.helix_ship], spread)
    programs = []
    for relieved in (False, True) if spread and folds > 1 else (False,):
        placed = _forwards(shape, folds, spread, relieved)
        ranks = tuple(_with_backwards(forwards, head=len(stages) - 1) for forwards in placed)
        programs.append(shape.in_chunks(Program("helix", stages, ranks, shape.workload)))
    if shape.recompute.granularity is None and options.helix_recompute:
        programs = [replace(each, stages=_recomputed(each, shape.costs, shape.memory_limit)) for each in programs]
    return (
        programs[0] if len(programs) == 1 else min(programs, key=partial(_makespan, costs=shape.costs or unit_costs()))
    )


def _recomputed(program: Program, costs: Costs | None, limit: float | None) -> tuple[Stage, ...]:
    """Return the stages with the least recomputation that keeps all ranks within the memory limit; without one, all but
    attention.

    A round is as many layers as there are ranks: what it keeps is spread evenly over them. Round by round first norms
    and QKV are recomputed, a quarter of a layer's linear layers for half of what it keeps, then the MLP.
    """
    ranks = program.num_ranks
    round_of = [layer // ranks for layer in range(program.num_layers)]
    rounds = round_of[-1] + 1
    counts = [(first, 0) for first in range(rounds)] + [(rounds, second) for second in range(rounds + 1)]

    def of(count: tuple[int, int]) -> tuple[Stage, ...]:
        kinds = [("norm", "qkv") * (at < count[0]) + ("mlp",) * (at < count[1]) for at in round_of]
        return tuple(_recomputing(stage, kinds) for stage in program.stages)

    if costs is None or limit is None:
        return of(counts[-1])

    def fits(count: tuple[int, int]) -> bool:
        tried = replace(program, stages=of(count))
        return max(peak_memory(tried, costs)) <= limit

    return of(counts[min(bisect_left(counts, True, key=fits), len(counts) - 1)])


def _recomputing(stage: Stage, kinds: Sequence[Collection[str]]) -> Stage:
    """Return the stage with runs of pieces recomputed; kinds: the roles of each layer's recomputed pieces."""
    runs = groupby(stage.pieces, key=lambda piece: piece.layer >= 0 and piece.role in kinds[piece.layer])
    return replace(stage, recompute=tuple(tuple(run) for again, run in runs if again))


def _makespan(program: Program, costs: Costs) -> float:
    return scheduled(program, costs).makespan


def _stages(shape: Shape, roles: frozenset[str], spread: bool) -> tuple[Stage, ...]:
    """Combined stages at the even places, attention with its neighbours of these roles at the odd ones, and the head.

    Where attention has weights, or neighbours that have some, the rank of the combined stage before it owns and ships
    them.
    """
    *chain, head = model_pieces(shape.layer_kinds)
    runs = [tuple(run) for _, run in groupby(chain, key=lambda piece: piece.role in roles)]
    stages = [Stage(run) for run in (*runs, (head,))]
    for layer in range(shape.layers if shape.ranks > 1 else 0):
        stage = 2 * layer + 1
        if stages[stage].has_weights:
            stages[stage] = replace(stages[stage], placement="shipped", owner=layer % shape.ranks)
    if spread:
        stages[-1] = replace(stages[-1], placement="replicated")
    return tuple(stages)


def _forwards(shape: Shape, folds: int, spread: bool, relieved: bool) -> list[list[Op]]:
    """Return the forwards of each rank; those of the head stand for its place in the backward.

    Layer by layer, first the combined stage of all slots, then attention. A loop's last combined stage and the next
    loop's first share rank 0 and take turns, so that loops follow each other without a gap. The head is where the
    attention of a layer L would be, or, if it is not spread, with the last combined stage.

    relieved: all wait for rank 0 while it ends the forwards and begins the backwards, so there it runs the head of the
    very last microbatch alone. Those of its slot's other folds go to rank 1, which waits longest.
    """
    p, layers, microbatches = shape.ranks, shape.layers, shape.microbatches
    head = 2 * layers + 1
    given_away = range(microbatches - folds, microbatches - 1) if relieved else range(0)
    placed: list[list[tuple[tuple[int, ...], Op]]] = [[] for _ in range(p)]
    for microbatch in range(microbatches):
        loop, slot, fold = microbatch // (p * folds), microbatch // folds % p, microbatch % folds
        for stage in range(head + 1):
            layer = stage // 2
            moves = stage % 2 if stage < head else int(spread)
            rank = (layer + slot + 1) % p if moves else layer % p
            if stage == head and microbatch in given_away:
                rank = 1
            place = (loop * layers + layer, moves, slot, fold, int(layer < layers))
            placed[rank].append((place, Op("F", stage, microbatch)))
    return [[op for _, op in sorted(ops)] for ops in placed]


def _with_backwards(forwards: list[Op], head: int) -> tuple[Op, ...]:
    """Append the backwards in reverse. A head goes forward and at once backward, in its place among the backwards, so
    that one microbatch's logits are alive at a time on a rank.
    """
    order = [op for op in forwards if op.stage != head]
    for op in reversed(forwards):
        order += [op] * (op.stage == head)
        order.append(op._replace(kind="B"))
    return tuple(order)
