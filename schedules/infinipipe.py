"""InfiniPipe: chains of chunks of about equal time, from documents of very different lengths, in one 1F1B pipeline.

Shiju Wang et al., "Data-Centric Elastic Pipeline Parallelism for Efficient Long-Context LLM Training" (2025). Long
documents are cut into chunks and short ones packed into chunks, so that microbatches have unlike numbers of chunks: a
chain each. What remains open in the paper is the order of chains and what it costs to go from one group to the next.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from helixpipe.common.collector import collector_paused
from helixpipe.common.flags import option
from helixpipe.common.ranges import MOST_CHUNKS
from helixpipe.costs.by_hand import PieceTimes
from helixpipe.planning.catalogue import Shape
from helixpipe.planning.memory.early import makespan, peak_memory, recomputed
from helixpipe.planning.memory.sharding import shared_out
from helixpipe.planning.order.grouping import NEGLIGIBLE, Chains, best_chains
from helixpipe.planning.order.orders import grouped_one_f_one_b
from helixpipe.planning.order.split_last import split_last, split_work
from helixpipe.program.program import Program
from schedules.seq1f1b import seq1f1b_zero_bubble
from schedules.zero_bubble import ZeroBubbleOptions


@dataclass(frozen=True)
class InfinipipeOptions:
    """Options of infinipipe; each field is a flag, of `helixpipe` and of training."""

    infinipipe_grouping: bool = option(
        True,
        "infinipipe: microbatches of as many chunks one after another, those of the most chunks first, each group with "
        "the warm-up that it needs; without, in the order given, all with the warm-up of the longest.",
    )
    infinipipe_sort: bool = option(
        True, "infinipipe: within a group, microbatches whose chunks take longer first, so that neighbours are alike."
    )
    infinipipe_ahead: int | None = option(
        None,
        "infinipipe: chunks that run forward ahead for each rank downstream (default: 1; or 2, where that is faster "
        "and fits into the memory that is known).",
        at_least=1,
        at_most=MOST_CHUNKS,
    )
    infinipipe_recompute: bool = option(
        True,
        "infinipipe: unless --recompute-granularity says what to recompute, as few layers as fit of each chunk on each "
        "rank, where costs and a memory limit are known.",
    )

    infinipipe_zb: bool = option(
        True,
        "infinipipe: backwards split in two as in zero bubble schedules, all of them or the last of a step, where that "
        "is faster by simulation.",
    )

    def adapts(self) -> bool:
        """Whether the schedule recomputes what the memory asks for, unless flags say what to recompute."""
        return self.infinipipe_recompute

    def quick(self) -> InfinipipeOptions:
        """Return the options with which the program is not searched for."""
        ahead = self.infinipipe_ahead or 1
        return replace(self, infinipipe_grouping=False, infinipipe_ahead=ahead, infinipipe_zb=False)


def infinipipe(shape: Shape, options: InfinipipeOptions) -> Program:
    """1F1B over the chunks of chains in groups, the longest chains first (Wang et al., InfiniPipe, 2025).

    Bubble (p-1)(F+B) of a chunk where chunks take equally long, and never more for changing from one group to the next;
    rank r keeps at most a(p-r-1) + N chunks while a group runs whose longest chain has N of them. With microbatches
    that are all cut alike and a = 1 it is seq1f1b. Where backwards are split, the step is never slower for it, nor
    slower than seq1f1b-zb's with the same memory; without a limit, that is what the fullest rank needs without a split,
    and nothing is recomputed.
    """
    ahead = options.infinipipe_ahead
    workload = shape.workload

    def orders(chains: Chains) -> list[list[int]]:
        # For each group: a(p-r-1) + N-1 F ahead; F B; no flush, but as many B more as the next group's N is less
        aheads = [chains.ahead * (shape.ranks - rank - 1) for rank in range(shape.ranks)]
        return grouped_one_f_one_b(workload, chains.groups, aheads)

    recompute = options.infinipipe_recompute and shape.recompute.granularity is None
    shape = replace(shape, costs=shape.costs or PieceTimes())
    with collector_paused():
        grouping, sort = options.infinipipe_grouping, options.infinipipe_sort
        whole = best_chains("infinipipe", orders, shape, grouping, sort, ahead, recompute)
        return _fastest_split(whole, shape, recompute) if options.infinipipe_zb and shape.ranks > 1 else whole


def _fastest_split(whole: Program, shape: Shape, recompute: bool) -> Program:
    """Return the fastest of the same with its last backwards split and of seq1f1b-zb's, as far as they fit into the
    memory: the limit, or where none is known what the fullest rank needs of the program as it is. That program if none
    is faster by more than is negligible. recompute: whether layers may be recomputed to keep to the limit.
    """
    assert shape.costs is not None
    costs, limit = shape.costs, shape.memory_limit

    def as_trained(program: Program) -> Program:
        in_parts = shared_out(program, shape.sharded, shape.gathered_once)  # whose cuts keep more until W
        return recomputed(in_parts, shape.recompute, costs, limit)

    as_given = as_trained(whole)
    best, least = whole, makespan(as_given, costs) * (1 - NEGLIGIBLE)
    most = max(peak_memory(as_given, costs)) if limit is None else limit

    def free() -> Program:
        zero_bubble = ZeroBubbleOptions(zb_recompute=recompute and limit is not None)
        found = seq1f1b_zero_bubble(replace(shape, memory_limit=most), zero_bubble)
        return replace(found, schedule=whole.schedule)

    splits = split_last(whole, costs, most, least)
    for bound, make in (*splits, (split_work(whole, costs), free)):
        if bound >= least:  # no order of it is faster
            continue
        program = make()
        trained = as_trained(program)
        time = makespan(trained, costs)
        if time < least and max(peak_memory(trained, costs)) <= most * (1 + 1e-9):
            best, least = program, time
    return best
