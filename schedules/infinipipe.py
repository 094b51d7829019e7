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
from helixpipe.planning.catalogue import Shape
from helixpipe.planning.order.grouping import Chains, best_chains
from helixpipe.planning.order.orders import grouped_one_f_one_b
from helixpipe.program.program import Op, Program


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

    def adapts(self) -> bool:
        """Whether the schedule recomputes what the memory asks for, unless flags say what to recompute."""
        return self.infinipipe_recompute

    def quick(self) -> InfinipipeOptions:
        """Return the options with which the program is not searched for."""
        return replace(self, infinipipe_grouping=False, infinipipe_ahead=self.infinipipe_ahead or 1)


def infinipipe(shape: Shape, options: InfinipipeOptions) -> Program:
    """1F1B over the chunks of chains in groups, the longest chains first (Wang et al., InfiniPipe, 2025).

    Bubble (p-1)(F+B) of a chunk where chunks take equally long, and never more for changing from one group to the next;
    rank r keeps at most a(p-r-1) + N chunks while a group runs whose longest chain has N of them. With microbatches
    that are all cut alike and a = 1 it is seq1f1b.
    """
    ahead = options.infinipipe_ahead
    stages, workload = shape.even_stages(shape.ranks), shape.workload

    def program(chains: Chains) -> Program:
        ranks = []
        for rank in range(shape.ranks):
            # For each group: a(p-r-1) + N-1 F ahead; F B; no flush, but as many B more as the next group's N is less
            order = grouped_one_f_one_b(workload, chains.groups, chains.ahead * (shape.ranks - rank - 1))
            ranks.append(tuple(Op(kind, rank, *unit) for kind, *unit in order))
        return Program("infinipipe", stages, tuple(ranks), workload)

    recompute = options.infinipipe_recompute and shape.recompute.granularity is None
    with collector_paused():
        return best_chains(program, shape, options.infinipipe_grouping, options.infinipipe_sort, ahead, recompute)
