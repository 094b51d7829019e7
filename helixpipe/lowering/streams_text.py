"""The text form of a lowered program: every rank's instructions, for readers that are none of ours.

    {
      "format": "helixpipe streams",
      "transfers": [
        {"kind": "activation", "ranks": [0, 1], "unit": [1, 0, 0], "producer": "0F0", "consumer": "1F0", "follows": -1}
      ],
      "kept": [{"saved": 1, "deferred": 0}, {"saved": 1, "deferred": 0}],
      "ranks": [
        "RUN 0F0, SEND #0, …, RUN 0B0, FREE 0B0",
        "RECV #0, WAIT #0, RUN 1F0, RUN 1B0, FREE 1B0, …"
      ]
    }

#3 is the fourth transfer; -1 in a unit means all microbatches or chunks. kept: the most units of a rank that wait at
one time with what their F saved for B or I, and with what their I left for W. `tools/check_program.py` certifies such a
file against its program's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from helixpipe.common.files import whole_file
from helixpipe.lowering.project import Action, LoweredProgram

FORMAT = "helixpipe streams"


def save_streams(lowered: LoweredProgram, path: str | Path) -> None:
    """Write the file, all or nothing."""
    with whole_file(path) as temporary:
        Path(temporary).write_text(streams_text(lowered), encoding="utf-8")


def streams_text(lowered: LoweredProgram) -> str:
    """The content of the file."""
    transfers = [
        {
            "kind": each.kind,
            "ranks": list(each.ranks),
            "unit": list(each.unit),
            "producer": None if each.producer is None else str(each.producer),
            "consumer": None if each.consumer is None else str(each.consumer),
            "follows": each.follows,
        }
        for each in lowered.graph.transfers
    ]
    kept = [{kind: most_kept(lowered, rank, kind) for kind in ("saved", "deferred")} for rank in _ranks(lowered)]
    content = {"format": FORMAT, "transfers": transfers, "kept": kept, "ranks": list(map(", ".join, _cells(lowered)))}
    lists = (
        f'  "{name}": {_lines(value) if isinstance(value, list) else json.dumps(value)}'
        for name, value in content.items()
    )
    return "{\n" + ",\n".join(lists) + "\n}\n"


def most_kept(lowered: LoweredProgram, rank: int, kind: str) -> int:
    """The most buffers of a kind that a rank holds at once, by what its ops make and free."""
    graph, held, most = lowered.graph, 0, 0
    for instruction in lowered.streams[rank]:
        if instruction.action is Action.RUN:
            held += sum(graph.buffers[number].kind == kind for number in graph.writes[instruction.task])
            most = max(most, held)
            held -= sum(graph.buffers[number].kind == kind for number in graph.frees[instruction.task])
    return most


def _cells(lowered: LoweredProgram) -> Iterator[list[str]]:
    for stream in lowered.streams:
        yield [
            f"{each.action.value} {each.op if each.transfer is None else f'#{each.transfer.number}'}" for each in stream
        ]


def _ranks(lowered: LoweredProgram) -> range:
    return range(lowered.program.num_ranks)


def _lines(values: list[object]) -> str:
    return "[" + ",".join(f"\n    {json.dumps(value)}" for value in values) + "\n  ]"
