"""Numbers in the boxes of a picture: what they say, how wide it must be for them, and how many are drawn at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.textpath import TextPath
from matplotlib.transforms import Affine2D

from helixpipe.draw.style import is_chunked, text_of
from helixpipe.program.timeline import Timeline

DIGIT, AROUND = 0.64, 0.25
"""Shares of the font size: the width of a digit, and the free space beside a label."""

SMALL, READABLE, LARGE = 5.0, 5.5, 10.0
"""Points: no number is smaller than the first or larger than the last, and a picture grows for the second."""

CROWDED = 0.02
"""Share of the boxes that may be too narrow for their number."""

AS_TEXT = 3000
"""More numbers than that take seconds to draw one by one: their outlines are drawn at many places at once."""

DENSE = 5000
"""More are a bitmap inside an SVG or PDF."""

MOST = 50_000
"""More boxes than that are an overview, without numbers."""


class Label(NamedTuple):
    """Text in the middle of a box, in the axes' coordinates. dark: the ink."""

    text: str
    x: float
    y: float
    dark: bool


def width_at(text: str, size: float) -> float:
    """Return the points that a label takes at a font size."""
    return (DIGIT * len(text) + AROUND) * size


def font_size(texts: Sequence[str], points: Sequence[float], height: float) -> float | None:
    """Return one font size in points for all boxes of these widths and this height; None if little could be read."""
    rooms = [width / width_at(text, 1.0) for text, width in zip(texts, points, strict=True)]
    size = min(LARGE, height * 0.7, max(READABLE, float(np.quantile(rooms, CROWDED))))
    return size if size >= SMALL else None


def points_for(timeline: Timeline) -> float:
    """Return the points of the time axis for a unit of time with which nearly every op has room for its label; 0 if
    there are too many of them, or none takes time.
    """
    if len(timeline.ops) > MOST:
        return 0.0
    chunked = is_chunked(timeline)
    needed = [
        width_at(text_of(event.op, chunked), READABLE) / (event.end - event.start)
        for event in timeline.ops
        if event.end > event.start
    ]
    return float(np.quantile(needed, 1 - CROWDED)) if needed else 0.0


def draw_labels(axes: Axes, labels: Sequence[Label], size: float) -> None:
    """Centred, dark or white. size: of the font, in points."""
    if len(labels) <= AS_TEXT:
        for label in labels:
            ink = "#111111" if label.dark else "white"
            axes.text(label.x, label.y, label.text, fontsize=size, color=ink, ha="center", va="center_baseline")
        return
    places = defaultdict[tuple[str, bool], list[tuple[float, float]]](list)
    for label in labels:
        places[label.text, label.dark].append((label.x, label.y))
    figure = axes.get_figure()
    assert figure is not None
    in_points = Affine2D().scale(1 / 72) + figure.dpi_scale_trans
    for (text, dark), offsets in places.items():
        written = TextPath((0, 0), text, size=size)
        box = written.get_extents()
        outline = written.transformed(Affine2D().translate(-(box.x0 + box.x1) / 2, -(box.y0 + box.y1) / 2))
        ink = "#111111" if dark else "white"
        drawn = PathCollection(
            [outline], offsets=offsets, offset_transform=axes.transData, facecolors=ink, linewidths=0
        )
        drawn.set_transform(in_points)
        drawn.set_rasterized(len(labels) > DENSE)
        drawn.set_gid(f"label {text}")
        axes.add_collection(drawn, autolim=False)
