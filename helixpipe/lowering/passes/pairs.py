"""Pairs: a forward and the backward of another unit that run at the same time (`Program.pairs`).

A pair is one task in all but number: it starts when both ops could, and what waits for either waits for both. So edges
into its second op lead into its first, edges out of its first leave its second, and in the one order the two stand next
to each other.
"""

from __future__ import annotations

from helixpipe.lowering.graph import Draft


def pairs(draft: Draft) -> None:
    """Move the edges of all pairs. After all other passes."""
    program = draft.program
    if not program.pairs:
        return
    graph = draft.graph  # such a program has no compiled one
    for tasks in graph.rank_tasks:
        graph.pairs.update({task: task + 1 for task in tasks if graph.ops[task] in program.pairs})
    first_of = {second: first for first, second in graph.pairs.items()}
    for successors in graph.successors:
        successors[:] = [first_of.get(task, task) for task in successors]
    for first, second in graph.pairs.items():
        graph.successors[second] += graph.successors[first]
        graph.successors[first].clear()
        graph.num_dependencies[first] += graph.num_dependencies[second]
        graph.num_dependencies[second] = 0
