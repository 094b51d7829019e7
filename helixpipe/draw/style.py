"""Defines the colours, headings and units that all formats of a timeline share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from helixpipe.program.program import Op
from helixpipe.program.timeline import Timeline, TransferEvent
from helixpipe.program.transfer import TRANSFER_KINDS


class KindStyle(NamedTuple):
    """The look of one kind of op: colours differ in hue for the colour-blind and in lightness for a grey print."""

    name: str
    colour: str


KIND_STYLES: Mapping[str, KindStyle] = MappingProxyType(
    {
        "F": KindStyle("forward", "#8cc5ec"),
        "B": KindStyle("backward", "#9b3412"),
        "I": KindStyle("input gradient", "#d9822b"),
        "W": KindStyle("weight gradient", "#237a68"),
        "R": KindStyle("recompute", "#f0e39a"),
    }
)
IDLE_COLOUR = "#ececec"

LANES = ("out", "in")
"""The lanes of a rank that copies, from top to bottom: to the host, and back."""

TRANSFER_STYLES: Mapping[str, KindStyle] = MappingProxyType(
    {kind: KindStyle(row.label, row.colour) for kind, row in TRANSFER_KINDS.items()}
)
"""Transfers in the lane of their link, group or copy engine: as ops that make or take what they move, muted."""

LANE_STYLES: Mapping[str, KindStyle] = MappingProxyType(
    {"out": TRANSFER_STYLES["offload"], "in": TRANSFER_STYLES["fetch"]}
)
LANE_COLOUR = "#f6f6f6"
"""The colour of a lane where nothing is copied."""


def lane_of(copy: TransferEvent) -> str:
    return LANES[copy.resource == "copy_in"]


def copying_ranks(timeline: Timeline) -> list[int]:
    """Return the ranks that have lanes."""
    return sorted({copy.source for copy in timeline.copies})


def heading(timeline: Timeline) -> str:
    """Return `1f1b: 4 ranks, 8 microbatches, makespan 396, bubble 27.3 %`."""
    microbatches = len({event.op.microbatch for event in timeline.ops})
    return (
        f"{timeline.title}: {count(timeline.num_ranks, 'rank')}, {count(microbatches, 'microbatch', 'microbatches')}, "
        f"makespan {duration_text(timeline.makespan, timeline.unit)}, bubble {100 * timeline.bubble:.1f} %"
    )


def is_chunked(timeline: Timeline) -> bool:
    return any(event.op.chunk for event in timeline.ops)


def text_of(op: Op, chunked: bool) -> str:
    """Return the microbatch, with chunks `5.1`."""
    return f"{op.microbatch}.{op.chunk}" if chunked else str(op.microbatch)


def scale_note(timelines: Sequence[Timeline]) -> str:
    """Return how the time axes compare; empty for one timeline."""
    units = [timeline.unit for timeline in timelines]
    if len(units) < 2:
        return ""
    if len(set(units)) == 1:
        return "all on the same time scale"
    alone = "lengths compare only between timelines of the same unit"
    return alone if len(set(units)) < len(units) else "each on its own time scale: lengths do not compare"


def duration_text(value: float, unit: str) -> str:
    """Return a time with its unit, for people: `396`, `1.25 s`, `12.5 ms`."""
    if unit == "s":
        scale, unit = time_scale(value)
        return f"{value * scale:.4g} {unit}"
    return f"{value:.6g}{' ' + unit if unit else ''}"


def time_scale(seconds: float) -> tuple[float, str]:
    """Return the factor and unit that make a number of seconds readable."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return factor, unit
    return (1e6, "µs") if seconds else (1.0, "s")


def count(number: int, one: str, many: str = "") -> str:
    """Return `1 rank`, `4 ranks`."""
    return f"{number} {one if number == 1 else many or one + 's'}"
