"""Timelines of simulated and of measured runs as files: a picture (PNG, SVG, PDF), a web page, a Chrome trace.

`draw` chooses by the suffix. Timelines are drawn one below the other; those with the same unit share one time scale, so
their lengths can be compared, and the others fill the width on a scale of their own, which the picture says.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helixpipe.common.errors import UserError
from helixpipe.common.files import whole_file
from helixpipe.draw.page import draw_html
from helixpipe.draw.style import (
    KIND_STYLES,
    LANE_STYLES,
    LANES,
    copying_ranks,
    lane_of,
)
from helixpipe.program.program import Op
from helixpipe.program.timeline import OpEvent, Timeline, TransferEvent
from helixpipe.simulate.simulator import Simulation

IMAGE_SUFFIXES = (".png", ".svg", ".pdf")
DPI = 150
"""Pixels of a picture's inch."""

SUFFIXES = (*IMAGE_SUFFIXES, ".html", ".json")


def check_suffix(path: str | Path) -> None:
    """Raise UserError unless `draw` knows a format for the suffix of `path`."""
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise UserError(
            f"cannot draw {path}: its name must end in one of {', '.join(SUFFIXES)}, which chooses the format."
        )


def draw(shown: Sequence[Timeline | Simulation], path: str | Path, width: int | None = None) -> None:
    """Draw in the format that the suffix of `path` says: .png, .svg, .pdf, .html or .json (Chrome trace).

    width: pixels that a picture has at most; None: as many as its numbers need. Of a simulation the page shows memory,
    too, and what waits for what. The file appears whole or not at all. Raises UserError for another suffix, no
    timeline, or a file that cannot be written.
    """
    check_suffix(path)
    suffix = Path(path).suffix.lower()
    timelines = [each.timeline if isinstance(each, Simulation) else each for each in shown]
    if suffix in IMAGE_SUFFIXES:
        draw_png(timelines, path, width)
    elif suffix == ".html":
        draw_html(shown, path)
    else:
        with whole_file(path) as temporary:
            temporary.write_text(json.dumps(chrome_trace(timelines)) + "\n", encoding="utf-8")


def draw_png(timelines: Sequence[Timeline], path: str | Path, width: int | None = None) -> None:
    """Draw a picture: PNG, or SVG or PDF when `path` ends so. width: see `draw`. Raises UserError when the file cannot
    be written."""
    from helixpipe.draw.picture import picture  # matplotlib takes a second to import: only who draws waits for it

    figure = picture(_some(timelines), None if width is None else width / DPI)
    suffix = Path(path).suffix.lower()
    kind = suffix[1:] if suffix in IMAGE_SUFFIXES else "png"
    with whole_file(path) as temporary:
        figure.savefig(temporary, format=kind, dpi=DPI)


def chrome_trace(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Return timelines in the Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

    One process a timeline, one thread a rank and one for each of its lanes, if it copies; a complete event an op or
    copy, a flow a message. Timestamps are microseconds; a timeline without unit is shown with 1 as 1 ms.
    """
    events: list[dict[str, Any]] = []
    flows = 0
    for pid, timeline in enumerate(_some(timelines)):
        scale = 1e6 if timeline.unit == "s" else 1e3
        name = timeline.title if timeline.unit == "s" else f"{timeline.title}, 1 shown as 1 ms"
        events.append(_metadata("process_name", pid, 0, name))
        events.append(_metadata("process_sort_index", pid, 0, pid))
        for rank in range(timeline.num_ranks):
            events += _thread(pid, rank, _sort_index(rank), f"rank {rank}")
        by_op = {event.op: event for event in timeline.ops}
        for event in timeline.ops:
            args = {"kind": KIND_STYLES[event.op.kind].name, **_unit(event.op)}
            events.append(_complete(event, pid, event.rank, str(event.op), event.op.kind, scale, args))
        events += _copies(timeline, pid, scale)
        events += _collectives(timeline, pid, scale)
        for message in timeline.messages:
            producer, consumer = (by_op.get(op) if op else None for op in (message.producer, message.consumer))
            if producer is None or consumer is None or producer is consumer:  # weights come from no op
                continue
            flow = {"name": message.kind, "cat": "message", "id": flows, "pid": pid}
            flows += 1
            # A flow ties together the slices that enclose its ends, so both lie just inside their op.
            sent = producer.end - (producer.end - producer.start) / 1024
            taken = consumer.start + (consumer.end - consumer.start) / 1024
            args = {"sent": message.start, "arrived": message.end}
            events.append({"ph": "s", **flow, "tid": producer.rank, "ts": sent * scale, "args": args})
            events.append({"ph": "f", "bp": "e", **flow, "tid": consumer.rank, "ts": taken * scale})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _copies(timeline: Timeline, pid: int, scale: float) -> list[dict[str, Any]]:
    """Return the lanes of the ranks that copy, with their copies; their threads are numbered after
    those of the ranks.
    """
    events: list[dict[str, Any]] = []
    for rank in copying_ranks(timeline):
        for index, lane in enumerate(LANES):
            events += _thread(
                pid, _lane_thread(timeline, rank, lane), _sort_index(rank) + 1 + index, f"rank {rank} {lane}"
            )
    for copy in timeline.copies:
        lane = lane_of(copy)
        args = {
            "direction": LANE_STYLES[lane].name,
            _side(copy): str(copy.op),
            **_unit(copy.op),
        }
        thread = _lane_thread(timeline, copy.source, lane)
        events.append(_complete(copy, pid, thread, f"{lane} {copy.op}", "copy", scale, args))
    return events


def _collectives(timeline: Timeline, pid: int, scale: float) -> list[dict[str, Any]]:
    """Return a lane for each rank that is the first of a collective's, with these, numbered after all others."""
    events: list[dict[str, Any]] = []
    first = timeline.num_ranks * (1 + len(LANES))
    for rank in sorted({event.source for event in timeline.collectives}):
        events += _thread(pid, first + rank, _sort_index(rank) + len(LANES), f"rank {rank} collectives")
    for event in timeline.collectives:
        args = {_side(event): str(event.op), **_unit(event.op)}
        name = f"{event.kind} {event.op}"
        events.append(_complete(event, pid, first + event.source, name, "collective", scale, args))
    return events


def _side(event: TransferEvent) -> str:
    """Return whether a transfer comes after or before its op."""
    return "after" if event.consumer is None else "before"


def _lane_thread(timeline: Timeline, rank: int, lane: str) -> int:
    return timeline.num_ranks + len(LANES) * rank + LANES.index(lane)


def _sort_index(rank: int) -> int:
    """Return the sort index of a rank's thread; those of its lanes follow."""
    return (1 + len(LANES)) * rank


def _unit(op: Op) -> dict[str, int]:
    return {"stage": op.stage, "microbatch": op.microbatch, "chunk": op.chunk}


def _complete(
    event: OpEvent | TransferEvent,
    pid: int,
    tid: int,
    name: str,
    category: str,
    scale: float,
    args: dict[str, Any],
) -> dict[str, Any]:
    duration = max(event.end - event.start, 0.0) * scale
    where = {"pid": pid, "tid": tid, "ts": event.start * scale}
    return {"ph": "X", "name": name, "cat": category, **where, "dur": duration, "args": args}


def _thread(pid: int, tid: int, sort_index: int, name: str) -> list[dict[str, Any]]:
    return [_metadata("thread_name", pid, tid, name), _metadata("thread_sort_index", pid, tid, sort_index)]


def _some(timelines: Sequence[Timeline]) -> Sequence[Timeline]:
    if not timelines:
        raise UserError("there is no timeline to draw.")
    return timelines


def _metadata(kind: str, pid: int, tid: int, value: str | int) -> dict[str, Any]:
    key = "sort_index" if kind.endswith("sort_index") else "name"
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {key: value}}
