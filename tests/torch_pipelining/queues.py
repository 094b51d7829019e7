"""How long the actions of torch's runtime take where sends and receives wait in queues, and whether they ever end.

As with NCCL without buffers: a host issues its actions in turn and waits for none; what computes runs in the order
issued, and waits for what was received for it. A send or receive starts when all ops issued before it have ended and it
is at the head of its queue, and ends with its other end. Times of a run are the longest paths of one graph, in which a
message is one task of both its queues; the run stops where the graph has a circle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

from helixpipe.program.text import parse_cell

Queues = Literal["pair", "direction", "rank"]
"""One queue for each pair of ranks (NCCL's communicator of both directions), for each direction of it, for all that a
rank does."""
TIMES = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
Message = tuple[str, int, int]
"""F or B, the stage that receives it, its microbatch."""


def makespan(rows: Sequence[Sequence[str]], message_time: float, queues: Queues) -> float | None:
    """The time until all has ended, or None if it never does."""
    after: dict[object, list[object]] = defaultdict(list)
    waits: dict[object, int] = defaultdict(int)
    time: dict[object, float] = {}
    home = {op.stage: rank for rank, row in enumerate(rows) for cell in row for op in parse_cell(cell)}

    def edge(one: object, other: object) -> None:
        after[one].append(other)
        waits[other] += 1

    for row in rows:
        last: object = None
        heads: dict[object, object] = {}
        received: set[Message] = set()
        for cell in row:
            for op in parse_cell(cell):
                time[op] = TIMES[op.kind]
                if last is not None:
                    edge(last, op)
                last, brought = op, ("F" if op.kind == "F" else "B", op.stage, op.microbatch)
                if op.kind != "W" and brought in received:
                    edge(brought, op)
            if "SEND" not in cell and "RECV" not in cell:
                continue
            message, peer, sends = ends(cell)
            time[message] = message_time
            if not sends:
                received.add(message)
            if last is not None:
                edge(last, message)
            queue: object = {"pair": home[peer], "direction": (home[peer], sends), "rank": None}[queues]
            if queue in heads:
                edge(heads[queue], message)
            heads[queue] = message
    return _longest_path(time, after, waits)


def ends(cell: str) -> tuple[Message, int, bool]:
    """Of a send or receive its message, the stage at its other end, and whether it sends."""
    place = cell.index("_")
    stage, word, direction = cell[: place - 4], cell[place - 4 : place], cell[place + 1]
    own, step = int(stage), 1 if direction == "F" else -1
    sends = word == "SEND"
    return (direction, own + step if sends else own, int(cell[place + 2 :])), own + step if sends else own - step, sends


def _longest_path(
    time: dict[object, float], after: dict[object, list[object]], waits: dict[object, int]
) -> float | None:
    ready = [task for task in time if not waits[task]]
    start: dict[object, float] = defaultdict(float)
    for task in ready:  # grows
        for other in after[task]:
            start[other] = max(start[other], start[task] + time[task])
            waits[other] -= 1
            if not waits[other]:
                ready.append(other)
    return max(start[task] + time[task] for task in ready) if len(ready) == len(time) else None
