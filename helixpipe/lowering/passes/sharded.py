"""Weights in parts over data-parallel ranks: gathered before an op, gradients scattered after it.

Every data-parallel rank runs the same stream and has 1/n of the weights of its pipeline rank's stages
(`Program.sharded`). An op that computes with weights (F, R, B, I) needs them whole: a gather brings the parts together.
Ops of one stage that follow each other on a rank, with none of another stage's between, share one gather; with
`Program.gathered_once` all ops of a stage do. A B or W makes gradients of whole weights, of which a scatter leaves each
rank its part of the sum.

Both are collectives of the data-parallel ranks, which in the graph of one pipeline are a single rank. What they wait
for, and who for them, is all on that rank, in the direction of its order, so no order that was possible becomes
impossible:

- a gather waits for the op that lies `AHEAD` ops before the first that needs it, so that no more than that many
  stages' weights are there beside those in use;
- an op that makes gradients waits for the scatter of the `AHEAD` + 1 before it: no more are on their way;
- the sum over a stage's replicas waits for the scatters of their last backwards.

Weights that travel are gathered and let go by the instructions that send them, and their gradients scattered by those
that take them in; of these nothing is counted here.
"""

from __future__ import annotations

from collections.abc import Iterator

from helixpipe.lowering.graph import Draft
from helixpipe.program.program import Unit
from helixpipe.program.tasks import Buffer

AHEAD = 1
"""Ops that run while the weights of the next come, or the gradients of one before leave."""


def sharded_weights(draft: Draft) -> None:
    """Add the gathers and scatters of a program whose weights are in parts."""
    program = draft.program
    if program.sharded == 1:
        return
    copied = [frozenset(program.copied_stages(rank)) for rank in range(program.num_ranks)]
    last: dict[tuple[int, int], int] = {}  # of each rank and stage the last scatter
    for rank, tasks in enumerate(draft.rank_tasks):
        own = [task for task in tasks if _has_weights(draft, task) and draft.ops[task].stage not in copied[rank]]
        for users in _runs(draft, own):
            _gather(draft, rank, users, tasks.start)
        if not program.forward_only:
            _scatters(draft, rank, [task for task in own if draft.ops[task].kind in "BW"], last)
    for total, ranks, stage in draft.replica_sums:
        for rank in ranks:
            if (rank, stage) in last:
                draft.wait(total, last[rank, stage])


def _has_weights(draft: Draft, task: int) -> bool:
    return draft.program.stages[draft.ops[task].stage].has_weights


def _runs(draft: Draft, own: list[int]) -> Iterator[list[int]]:
    """Group a rank's ops with weights into runs that share a gather."""
    ops, run = draft.ops, list[int]()
    if draft.program.gathered_once:
        of_stage: dict[int, list[int]] = {}
        for task in own:
            if ops[task].kind != "W":
                of_stage.setdefault(ops[task].stage, []).append(task)
        yield from of_stage.values()
        return
    for task in own:
        if ops[task].kind == "W":
            continue
        if run and ops[task].stage != ops[run[0]].stage:
            yield run
            run = []
        run.append(task)
    if run:
        yield run


def _gather(draft: Draft, rank: int, users: list[int], start: int) -> None:
    stage = draft.ops[users[0]].stage
    task = draft.transfer("gather", (rank,), Unit(stage, -1, -1), consumer=users[0])
    draft.buffer(Buffer("gathered", rank, stage), task, users, users[-1])
    before = users[0] - AHEAD - 1
    if before >= start:  # a rank's ops are numbered in their order
        draft.wait(task, before)


def _scatters(draft: Draft, rank: int, makers: list[int], last: dict[tuple[int, int], int]) -> None:
    scatters = list[int]()
    for number, maker in enumerate(makers):
        op = draft.ops[maker]
        made = draft.buffer(Buffer("made_gradients", rank, op.stage), maker)
        task = draft.transfer("scatter", (rank,), Unit(op.stage, -1, -1), producer=maker, takes=(made,))
        if number > AHEAD:
            draft.wait(maker, scatters[number - AHEAD - 1])
        scatters.append(task)
        last[rank, op.stage] = task
