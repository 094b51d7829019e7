"""Timelines of simulated and of measured runs as files: a picture (PNG, SVG, PDF), a web page, a Chrome trace.

`draw` chooses by the suffix. Timelines are drawn one below the other; those with the same unit share one time scale, so
their lengths can be compared, and the others fill the width on a scale of their own, which the picture says.
No torch here.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from helixpipe.common.errors import UserError
from helixpipe.common.files import whole_file
from helixpipe.draw.style import IDLE_COLOUR, KIND_STYLES, heading, is_chunked, rank_bubbles, scale_note
from helixpipe.program.program import Op
from helixpipe.program.timeline import OpEvent, Timeline

IMAGE_SUFFIXES = (".png", ".svg", ".pdf")
SUFFIXES = (*IMAGE_SUFFIXES, ".html", ".json")


def check_suffix(path: str | Path) -> None:
    """Raise UserError unless `draw` knows a format for the suffix of `path`."""
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise UserError(
            f"cannot draw {path}: its name must end in one of {', '.join(SUFFIXES)}, which chooses the format."
        )


def draw(timelines: Sequence[Timeline], path: str | Path) -> None:
    """Draw in the format that the suffix of `path` says: .png, .svg, .pdf, .html or .json (Chrome trace).

    The file appears whole or not at all. Raises UserError for another suffix, no timeline, or a file that cannot be
    written.
    """
    check_suffix(path)
    suffix = Path(path).suffix.lower()
    if suffix in IMAGE_SUFFIXES:
        draw_png(timelines, path)
    elif suffix == ".html":
        draw_html(timelines, path)
    else:
        with whole_file(path) as temporary:
            temporary.write_text(json.dumps(chrome_trace(timelines)) + "\n", encoding="utf-8")


def draw_png(timelines: Sequence[Timeline], path: str | Path) -> None:
    """Draw a picture: PNG, or SVG or PDF when `path` ends so. Raises UserError when the file cannot be written."""
    from helixpipe.draw.picture import picture  # matplotlib takes a second to import: only who draws waits for it

    figure = picture(_some(timelines))
    suffix = Path(path).suffix.lower()
    kind = suffix[1:] if suffix in IMAGE_SUFFIXES else "png"
    with whole_file(path) as temporary:
        figure.savefig(temporary, format=kind, dpi=150)


def draw_html(timelines: Sequence[Timeline], path: str | Path) -> None:
    """Write one self-contained page: zoom, pan, and what each op was and waited for.

    Raises UserError when the file cannot be written.
    """
    with whole_file(path) as temporary:
        temporary.write_text(html_page(timelines), encoding="utf-8")


def html_page(timelines: Sequence[Timeline]) -> str:
    """The page that `draw_html` writes. It loads nothing: its policy forbids it."""
    data = {
        "kinds": {kind: {"name": style.name, "colour": style.colour} for kind, style in KIND_STYLES.items()},
        "idle": IDLE_COLOUR,
        "timelines": [
            {
                "title": heading(timeline),
                "ranks": timeline.num_ranks,
                "unit": timeline.unit,
                "makespan": timeline.makespan,
                "bubble": rank_bubbles(timeline),
                "chunked": is_chunked(timeline),
                "ops": [[e.rank, *e.op, _short(e.start), _short(e.end)] for e in timeline.ops],
                "messages": [
                    [m.kind, m.source, m.target, str(m.producer), str(m.consumer), _short(m.start), _short(m.end)]
                    for m in timeline.messages
                ],
            }
            for timeline in _some(timelines)
        ],
    }
    fields = {
        "TITLE": html.escape(" / ".join(timeline.title for timeline in timelines)),
        "SCALE": html.escape(scale_note(timelines).capitalize()),
        # `<` could end the script element or open a comment in it; JSON may write it as an escape wherever it occurs.
        "DATA": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    }
    template = (resources.files("helixpipe.draw") / "timeline.html").read_text(encoding="utf-8")
    return re.sub(r"@@(TITLE|SCALE|DATA)@@", lambda match: fields[match[1]], template)


def chrome_trace(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Timelines in the Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

    One process a timeline, one thread a rank, a complete event an op, a flow a message. Timestamps are microseconds; a
    timeline without unit is shown with 1 as 1 ms.
    """
    events: list[dict[str, Any]] = []
    flows = 0
    for pid, timeline in enumerate(_some(timelines)):
        scale = 1e6 if timeline.unit == "s" else 1e3
        name = timeline.title if timeline.unit == "s" else f"{timeline.title}, 1 shown as 1 ms"
        events.append(_metadata("process_name", pid, 0, name))
        events.append(_metadata("process_sort_index", pid, 0, pid))
        for rank in range(timeline.num_ranks):
            events.append(_metadata("thread_name", pid, rank, f"rank {rank}"))
            events.append(_metadata("thread_sort_index", pid, rank, rank))
        by_op: dict[Op, OpEvent] = {}
        for event in timeline.ops:
            by_op[event.op] = event
            kind, stage, microbatch, chunk = event.op
            args = {"kind": KIND_STYLES[kind].name, "stage": stage, "microbatch": microbatch, "chunk": chunk}
            where = {"pid": pid, "tid": event.rank, "ts": event.start * scale}
            duration = max(event.end - event.start, 0.0) * scale
            events.append({"ph": "X", "name": str(event.op), "cat": kind, **where, "dur": duration, "args": args})
        for message in timeline.messages:
            producer, consumer = by_op.get(message.producer), by_op.get(message.consumer)
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


def _some(timelines: Sequence[Timeline]) -> Sequence[Timeline]:
    if not timelines:
        raise UserError("there is no timeline to draw.")
    return timelines


def _metadata(kind: str, pid: int, tid: int, value: str | int) -> dict[str, Any]:
    key = "sort_index" if kind.endswith("sort_index") else "name"
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {key: value}}


def _short(value: float) -> float:
    return float(f"{value:.10g}")
