"""The picture of timelines, with matplotlib: a row a rank, a box an op. Used through `timeline.draw`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from helixpipe.draw.labels import MOST, Label, draw_labels, font_size, points_for, width_at
from helixpipe.draw.style import (
    IDLE_COLOUR,
    KIND_STYLES,
    LANE_COLOUR,
    LANE_STYLES,
    LANES,
    copying_ranks,
    heading,
    is_chunked,
    lane_of,
    scale_note,
    text_of,
    time_scale,
)
from helixpipe.program.timeline import OpEvent, Timeline, TransferEvent, idle_shares

WIDTH, LEFT, RIGHT = 14.0, 0.8, 0.75  # inches: of the figure, where it has room for labels, and beside the axes
WIDEST, AREA, FLATTEST = 160.0, 1200.0, 10.0  # inches, square inches, width over height, of one that grows for them
LEGEND, TITLE, BELOW = 0.42, 0.32, 0.55  # inches: above all panels, above a panel, below a panel
ROW, ALL_ROWS = 0.42, 5.6  # inches: the tallest row, and the height that many rows share
LABELLED_ROW, FLATTEST_ROW = 0.12, 0.05  # inches: of many rows whose boxes are to have labels, and of very many
TALLEST = 200.0  # inches of rows that fit a bitmap
MAX_ARROWS = 64
MAX_VECTOR_BOXES = 5000  # more boxes are a bitmap inside an SVG or PDF
POINTS = 72.0
LANE, NAMED_LANE = 0.42, 7.0  # of a row: the height of a lane; points: of one whose name can be read

Colour = tuple[float, float, float]


class _RowPositions:
    """Positions of a timeline's rows from top to bottom, in heights of a rank's row, and of its lanes.

    middle: of each rank's row. total: height of all rows.
    """

    def __init__(self, timeline: Timeline):
        self.copying = copying_ranks(timeline)
        extra = [len(LANES) * LANE * (rank in self.copying) for rank in range(timeline.num_ranks)]
        *self.middle, after = accumulate((1 + lanes for lanes in extra), initial=0.0)
        self.total = after

    def lane(self, rank: int, lane: str) -> float:
        """Return the middle of a lane."""
        return self.middle[rank] + 0.5 + (LANES.index(lane) + 0.5) * LANE - 0.04


@dataclass(frozen=True)
class _Boxes:
    """Boxes of one height: what they show, where they lie, and their colours."""

    events: Sequence[OpEvent | TransferEvent]
    middles: Sequence[float]
    half: float
    colours: Sequence[Colour]


def picture(timelines: Sequence[Timeline], widest: float | None = None) -> Figure:
    """Return a figure with one panel a timeline, from top to bottom; timelines of one unit share a time scale. widest:
    inches that it may have, whatever its numbers would need.
    """
    rows = [_RowPositions(timeline) for timeline in timelines]
    totals = [each.total for each in rows]
    longest = {t.unit: max(other.makespan for other in timelines if other.unit == t.unit) or 1.0 for t in timelines}
    axis = max(points_for(timeline) * longest[timeline.unit] / POINTS for timeline in timelines)
    least = LABELLED_ROW if axis else FLATTEST_ROW
    row_height = min(ROW, max(ALL_ROWS / max(totals), least), TALLEST / sum(totals))
    heights = [each * row_height for each in totals]
    total = LEGEND + sum(TITLE + height + BELOW for height in heights)
    width = max(WIDTH, min(LEFT + axis + RIGHT, WIDEST, AREA / total, FLATTEST * total))
    width = width if widest is None else min(width, widest)
    figure = Figure(figsize=(width, total))
    _legend(figure, timelines, width, total)
    top = total - LEGEND
    for timeline, own, height in zip(timelines, rows, heights, strict=True):
        top -= TITLE + height
        box = (LEFT / width, top / total, (width - LEFT - RIGHT) / width, height / total)
        _panel(figure.add_axes(box), timeline, own, longest[timeline.unit], row_height * POINTS, width)
        top -= BELOW
    return figure


def _legend(figure: Figure, timelines: Sequence[Timeline], width: float, total: float) -> None:
    present = {event.op.kind for timeline in timelines for event in timeline.ops}
    handles = [
        Patch(color=style.colour, label=f"{kind} {style.name}")
        for kind, style in KIND_STYLES.items()
        if kind in present
    ]
    lanes = {lane_of(copy) for timeline in timelines for copy in timeline.copies}
    handles += [
        Patch(color=style.colour, label=f"{lane} {style.name}") for lane, style in LANE_STYLES.items() if lane in lanes
    ]
    handles.append(Patch(facecolor=IDLE_COLOUR, edgecolor="#b5b5b5", linewidth=0.6, label="idle"))
    place = (LEFT / width, 1 - 0.08 / total)
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=place, ncols=len(handles), frameon=False,
        fontsize=9, borderaxespad=0, borderpad=0, handlelength=1.3, columnspacing=1.4,
    )  # fmt: skip
    notes = [scale_note(timelines)]
    if any(len(stages) > 1 for timeline in timelines for stages in _stages_of_ranks(timeline)):
        notes.insert(0, "a rank's later stages lighter")
    text = "; ".join(note for note in notes if note)
    figure.text(1 - RIGHT / width, place[1], text, ha="right", va="top", fontsize=9, color="#555555")


def _panel(
    axes: Axes, timeline: Timeline, rows: _RowPositions, longest: float, row_points: float, width: float
) -> None:
    """Draw the panel of one timeline. width: of the figure, in inches."""
    factor, unit = time_scale(longest) if timeline.unit == "s" else (1.0, timeline.unit)
    points_per_time = (width - LEFT - RIGHT) * POINTS / (longest * factor)
    half = 0.41 if row_points >= 12 else 0.46

    span = timeline.makespan * factor
    axes.barh(rows.middle, span, height=2 * half, color=IDLE_COLOUR, linewidth=0)
    if rows.copying:
        middles = [rows.lane(rank, lane) for rank in rows.copying for lane in LANES]
        axes.barh(middles, span, height=2 * LANE * half, color=LANE_COLOUR, linewidth=0)
    for boxes in (_op_boxes(timeline, rows, half), _copy_boxes(timeline, rows, LANE * half)):
        if boxes.events:
            _draw(axes, boxes, factor, points_per_time)
            _numbers(axes, boxes, is_chunked(timeline), factor, points_per_time, row_points * 2 * boxes.half)
    if len(timeline.messages) <= MAX_ARROWS and row_points >= 20:
        _arrows(axes, timeline, rows, factor, half)

    axes.set_xlim(0, longest * factor)
    axes.set_ylim(rows.total - 0.5, -0.5)
    axes.set_title(_shorten(heading(timeline)), loc="left", fontsize=11, pad=6, parse_math=False)
    axes.set_xlabel(f"time ({unit})" if unit else "time (in the unit of the piece times)", fontsize=9, color="#555555")
    step = next(step for step in (1, 2, 4, 8, 16, 32, 64, 128, 256, 1 << 30) if row_points * step >= 10)
    shown = range(0, timeline.num_ranks, step)
    axes.set_yticks([rows.middle[rank] for rank in shown], [f"rank {rank}" for rank in shown], fontsize=9)
    if row_points * LANE >= NAMED_LANE:
        _name_lanes(axes, rows, row_points * LANE)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=9, color="#999999", labelcolor="#555555")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#999999")
    beside: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "center", "ha": "right", "clip_on": False}
    right = 1 + (RIGHT - 0.12) / (width - LEFT - RIGHT)
    bubbles = idle_shares(timeline.busy(), timeline.makespan)
    for rank in shown:
        axes.text(right, rows.middle[rank], f"{100 * bubbles[rank]:.1f} %", fontsize=9, color="#333333", **beside)
    axes.annotate(
        "bubble", (right, 1), (0, 6), "axes fraction", "offset points", ha="right", fontsize=9, color="#555555"
    )


def _name_lanes(axes: Axes, rows: _RowPositions, height: float) -> None:
    """Write the names of the lanes. height: of a lane, in points."""
    for rank in rows.copying:
        for lane in LANES:
            axes.annotate(
                lane, (0, rows.lane(rank, lane)), (-4, 0), axes.get_yaxis_transform(), "offset points",
                ha="right", va="center", fontsize=min(8.0, height * 0.75), color="#777777",
            )  # fmt: skip


def _op_boxes(timeline: Timeline, rows: _RowPositions, half: float) -> _Boxes:
    shades = _shades(timeline)
    colours = [shades[event.rank, event.op.stage, event.op.kind] for event in timeline.ops]
    return _Boxes(timeline.ops, [rows.middle[event.rank] for event in timeline.ops], half, colours)


def _copy_boxes(timeline: Timeline, rows: _RowPositions, half: float) -> _Boxes:
    colours = {lane: to_rgb(style.colour) for lane, style in LANE_STYLES.items()}
    lanes = [lane_of(copy) for copy in timeline.copies]
    middles = [rows.lane(copy.source, lane) for copy, lane in zip(timeline.copies, lanes, strict=True)]
    return _Boxes(timeline.copies, middles, half, [colours[lane] for lane in lanes])


def _draw(axes: Axes, boxes: _Boxes, factor: float, points_per_time: float) -> None:
    start = np.array([event.start for event in boxes.events]) * factor
    end = np.array([event.end for event in boxes.events]) * factor
    middle, half = np.array(boxes.middles, dtype=float), boxes.half
    corners = np.stack(
        [
            np.stack([start, middle - half], axis=-1),
            np.stack([end, middle - half], axis=-1),
            np.stack([end, middle + half], axis=-1),
            np.stack([start, middle + half], axis=-1),
        ],
        axis=1,
    )
    roomy = float(np.median(end - start)) * points_per_time > 4
    dense = len(boxes.events) > MAX_VECTOR_BOXES
    collection = PolyCollection(
        list(corners),
        facecolors=np.array(boxes.colours),
        edgecolors="white" if roomy else "none",
        linewidths=0.7 if roomy else 0,
        antialiaseds=roomy or not dense,
        rasterized=dense,
    )
    axes.add_collection(collection, autolim=False)


def _numbers(axes: Axes, boxes: _Boxes, chunked: bool, factor: float, points_per_time: float, height: float) -> None:
    """Draw the microbatch (with chunks `5.1`) in every box with room for it, all in one size. height: of a box, in
    points.
    """
    if len(boxes.events) > MOST:
        return
    texts = [text_of(event.op, chunked) for event in boxes.events]
    widths = [(event.end - event.start) * factor * points_per_time for event in boxes.events]
    size = font_size(texts, widths, height)
    if size is None:
        return
    labels = [
        Label(text, (event.start + event.end) / 2 * factor, middle, _lightness(shade) > 0.30)
        for event, text, width, shade, middle in zip(
            boxes.events, texts, widths, boxes.colours, boxes.middles, strict=True
        )
        if width >= width_at(text, size)
    ]
    draw_labels(axes, labels, size)


def _arrows(axes: Axes, timeline: Timeline, rows: _RowPositions, factor: float, half: float) -> None:
    style = {"arrowstyle": "-|>", "linewidth": 0.6, "color": "#444444", "shrinkA": 0, "shrinkB": 0, "mutation_scale": 5}
    for message in timeline.messages:
        down = 1 if message.target > message.source else -1
        tail = (message.start * factor, rows.middle[message.source] + down * half)
        head = (message.end * factor, rows.middle[message.target] - down * half)
        axes.annotate("", head, tail, arrowprops=style)


def _shades(timeline: Timeline) -> dict[tuple[int, int, str], Colour]:
    """Return the colour of each rank, stage and kind: the kind's own for the rank's first stage, paler for its later
    ones.
    """
    shades = {}
    for rank, stages in enumerate(_stages_of_ranks(timeline)):
        for index, stage in enumerate(stages):
            pale = 0.5 * index / max(len(stages) - 1, 1)
            for kind, style in KIND_STYLES.items():
                red, green, blue = (channel + (1 - channel) * pale for channel in to_rgb(style.colour))
                shades[rank, stage, kind] = (red, green, blue)
    return shades


def _stages_of_ranks(timeline: Timeline) -> list[list[int]]:
    stages: list[set[int]] = [set() for _ in range(timeline.num_ranks)]
    for event in timeline.ops:
        stages[event.rank].add(event.op.stage)
    return [sorted(own) for own in stages]


def _lightness(colour: Colour) -> float:
    """Relative luminance (WCAG), 0 black to 1 white."""
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _shorten(text: str, limit: int = 150) -> str:
    return text if len(text) <= limit else text[: limit // 2] + " … " + text[-limit // 2 :]
