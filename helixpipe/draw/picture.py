"""The picture of timelines, with matplotlib: a row a rank, a box an op. Used through `timeline.draw`. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from helixpipe.draw.style import IDLE_COLOUR, KIND_STYLES, heading, is_chunked, rank_bubbles, scale_note, time_scale
from helixpipe.program.timeline import OpEvent, Timeline

WIDTH, LEFT, RIGHT = 14.0, 0.8, 0.75  # inches: of the figure, and beside the axes
LEGEND, TITLE, BELOW = 0.42, 0.32, 0.55  # inches: above all panels, above a panel, below a panel
ROW, ALL_ROWS = 0.42, 5.6  # inches: the tallest row, and the height that many rows share
TALLEST = 200.0  # inches of rows that fit a bitmap
MAX_TEXTS = 3000  # more numbers than that take seconds to draw and cannot be read
MAX_ARROWS = 64
MAX_VECTOR_BOXES = 5000  # more boxes are a bitmap inside an SVG or PDF
POINTS = 72.0


def picture(timelines: Sequence[Timeline]) -> Figure:
    """A figure with one panel a timeline, from top to bottom; timelines of one unit share a time scale."""
    ranks = [timeline.num_ranks for timeline in timelines]
    row_height = min(ROW, max(ALL_ROWS / max(ranks), 0.05), TALLEST / sum(ranks))
    heights = [t.num_ranks * row_height for t in timelines]
    total = LEGEND + sum(TITLE + height + BELOW for height in heights)
    figure = Figure(figsize=(WIDTH, total))
    _legend(figure, timelines, total)
    longest = {t.unit: max(other.makespan for other in timelines if other.unit == t.unit) or 1.0 for t in timelines}
    top = total - LEGEND
    for timeline, height in zip(timelines, heights, strict=True):
        top -= TITLE + height
        box = (LEFT / WIDTH, top / total, (WIDTH - LEFT - RIGHT) / WIDTH, height / total)
        _panel(figure.add_axes(box), timeline, longest[timeline.unit], row_height * POINTS)
        top -= BELOW
    return figure


def _legend(figure: Figure, timelines: Sequence[Timeline], total: float) -> None:
    present = {event.op.kind for timeline in timelines for event in timeline.ops}
    handles = [
        Patch(color=style.colour, label=f"{kind} {style.name}")
        for kind, style in KIND_STYLES.items()
        if kind in present
    ]
    handles.append(Patch(facecolor=IDLE_COLOUR, edgecolor="#b5b5b5", linewidth=0.6, label="idle"))
    place = (LEFT / WIDTH, 1 - 0.08 / total)
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=place, ncols=len(handles), frameon=False,
        fontsize=9, borderaxespad=0, borderpad=0, handlelength=1.3, columnspacing=1.4,
    )  # fmt: skip
    notes = [scale_note(timelines)]
    if any(len(stages) > 1 for timeline in timelines for stages in _stages_of_ranks(timeline)):
        notes.insert(0, "a rank's later stages lighter")
    text = "; ".join(note for note in notes if note)
    figure.text(1 - RIGHT / WIDTH, place[1], text, ha="right", va="top", fontsize=9, color="#555555")


def _panel(axes: Axes, timeline: Timeline, longest: float, row_points: float) -> None:
    factor, unit = time_scale(longest) if timeline.unit == "s" else (1.0, timeline.unit)
    points_per_time = (WIDTH - LEFT - RIGHT) * POINTS / (longest * factor)
    half = 0.41 if row_points >= 12 else 0.46

    ranks = np.arange(timeline.num_ranks)
    span = timeline.makespan * factor
    axes.barh(ranks, span, height=2 * half, color=IDLE_COLOUR, linewidth=0)
    if timeline.ops:
        _boxes(axes, timeline, factor, points_per_time, half)
        _numbers(axes, timeline, factor, points_per_time, row_points * 2 * half)
    if len(timeline.messages) <= MAX_ARROWS and row_points >= 20:
        _arrows(axes, timeline, factor, half)

    axes.set_xlim(0, longest * factor)
    axes.set_ylim(timeline.num_ranks - 0.5, -0.5)
    axes.set_title(_shorten(heading(timeline)), loc="left", fontsize=11, pad=6, parse_math=False)
    axes.set_xlabel(f"time ({unit})" if unit else "time (in the unit of the piece times)", fontsize=9, color="#555555")
    step = next(step for step in (1, 2, 4, 8, 16, 32, 64, 128, 256, 1 << 30) if row_points * step >= 10)
    shown = list(ranks[::step])
    axes.set_yticks(shown, [f"rank {rank}" for rank in shown], fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=9, color="#999999", labelcolor="#555555")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#999999")
    beside: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "center", "ha": "right", "clip_on": False}
    right = 1 + (RIGHT - 0.12) / (WIDTH - LEFT - RIGHT)
    bubbles = rank_bubbles(timeline)
    for rank in shown:
        axes.text(right, rank, f"{100 * bubbles[rank]:.1f} %", fontsize=9, color="#333333", **beside)
    axes.annotate(
        "bubble", (right, 1), (0, 6), "axes fraction", "offset points", ha="right", fontsize=9, color="#555555"
    )


def _boxes(axes: Axes, timeline: Timeline, factor: float, points_per_time: float, half: float) -> None:
    start = np.array([event.start for event in timeline.ops]) * factor
    end = np.array([event.end for event in timeline.ops]) * factor
    rank = np.array([event.rank for event in timeline.ops], dtype=float)
    corners = np.stack(
        [
            np.stack([start, rank - half], axis=-1),
            np.stack([end, rank - half], axis=-1),
            np.stack([end, rank + half], axis=-1),
            np.stack([start, rank + half], axis=-1),
        ],
        axis=1,
    )
    shades = _shades(timeline)
    colours = np.array([shades[event.rank, event.op.stage, event.op.kind] for event in timeline.ops])
    roomy = float(np.median(end - start)) * points_per_time > 4
    dense = len(timeline.ops) > MAX_VECTOR_BOXES
    collection = PolyCollection(
        list(corners),
        facecolors=colours,
        edgecolors="white" if roomy else "none",
        linewidths=0.7 if roomy else 0,
        antialiaseds=roomy or not dense,
        rasterized=dense,
    )
    axes.add_collection(collection, autolim=False)


def _numbers(axes: Axes, timeline: Timeline, factor: float, points_per_time: float, height: float) -> None:
    """The microbatch (with chunks `5.1`) in every box with room for it, all in one size."""
    if len(timeline.ops) > MAX_TEXTS:
        return
    chunked = is_chunked(timeline)

    def label(event: OpEvent) -> str:
        return f"{event.op.microbatch}.{event.op.chunk}" if chunked else str(event.op.microbatch)

    # A digit is 0.64 of the font size wide; each box says which size it has room for.
    rooms = [(e.end - e.start) * factor * points_per_time / (0.64 * len(label(e)) + 0.25) for e in timeline.ops]
    size = min(10.0, height * 0.7, max(5.5, float(np.quantile(rooms, 0.02))))
    if size < 5:
        return
    shades = _shades(timeline)
    for event, room in zip(timeline.ops, rooms, strict=True):
        if room >= size:
            shade = shades[event.rank, event.op.stage, event.op.kind]
            middle = (event.start + event.end) / 2 * factor
            ink = "#111111" if _lightness(shade) > 0.30 else "white"
            axes.text(middle, event.rank, label(event), fontsize=size, color=ink, ha="center", va="center_baseline")


def _arrows(axes: Axes, timeline: Timeline, factor: float, half: float) -> None:
    style = {"arrowstyle": "-|>", "linewidth": 0.6, "color": "#444444", "shrinkA": 0, "shrinkB": 0, "mutation_scale": 5}
    for message in timeline.messages:
        down = 1 if message.target > message.source else -1
        tail = (message.start * factor, message.source + down * half)
        head = (message.end * factor, message.target - down * half)
        axes.annotate("", head, tail, arrowprops=style)


def _shades(timeline: Timeline) -> dict[tuple[int, int, str], tuple[float, float, float]]:
    """The colour of each rank, stage and kind: the kind's own for the rank's first stage, paler for its later ones."""
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


def _lightness(colour: tuple[float, float, float]) -> float:
    """Relative luminance (WCAG), 0 black to 1 white."""
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _shorten(text: str, limit: int = 150) -> str:
    return text if len(text) <= limit else text[: limit // 2] + " … " + text[-limit // 2 :]
